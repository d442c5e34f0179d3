"""`cdna-simulator compile`: a HIP file to a code object on a plain Debian, without ROCm.

The compiler is clang (22 or later). HIP's headers are used where the distribution (libamdhip64-dev)
or ROCm has them; without them a file gets `__global__`, `__device__` and `__shared__` alone. The
device libraries are ROCm's, the distribution's (rocm-device-libs) or those of a Triton wheel; the
one that a new target lacks, a constant, is made.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

from . import _build

INCLUDE = pathlib.Path(__file__).parent / "include"


def _libraries() -> pathlib.Path | None:
    rocm = pathlib.Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    places = [
        rocm / "amdgcn" / "bitcode",
        pathlib.Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode"),
        pathlib.Path("/usr/lib/amdgcn/bitcode"),
    ]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        places.append(pathlib.Path(triton.origin).parent / "backends" / "amd" / "lib")
    return next((p for p in places if (p / "ocml.bc").exists()), None)


def _version(target: str) -> int:
    """The number of a target in the libraries: gfx942 is 9402, gfx90a 9010."""
    major, minor, stepping = re.fullmatch(r"gfx(\d+)(.)(.)", target).groups()
    return int(major) * 1000 + int(minor, 16) * 100 + int(stepping, 16)


def _completed(libraries: pathlib.Path, target: str) -> pathlib.Path:
    """A folder of links to `libraries`, with the constant of `target` made where it is missing."""
    name = f"oclc_isa_version_{target.removeprefix('gfx')}.bc"
    if (libraries / name).exists():
        return libraries
    folder = _build._build_root() / "device-libraries"
    folder.mkdir(parents=True, exist_ok=True)
    for library in libraries.glob("*.bc"):
        if not (folder / library.name).exists():
            (folder / library.name).symlink_to(library)
    if not (folder / name).exists():
        text = (
            "@__oclc_ISA_version = linkonce_odr hidden local_unnamed_addr addrspace(4) "
            f"constant i32 {_version(target)}, align 4\n"
        )
        partial = folder / f"{name}.{os.getpid()}"
        assembler = _build.find_tool("llvm-as-22", "llvm-as")
        subprocess.run([assembler, "-", "-o", str(partial)], input=text, text=True, check=True)
        partial.rename(folder / name)
    return folder


def command(source: pathlib.Path, output: pathlib.Path, target: str, flags=()) -> list[str]:
    """The compiler's command for the code object of `source`."""
    compiler = _build.find_tool("clang++-22", "clang++")
    generic = not re.fullmatch(r"gfx\d+..", target)
    libraries = None if generic else _libraries()
    rocm = pathlib.Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    roots = [r for r in (rocm, pathlib.Path("/usr")) if (r / "include/hip/hip_runtime.h").exists()]
    words = [compiler, "-x", "hip", "-std=c++17", "-O3", "-g", f"--offload-arch={target}",
             "--offload-device-only", "--no-gpu-bundle-output",
             "-D__AMDGCN_WAVEFRONT_SIZE=64", "-Wno-macro-redefined",
             "-Wno-unused-command-line-argument"]  # fmt: skip
    words += ["-idirafter", str(INCLUDE)]
    if roots:
        words += [f"--rocm-path={roots[0]}", "-include", str(INCLUDE / "simulator_hip.h")]
    else:
        words += ["-nogpuinc", "-include", str(INCLUDE / "without_hip.h")]
    if libraries:
        words += ["-mcode-object-version=5"]
        words += [f"--rocm-device-lib-path={_completed(libraries, target)}"]
    else:
        words += ["-nogpulib"]
    return [*words, *flags, "-c", str(source), "-o", str(output)]


def compile_file(
    source: str | os.PathLike,
    output: str | os.PathLike | None = None,
    target: str = "gfx942",
    flags=(),
) -> pathlib.Path:
    """Compiles a HIP file and returns the code object's path: `output`, else FILE.co.

    flags: further ones for clang, after those that are always there (-O3 -g).
    RuntimeError holds the compiler's words when the file does not compile.
    """
    source = pathlib.Path(source)
    if not source.exists():
        raise FileNotFoundError(f"there is no file {source}")
    output = pathlib.Path(output) if output else source.with_suffix(".co")
    done = subprocess.run(command(source, output, target, flags), capture_output=True, text=True)
    if done.returncode:
        missing = "" if shutil.which("ld.lld") or shutil.which("lld-22") else (
            "\nclang links with lld: install lld-22")  # fmt: skip
        raise RuntimeError(f"{source} does not compile:\n{done.stderr}{missing}")
    return output
