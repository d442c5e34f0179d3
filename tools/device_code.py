"""Which GPU targets an extension really holds code for, read from the binary.

HIP: `.hip_fatbin` holds one clang offload bundle a translation unit, with one ELF code object a
target; each must be an AMD GPU object with the machine number of its target, and hold a kernel.
CUDA: `.nv_fatbin` holds one or more containers a translation unit, with machine code (a cubin) or
PTX for each target. Their layout is not documented; the fields read here (kind, size, architecture)
are those that `cuobjdump --list-elf` lists, which tests compare where it is installed.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

from elftools.elf.elffile import ELFFile

_BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED_MAGIC = b"CCOB"
# The low byte of an AMD GPU object's e_flags, of AMDGPU's ELF specification in LLVM.
_AMDGPU_MACHINES = {
    "gfx90a": 0x3F,
    "gfx942": 0x4C,
    "gfx950": 0x4F,
    "gfx1100": 0x41,
    "gfx1201": 0x4E,
}
_CUDA_CONTAINER_MAGIC = 0xBA55ED50
_CUDA_PTX, _CUDA_CUBIN = 1, 2
_CUDA_ARCH_SPECIFIC = 0x100000  # of an entry's flags: sm_90a, not sm_90


def units(extension: Path, backend: str) -> list[set[str]]:
    """Targets held by each translation unit: ``gfx942``, or ``9.0a`` and ``12.0+PTX``.

    Raises:
        ValueError: the device code is malformed, or is not what its label says.
    """
    with open(extension, "rb") as file:
        elf = ELFFile(file)
        section = elf.get_section_by_name(".hip_fatbin" if backend == "rocm" else ".nv_fatbin")
        data = section.data() if section else b""
    return _hip_units(data) if backend == "rocm" else _cuda_units(data)


def _hip_units(data: bytes) -> list[set[str]]:
    if data.startswith(_COMPRESSED_MAGIC):
        raise ValueError("compressed device code is not read; build without --offload-compress")
    found = []
    start = data.find(_BUNDLE_MAGIC)
    while start >= 0:
        (count,) = struct.unpack_from("<Q", data, start + len(_BUNDLE_MAGIC))
        at = start + len(_BUNDLE_MAGIC) + 8
        targets = set()
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", data, at)
            label = data[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if label.startswith("host"):
                continue
            target = label.rpartition("--")[2] or label.rpartition("-")[2]
            _check_code_object(data[start + offset : start + offset + size], target)
            targets.add(target)
        found.append(targets)
        start = data.find(_BUNDLE_MAGIC, at)
    return found


def _check_code_object(content: bytes, target: str) -> None:
    elf = ELFFile(io.BytesIO(content))
    machine = elf["e_flags"] & 0xFF
    if elf["e_machine"] != "EM_AMDGPU" or machine != _AMDGPU_MACHINES.get(target):
        raise ValueError(f"the code object of {target} is for {elf['e_machine']} {machine:#x}")
    symbols = elf.get_section_by_name(".dynsym")
    if not any(symbol.name.endswith(".kd") for symbol in symbols.iter_symbols()):
        raise ValueError(f"the code object of {target} holds no kernel")


def _cuda_units(data: bytes) -> list[set[str]]:
    found = []
    at = 0
    while at + 16 <= len(data):
        magic, _, header_size, size = struct.unpack_from("<IHHQ", data, at)
        if magic != _CUDA_CONTAINER_MAGIC:
            at += 4  # padding between containers
            continue
        entry, end = at + header_size, at + header_size + size
        cubins, ptx = set(), set()
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            (flags,) = struct.unpack_from("<I", data, entry + 40)
            number = f"{arch // 10}.{arch % 10}" + ("a" if flags & _CUDA_ARCH_SPECIFIC else "")
            if kind == _CUDA_CUBIN:
                cubins.add(number)
            elif kind == _CUDA_PTX:
                ptx.add(number)
            else:
                raise ValueError(f"unknown kind of device code: {kind}")
            entry += entry_header + payload
        if ptx - cubins:
            raise ValueError(f"PTX alone, no machine code, for {sorted(ptx - cubins)}")
        found.append({f"{number}+PTX" if number in ptx else number for number in cubins})
        at = end
    return [targets for targets in found if targets]
