"""Compiles the engine and the HIP stand-in, once for each state of their sources.

Libraries land in `<folder>/<hash>/`, so a changed source or compiler never meets an old library.
The folder is `$SIMULATOR_BUILD_DIR`, else `build/simulator/` beside the package in a checkout, and
`cdna-simulator/` in the user's cache where pip installed it.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

SOURCE = pathlib.Path(__file__).parent / "engine"
FLAGS = [
    "-std=c++20",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wno-unused-command-line-argument",
]


def find_tool(*names: str) -> str:
    """Path of the first of `names` that is installed; RuntimeError names what is missing."""
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError(f"required one of {', '.join(names)} on the PATH, found none: install it")


def _llvm_flags() -> tuple[list[str], list[str]]:
    config = find_tool("llvm-config-22", "llvm-config")
    query = lambda *a: subprocess.check_output([config, *a], text=True).split()  # noqa: E731
    return ["-isystem" + query("--includedir")[0]], ["-L" + query("--libdir")[0], *query("--libs")]


def _build_root() -> pathlib.Path:
    override = os.environ.get("SIMULATOR_BUILD_DIR")
    if override:
        return pathlib.Path(override)
    if (SOURCE.parent / "pyproject.toml").exists():  # pip leaves that behind
        return SOURCE.parents[1] / "build" / "simulator"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(cache) if cache else pathlib.Path.home() / ".cache") / "cdna-simulator"


def _digest(compiler: str) -> str:
    h = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        h.update(path.name.encode())
        h.update(path.read_bytes())
    h.update(subprocess.check_output([compiler, "--version"]))
    h.update(" ".join(FLAGS).encode())
    with open("/proc/cpuinfo") as f:  # -march=native: another CPU is another build
        h.update(next((line for line in f if line.startswith("flags")), "").encode())
    return h.hexdigest()[:16]


def _included(source: pathlib.Path) -> set[pathlib.Path]:
    """The engine's headers that a file includes, through one another."""
    found, left = set(), [source]
    while left:
        names = re.findall(r'^#include "(.+)"', left.pop().read_text(), re.M)
        new = {SOURCE / name for name in names} - found
        found |= new
        left += new
    return found


def _compile(compiler: str, source: pathlib.Path, objects: pathlib.Path, flags: list[str]) -> str:
    h = hashlib.sha256(source.read_bytes())
    for header in sorted(_included(source)):
        h.update(header.read_bytes())
    h.update(" ".join([compiler, *flags]).encode())
    target = objects / f"{source.stem}-{h.hexdigest()[:16]}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        command = [compiler, *flags, "-c", str(source), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the simulator's {source.name} does not compile:\n{done.stderr}")
        partial.rename(target)
    return str(target)


def _link(compiler: str, objects: list[str], target: pathlib.Path, flags: list[str]) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    command = [compiler, "-shared", "-o", str(partial), *objects, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"linking {target.name} failed:\n{done.stderr}")
    partial.rename(target)


def _shown(results, total: int):
    """Passes `results` on; from the second second on it says how many there are: on a terminal in
    one line that changes, in a log in a line for each quarter."""
    start = time.monotonic()
    terminal, shown = sys.stderr.isatty(), 0
    for n, result in enumerate(results, 1):
        quarter = 4 * n // total
        if time.monotonic() - start > 1 and (terminal or quarter > shown):
            shown = max(quarter, 1)
            text = f"cdna-simulator compiles its engine, once: {n} of {total} files"
            print(f"\r{text}" if terminal else text, end="" if terminal else "\n",
                  file=sys.stderr, flush=True)  # fmt: skip
        yield result
    if terminal and shown:
        print(file=sys.stderr)


@functools.cache
def build() -> pathlib.Path:
    """Directory with `libsimulator.so` and, where HIP headers are installed, the runtime stand-in.

    The first call after a change of the sources compiles (a minute or two, and says how far it
    is); later ones return at once. RuntimeError holds the compiler's words when something does
    not compile.
    """
    compiler = find_tool("clang++-22", "clang++")
    directory = _build_root() / _digest(compiler)
    if (directory / "complete").exists():
        return directory
    objects = _build_root() / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    with open(_build_root() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (directory / "complete").exists():
            return directory
        include, libraries = _llvm_flags()
        runtime = sorted(SOURCE.glob("hip_*.cpp"))
        sources = [s for s in sorted(SOURCE.glob("*.cpp")) if s not in runtime]
        jobs = [(source, [*FLAGS, *include]) for source in sources]
        jobs += _runtime_jobs(runtime, directory)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            compiled = pool.map(lambda job: _compile(compiler, job[0], objects, job[1]), jobs)
            built = list(_shown(compiled, len(jobs)))
        engine, count = directory / "libsimulator.so", len(sources)
        of_engine = ["-Wl,-soname,libsimulator.so", "-pthread", *libraries]
        _link(compiler, built[:count], engine, of_engine)
        if built[count:]:
            _link_runtime(compiler, built[count:], directory)
        (directory / "complete").touch()
    return directory


# Of ROCm 6 and 7, where the headers are older.
_NEWER = [
    "hipDeviceGetUuid",
    "hipMemPoolCreate",
    "hipMemPoolDestroy",
    "hipMallocFromPoolAsync",
    "hipStreamGetDevice",
    "hipStreamBeginCaptureToGraph",
    "hipGetProcAddress",
    "hipMemAddressReserve",
    "hipMemCreate",
    "hipMemMap",
    "hipMemSetAccess",
    "hipExtStreamCreateWithCUMask",
    "hipLaunchKernelExC",
    "hipDrvLaunchKernelEx",
    "hipLaunchHostFunc",
    "hipHostAlloc",
    "hipMemcpy2DArrayToArray",
]


def _stubs(header: str, sources: list[pathlib.Path]) -> str:
    """C++ of a function for each one that HIP declares and `sources` do not define."""
    declared = set(re.findall(r"\bhipError_t\s+(hip\w+)\s*\(", header)) | set(_NEWER)
    for source in sources:
        declared -= set(re.findall(r"\b(hip\w+)\(", source.read_text()))
    lines = ['extern "C" int sim_missing(const char* name);']
    lines += [f'extern "C" int {name}() {{ return sim_missing("{name}"); }}' for name in declared]
    return "\n".join(sorted(lines, reverse=True)) + "\n"


def _runtime_jobs(
    sources: list[pathlib.Path], directory: pathlib.Path
) -> list[tuple[pathlib.Path, list[str]]]:
    """Files of the stand-in for HIP's runtime, each with its flags; none without HIP headers."""
    header = pathlib.Path("hip/hip_runtime_api.h")
    rocm = pathlib.Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    include = next(
        (d for d in (pathlib.Path("/usr/include"), rocm / "include") if (d / header).exists()), None
    )
    if include is None:
        return []
    flags = [*FLAGS, "-D__HIP_PLATFORM_AMD__=1"]
    if include != pathlib.Path("/usr/include"):  # naming that one again upsets the C++ headers
        flags.append(f"-isystem{include}")
    stubs = directory / "hip_stubs.cpp"
    stubs.write_text(_stubs((include / header).read_text(), sources))
    return [(source, flags) for source in [*sources, stubs]]


def _link_runtime(compiler: str, built: list[str], directory: pathlib.Path) -> None:
    base = directory / "libamdhip64.so.5"
    link = [
        "-Wl,-soname,libamdhip64.so.5",
        f"-L{directory}",
        "-lsimulator",
        "-Wl,-rpath,$ORIGIN",
        "-pthread",
    ]
    _link(compiler, built, base, link)
    for name in ("libamdhip64.so", "libamdhip64.so.6", "libamdhip64.so.7"):
        alias = directory / name
        if not alias.exists():
            alias.symlink_to(base.name)
