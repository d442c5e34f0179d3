"""The HIP toolchain: finds it, and gives compile and link commands for our .hip files.

Two kinds are known:

* a ROCm installation (``ROCM_PATH``, ``/opt/rocm``): its own ``clang++``, nothing added;
* a plain LLVM (``clang++-22`` and later) beside a distribution's HIP headers and device libraries,
  which cross-compiles on a machine that has neither ROCm nor an AMD GPU. Distributions pair new
  compilers with device libraries that predate the newest targets; the one file that such a target
  lacks (a constant naming its instruction set) is assembled into ``build/rocm-device-libs``.

As a script it prints what it found: ``python tools/rocm.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Every target that the package is built for; the first is the one that the simulator runs.
TARGETS = ("gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1201")

_DEVICE_LIBRARIES = (
    Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode"),
    Path("/usr/lib/aarch64-linux-gnu/amdgcn/bitcode"),
    Path("/usr/lib/amdgcn/bitcode"),
)
_OLDEST_LLVM = 22


class ToolchainMissing(RuntimeError):
    """No compiler for AMD GPUs is installed; the message says what to install."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler with the flags that every HIP compilation needs, and its binary utilities."""

    compiler: str
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    readelf: str
    objdump: str
    description: str

    def compile_command(
        self,
        source: Path | str,
        output: Path | str,
        targets: tuple[str, ...] = TARGETS,
        *,
        extra: tuple[str, ...] = (),
    ) -> list[str]:
        """Host object with a fat binary of device code for `targets`, position independent."""
        archs = [f"--offload-arch={target}" for target in targets]
        return [self.compiler, *self.flags, *archs, *extra, "-fPIC", "-c", str(source), "-o",
                str(output)]  # fmt: skip

    def device_command(
        self,
        source: Path | str,
        output: Path | str,
        target: str,
        *,
        assembly: bool = False,
        extra: tuple[str, ...] = (),
    ) -> list[str]:
        """Bare code object (ELF) of one target, or its assembly text."""
        mode = ["-S"] if assembly else ["--no-gpu-bundle-output", "-c"]
        return [self.compiler, *self.flags, f"--offload-arch={target}", "--offload-device-only",
                *mode, *extra, str(source), "-o", str(output)]  # fmt: skip

    def link_command(self, objects: list[Path | str], output: Path | str) -> list[str]:
        """Shared library of host objects with device code in them."""
        return [self.compiler, "--hip-link", "-shared", *map(str, objects), *self.link_flags,
                "-lamdhip64", "-o", str(output)]  # fmt: skip


_COMMON_FLAGS = ("-x", "hip", "-std=c++17", "-O3", "-Wall", "-Wextra", "-g1")


def find_toolchain() -> Toolchain:
    """The toolchain of this machine; raises ToolchainMissing with advice if there is none."""
    return _rocm_installation() or _distribution_llvm()


def _rocm_installation() -> Toolchain | None:
    root = Path(os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or "/opt/rocm")
    compiler = root / "llvm" / "bin" / "clang++"
    if not compiler.exists():
        return None
    binaries = compiler.parent
    return Toolchain(
        compiler=str(compiler),
        flags=(*_COMMON_FLAGS, f"--rocm-path={root}"),
        link_flags=(f"--rocm-path={root}", f"-L{root / 'lib'}"),
        readelf=str(binaries / "llvm-readelf"),
        objdump=str(binaries / "llvm-objdump"),
        description=f"ROCm at {root}",
    )


def _distribution_llvm() -> Toolchain:
    compiler, suffix = _newest_clang()
    libraries = next((path for path in _DEVICE_LIBRARIES if (path / "ocml.bc").exists()), None)
    headers = Path("/usr/include/hip/hip_runtime.h")
    if compiler is None or libraries is None or not headers.exists():
        raise ToolchainMissing(
            "no HIP compiler found: install ROCm, or (Debian) "
            f"clang-{_OLDEST_LLVM} lld-{_OLDEST_LLVM} llvm-{_OLDEST_LLVM} libamdhip64-dev "
            f"rocm-device-libs; found clang++: {compiler}, device libraries: {libraries}, "
            f"{headers}: {headers.exists()}"
        )
    completed = _complete_device_libraries(libraries, suffix)
    flags = (
        *_COMMON_FLAGS,
        # Not with ROCm's own compiler: its next release warns of something else.
        "-Werror",
        "--rocm-path=/usr",
        f"--rocm-device-lib-path={completed}",
        # HIP 5 headers name a macro that newer compilers no longer define on the host.
        "-D__AMDGCN_WAVEFRONT_SIZE=64",
        "-Wno-macro-redefined",
        "-Wno-unused-command-line-argument",
        "-mcode-object-version=5",
    )
    return Toolchain(
        compiler=compiler,
        flags=flags,
        link_flags=("--rocm-path=/usr",),
        readelf=f"llvm-readelf{suffix}",
        objdump=f"llvm-objdump{suffix}",
        description=f"{compiler}, HIP headers in /usr/include, device libraries in {libraries}",
    )


def _newest_clang() -> tuple[str | None, str]:
    for version in range(_OLDEST_LLVM + 8, _OLDEST_LLVM - 1, -1):
        if compiler := shutil.which(f"clang++-{version}"):
            return compiler, f"-{version}"
    return None, ""


def _complete_device_libraries(libraries: Path, suffix: str) -> Path:
    """A folder of links to `libraries`, with the instruction-set constants that it lacks."""
    folder = ROOT / "build" / "rocm-device-libs"
    folder.mkdir(parents=True, exist_ok=True)
    for library in libraries.glob("*.bc"):
        with contextlib.suppress(FileExistsError):  # another build may be making the same link
            (folder / library.name).symlink_to(library)
    model = libraries / "oclc_isa_version_90a.bc"
    for target in TARGETS:
        constant = folder / f"oclc_isa_version_{target.removeprefix('gfx')}.bc"
        if constant.exists():
            continue
        # gfx942 is 9402, gfx90a 9010, gfx1201 12001: major, minor, stepping in hexadecimal.
        major, minor, stepping = re.fullmatch(r"gfx(\d+)(.)(.)", target).groups()
        value = int(major) * 1000 + int(minor, 16) * 100 + int(stepping, 16)
        text = subprocess.run(
            [f"llvm-dis{suffix}", str(model), "-o", "-"], capture_output=True, text=True, check=True
        ).stdout.replace("constant i32 9010", f"constant i32 {value}")
        temporary = constant.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        subprocess.run(
            [f"llvm-as{suffix}", "-", "-o", str(temporary)], input=text, text=True, check=True
        )
        temporary.replace(constant)  # another build may be making the same file
    return folder


if __name__ == "__main__":
    toolchain = find_toolchain()
    print(toolchain.description)
    print(" ".join(toolchain.compile_command("FILE.hip", "FILE.o")))
