"""Compiles small kernels for the simulator's tests: no HIP header, no device library."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess

import simulator

CACHE = pathlib.Path(__file__).parents[2] / "build" / "simulator-tests"
PRELUDE = """
#define GLOBAL extern "C" __attribute__((global))
#define DEVICE __attribute__((device))
#define SHARED __attribute__((shared))
#define TID ((int)__builtin_amdgcn_workitem_id_x())
#define BID ((int)__builtin_amdgcn_workgroup_id_x())
typedef unsigned u32; typedef unsigned long long u64; typedef _Float16 half;
typedef unsigned u2 __attribute__((ext_vector_type(2)));
typedef unsigned u4 __attribute__((ext_vector_type(4)));
typedef float f2 __attribute__((ext_vector_type(2)));
typedef float f4 __attribute__((ext_vector_type(4)));
DEVICE static inline void sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
"""
DEVICE_FLAGS = ["-x", "hip", "-std=c++17", "-O3", "-g", "-nogpuinc", "-nogpulib", "-Wno-everything"]


def compiler() -> str:
    """A clang that knows gfx942; RuntimeError when there is none."""
    for name in ("clang++-22", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError("required clang++-22 or clang++ on the PATH, found neither")


def _run(command: list[str], output: pathlib.Path) -> None:
    partial = output.with_suffix(f".{os.getpid()}.tmp")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    partial.rename(output)


def _cached(source: str, suffix: str, command: list[str], extension: str) -> pathlib.Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256("\0".join([source, *command]).encode()).hexdigest()[:20]
    path = CACHE / f"{digest}{suffix}"
    output = path.with_suffix(extension)
    if not output.exists():
        path.write_text(source)
        _run([*command, str(path)], output)
    return output


def device_file(source: str, *flags: str, target: str = "gfx942") -> pathlib.Path:
    """Code object of HIP `source`, which gets the prelude above; cached by contents."""
    command = [compiler(), *DEVICE_FLAGS, f"--offload-arch={target}", "--offload-device-only",
               "--no-gpu-bundle-output", "-c", *flags]  # fmt: skip
    return _cached(PRELUDE + source, ".hip", command, ".co")


def device(source: str, *flags: str, target: str = "gfx942") -> simulator.CodeObject:
    """The same, loaded."""
    return simulator.load(device_file(source, *flags, target=target))


def host_library(source: str, *flags: str) -> ctypes.CDLL:
    """The C++ `source` as a shared library for this machine."""
    command = [compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-everything", *flags]
    return ctypes.CDLL(str(_cached(source, ".cpp", command, ".so")))
