"""Every instruction that LLVM can decode for a target, and kernels that hold one of them each."""

from __future__ import annotations

import itertools
import re
import subprocess

import hipcc

import simulator

# Registers in the encodings below: v2 address, v4 and v6 data, v8 result, s[8:11] resource.
_VOP_SOURCES = 0x102 | 0x104 << 9 | 0x106 << 18
_BYTES = (0xFF, 0xFF00, 0xFF0000, 0xFF000000)
_UNUSED = [z for n in range(5) for z in itertools.combinations(_BYTES, n)]


def _encodings():
    """One or more candidates for each opcode of each format; most of them mean nothing."""
    for op in range(96):
        yield [0x80000000 | op << 23 | 8 << 16 | 6 << 8 | 4]  # SOP2
    for op in range(32):
        yield [0xB0000000 | op << 23 | 8 << 16 | 1]  # SOPK
    for op in range(256):
        yield [0xBE800000 | 8 << 16 | op << 8 | 4]  # SOP1
        yield [0xC0020000 | op << 18 | 8 << 6 | 2, 0]  # SMEM
        yield [0x7E000000 | 8 << 17 | op << 9 | 0x102]  # VOP1
        yield [0x7C000000 | op << 17 | 4 << 9 | 0x102]  # VOPC
        for unused in _UNUSED:  # DS
            yield [0xD8000000 | op << 17, (8 << 24 | 6 << 16 | 4 << 8 | 2) & ~sum(unused)]
    for op in range(128):
        yield [0xBF000000 | op << 16 | 6 << 8 | 4]  # SOPC
        yield [0xBF800000 | op << 16]  # SOPP
        yield [0xD3800000 | op << 16 | 8 | 1 << 14, _VOP_SOURCES | 3 << 27]  # VOP3P
        for lds in (0, 1 << 16):
            yield [
                0xE0000000 | op << 18 | 1 << 12 | lds,
                0x80 << 24 | 2 << 16 | 8 << 8 | 2,
            ]  # MUBUF
        for segment, unused, sc0, lds in itertools.product(range(3), _UNUSED, (0, 1), (0, 1)):
            base = 0x7F0000 if segment else 0  # no scalar base
            yield [0xDC000000 | op << 18 | sc0 << 16 | segment << 14 | lds << 13,
                   (8 << 24 | 4 << 8 | 2) & ~sum(unused) | base]  # fmt: skip
    for op in range(64):
        yield [op << 25 | 8 << 17 | 4 << 9 | 0x102]  # VOP2
    for op in range(16):
        yield [0xE8000000 | op << 15 | 1 << 12 | 4 << 19 | 7 << 23,
               0x80 << 24 | 2 << 16 | 8 << 8 | 2]  # MTBUF  # fmt: skip
    for op in range(1024):
        yield [0xD0000000 | op << 16 | 8, _VOP_SOURCES]  # VOP3


def instructions(target: str) -> dict[str, list[str]]:
    """Encodings as bytes in assembly, the first of each operand form, by plain mnemonic."""
    lines = []
    for words in _encodings():
        lines.append(" ".join(f"{w >> s & 255:#04x}" for w in words for s in (0, 8, 16, 24)))
    command = ["llvm-mc-22", "-disassemble", "-triple=amdgcn-amd-amdhsa", "--show-encoding"]
    shown = subprocess.run([*command, f"-mcpu={target}"], input="\n".join(lines), text=True,
                           capture_output=True).stdout  # fmt: skip
    found: dict[str, dict[tuple, str]] = {}
    for line in shown.splitlines():
        encoding = re.search(r"encoding: \[(.*?)\]", line)
        if not encoding or "Invalid" in line:
            continue
        text = line.split(";")[0].split()
        name = re.sub("_(e32|e64|sdwa|dpp)$", "", text[0])
        found.setdefault(name, {}).setdefault(len(text), f".byte {encoding[1]}")
    return {name: list(forms.values()) for name, forms in found.items()}


_KERNEL = """
.globl {0}
.p2align 8
{0}:
{1}
.section .rodata
.p2align 6
.amdhsa_kernel {0}
  .amdhsa_next_free_vgpr 64
  .amdhsa_next_free_sgpr 64
  .amdhsa_accum_offset 64
  .amdhsa_group_segment_fixed_size 8192
  .amdhsa_private_segment_fixed_size 4096
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
.end_amdhsa_kernel
.text
"""
_METADATA = """
  - .name: {0}
    .symbol: {0}.kd
    .kernarg_segment_size: 16
    .group_segment_fixed_size: 8192
    .private_segment_fixed_size: 4096
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 64
    .vgpr_count: 64
    .max_flat_workgroup_size: 64
    .args:
      - {{.offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}}
      - {{.offset: 8, .size: 8, .value_kind: global_buffer, .address_space: global}}
"""


def assembled(target: str, bodies: dict[str, str]) -> simulator.CodeObject:
    """Kernels by name from assembly; each gets two buffers, whose addresses are at s[0:1]."""
    text = f'.amdgcn_target "amdgcn-amd-amdhsa--{target}"\n.text\n'
    text += "".join(_KERNEL.format(name, body) for name, body in bodies.items())
    text += f""".amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{target}
amdhsa.kernels:{"".join(_METADATA.format(name) for name in bodies)}
...
.end_amdgpu_metadata
"""
    command = [hipcc.compiler(), "-x", "assembler", "-target", "amdgcn-amd-amdhsa"]
    return simulator.load(hipcc._cached(text, ".s", [*command, f"-mcpu={target}"], ".co"))
