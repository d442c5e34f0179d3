"""The functional API on the simulator: the launchers of the .hip files, compiled for TARGET, linked
against the simulator's stand-in for the HIP runtime, with its adversarial modes and checkers on.

Kernels may touch the tensors of the call and nothing else: not the gaps between the rows of a view,
not outputs before they are written. A finding of the simulator fails the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import launchers
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tools")]

import rocm  # noqa: E402

import simulator  # noqa: E402

KERNELS = ("rms_norm_fp8", "swiglu_fp8", "skinny_gemm")
TARGET = os.environ.get("SIMULATOR_TARGET", "gfx942")
NATIVE = torch.float8_e4m3fnuz if TARGET == "gfx942" else torch.float8_e4m3fn
CHECKS = True  # the adversarial modes and checkers; a benchmark that wants counters does without
_seeds = itertools.count()  # every call meets another order of waves and workgroups


def build() -> Path:
    """Shared library of all launchers for TARGET, made anew when a source is newer than it."""
    folder = ROOT / "build" / "simulated" / TARGET
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "librocm_kernels.so"
    toolchain = rocm.find_toolchain()
    objects = []
    for kernel in KERNELS:
        (source,), output = (ROOT / kernel).rglob("*.hip"), folder / f"{kernel}.o"
        folders = [ROOT / "common", ROOT / "gemm", ROOT / kernel]
        headers = [path for parent in folders for path in parent.rglob("*.h")]
        newest = max(path.stat().st_mtime for path in [source, *headers])
        if not output.exists() or output.stat().st_mtime < newest:
            subprocess.run(toolchain.compile_command(source, output, (TARGET,)), check=True)
        objects.append(output)
    if not library.exists() or library.stat().st_mtime < max(o.stat().st_mtime for o in objects):
        command = toolchain.link_command(objects, library)
        command[command.index("-lamdhip64")] = str(simulator.runtime())
        subprocess.run(command, check=True)
    return library


@contextlib.contextmanager
def checked(written: launchers.Tensors, read: launchers.Tensors) -> Iterator[None]:
    """Shows the tensors' memory to the simulator for one call, and raises what it found."""
    hip = simulator.load_runtime()
    buffers = [(part, True) for tensor in written for part in _contiguous_parts(tensor)]
    buffers += [(part, False) for tensor in read for part in _contiguous_parts(tensor)]
    for part, output in buffers:
        hip.register(part, output=output)
    hip.clear()
    seed = next(_seeds)
    hip.options(checks=CHECKS, seed=seed)
    try:
        yield
        if hip.findings:
            raise AssertionError(f"the simulator found, with seed {seed}: {hip.findings_text()}")
    finally:
        for part, _ in buffers:
            hip.unregister(part)


def _contiguous_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_contiguous():
        return [tensor] if tensor.numel() else []
    return list(tensor)


@functools.cache
def library_of_launchers() -> launchers.Launchers:
    simulator.load_runtime()  # before the library, which then resolves HIP functions to it
    return launchers.Launchers(ctypes.CDLL(str(build())), around=checked)


_OPS_PY = """
import ctypes
import torch
runtime = ctypes.CDLL({runtime!r}, mode=ctypes.RTLD_GLOBAL)
# Kernels may touch whatever torch allocates: these tests are not about bounds.
runtime.sim_register_buffer(ctypes.c_void_p(4096), ctypes.c_uint64(1 << 47), b"all memory")
from . import {name}
ops = torch.ops.{name}
def add_op_namespace_prefix(op_name):
    return "{name}::" + op_name
"""


def package_folder() -> Path:
    """A variant of the package, as tools/build.py lays it out, whose CPU tensors are multiplied by
    the AMD launchers in the simulator: all of the package but torch's GPU memory."""
    import build as build_script  # tools/build.py; not `build` above

    launchers_library = build()
    folder = launchers_library.parent / "package"
    name = f"_rocm_kernels_simulated_{TARGET}"
    package = build_script.read_package(ROOT, "rocm")
    package.torch_sources.append("gemm/cpu/gemm.cpp")  # an op that CPU bindings have
    toolchain = build_script.Toolchain(
        variant="simulated",
        define="-DCPU_KERNEL",
        link_flags=[
            str(launchers_library),
            f"-Wl,-rpath,{launchers_library.parent}",
            *build_script.cpu_toolchain(package, folder).link_flags,
        ],
    )
    work = folder / "objects"
    work.mkdir(parents=True, exist_ok=True)
    extension = build_script.write_ninja(package, toolchain, name, work)
    ninja = [str(Path(build_script.ninja.BIN_DIR) / "ninja"), "-C", str(work)]
    subprocess.run(ninja, check=True, capture_output=True)
    shutil.copyfile(extension, folder / extension.name)
    for path in (ROOT / "torch-ext" / "rocm_kernels").rglob("*.py"):
        target = folder / path.relative_to(ROOT / "torch-ext" / "rocm_kernels")
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    runtime = str(simulator.runtime())
    (folder / "_ops.py").write_text(_OPS_PY.format(runtime=runtime, name=name))
    metadata = {"id": name, "version": package.version, "backend": {"type": "cpu"}}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


@functools.cache
def functional() -> ModuleType:
    """The package's functional API on the simulated device."""
    api = launchers.functional_api("simulated_rocm_kernels", library_of_launchers(), NATIVE)
    # The tensors lie on the CPU, whose paths for many rows are not the simulated device's.
    few = api.SKINNY_GEMM_MAX_ROWS
    path = lambda rows, *_: f"skinny_gemm{'_slices' if rows > few else ''}"  # noqa: E731
    api.fp8_linear_path = api.gemm.fp8_linear_path = path
    return api
