"""The package on the simulator: its own Python and its own binding, on the launchers of the .hip
files, compiled for TARGET and linked against the simulator's stand-in for the HIP runtime, with its
adversarial modes and checkers on. Tensors lie on the CPU.

Kernels may touch the tensors of the call and nothing else: not the gaps between the rows of a view,
not outputs before they are written. A finding of the simulator fails the call.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]

import rocm  # noqa: E402

import simulator  # noqa: E402

build = importlib.import_module("build")  # tools/build.py

TARGET = os.environ.get("SIMULATOR_TARGET", "gfx942")
NATIVE = torch.float8_e4m3fnuz if TARGET == "gfx942" else torch.float8_e4m3fn
NAME = f"_rocm_kernels_simulated_{TARGET}"
CHECKS = True  # the adversarial modes and checkers; a benchmark that wants counters does without
_seeds = itertools.count()  # every call meets another order of waves and workgroups


# ---- Building


def build_launchers() -> Path:
    """Shared library of all .hip files that build.toml lists, for TARGET; made anew when a source
    or a header is newer than it."""
    package = build.read_package(ROOT, "rocm")
    folder = ROOT / "build" / "simulated" / TARGET
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "librocm_kernels.so"
    toolchain = rocm.find_toolchain()
    listed = [name for section in package.sections.values() for name in section["src"]]
    sources = [ROOT / name for name in listed if name.endswith(".hip")]
    names = ["_".join(source.relative_to(ROOT).with_suffix("").parts) for source in sources]
    objects = [folder / f"{name}.o" for name in names]
    jobs = list(zip(sources, objects, strict=True))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the longest are listed last
        compiled = [pool.submit(compile_where_changed, toolchain, *job) for job in reversed(jobs)]
    for each in compiled:
        each.result()
    if not library.exists() or library.stat().st_mtime < max(o.stat().st_mtime for o in objects):
        command = toolchain.link_command(objects, library)
        command[command.index("-lamdhip64")] = str(simulator.runtime())
        subprocess.run(command, check=True)
    return library


def compile_where_changed(toolchain: rocm.Toolchain, source: Path, output: Path) -> None:
    """Compiles a .hip file unless its object is newer than all files that went into it."""
    listed = output.with_suffix(".d")  # by the compiler, as in a makefile: "output: file file ..."
    if output.exists() and listed.exists():
        text = listed.read_text().replace("\\\n", " ").partition(": ")[2]
        files = [Path(name) for name in shlex.split(text)]
        made = output.stat().st_mtime
        if all(file.exists() and file.stat().st_mtime <= made for file in files):
            return
    extra = ("-MD", "-MF", str(listed))
    command = toolchain.compile_command(source, output, (TARGET,), extra=extra)
    subprocess.run(command, check=True)


_OPS_PY = """
import ctypes
import torch
runtime = ctypes.CDLL({runtime!r})
# Without what tests/simulated.py's package() does: kernels may touch whatever torch allocates.
runtime.sim_register_buffer(ctypes.c_void_p(4096), ctypes.c_uint64(1 << 47), b"all memory")
from . import {name}
ops = torch.ops.{name}
def add_op_namespace_prefix(op_name):
    return "{name}::" + op_name
"""


@functools.cache
def package_folder() -> Path:
    """A variant of the package, as tools/build.py lays it out, that can be imported anywhere: all
    of the package but torch's GPU memory and the checks of single calls."""
    folder = ROOT / "build" / "simulated" / TARGET
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_package(build_launchers(), folder / "package")


def _build_package(library: Path, folder: Path) -> Path:
    package = build.read_package(ROOT, "rocm")
    toolchain = build.Toolchain(
        variant="simulated",
        define="-DCPU_KERNEL -DROCM_KERNEL",
        link_flags=[
            str(library),
            f"-Wl,-rpath,{library.parent}",
            *build.cpu_toolchain(package, folder).link_flags,
        ],
    )
    work = folder / "objects"
    work.mkdir(parents=True, exist_ok=True)
    extension = build.write_ninja(package, toolchain, NAME, work)
    ninja = [str(Path(build.ninja.BIN_DIR) / "ninja"), "-C", str(work)]
    subprocess.run(ninja, check=True, capture_output=True)
    _place(folder / extension.name, extension.read_bytes())
    for path in package.python_files:
        target = folder / path.relative_to(ROOT / "torch-ext" / package.python_name)
        target.parent.mkdir(exist_ok=True)
        _place(target, path.read_bytes())
    ops_py = _OPS_PY.format(runtime=str(simulator.runtime()), name=NAME)
    _place(folder / "_ops.py", ops_py.encode())
    metadata = {"id": NAME, "version": package.version, "backend": {"type": "cpu"}}
    _place(folder / "metadata.json", json.dumps(metadata).encode())
    return folder


def _place(path: Path, content: bytes) -> None:
    """Writes a file that another process may be importing: it stays where it is the same, and is
    never seen half written."""
    if path.is_file() and path.read_bytes() == content:
        return
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


# ---- Checked calls


@contextmanager
def checked(
    written: Iterable[torch.Tensor], read: Iterable[torch.Tensor], seed: int | None = None
) -> Iterator[None]:
    """Shows the tensors' memory to the simulator for one call, and raises what it found."""
    hip = simulator.load_runtime()
    buffers = [(part, True) for tensor in written for part in _contiguous_parts(tensor)]
    buffers += [(part, False) for tensor in read for part in _contiguous_parts(tensor)]
    for part, output in buffers:
        hip.register(part, output=output)
    hip.clear()
    seed = next(_seeds) if seed is None else seed
    hip.options(checks=CHECKS, seed=seed)
    try:
        with Workspaces(hip):
            yield
        if hip.findings:
            raise AssertionError(f"the simulator found, with seed {seed}: {hip.findings_text()}")
    finally:
        for part, _ in buffers:
            hip.unregister(part)


def _contiguous_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_contiguous():
        return [tensor] if tensor.numel() else []
    return [part for row in tensor for part in _contiguous_parts(row)]


class Workspaces(TorchDispatchMode):
    """Gives the binding's scratch memory random contents and ends that the simulator sees.

    Random and not unwritten: the tickets of the AMD kernels live on memory that nobody zeroed, and
    are read as they are.
    """

    def __init__(self, hip: simulator.hip.Runtime) -> None:
        super().__init__()
        self.hip, self.storages, self.parts = hip, [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.new_empty.default:
            return function(*args, **(kwargs or {}))
        dtype = (kwargs or {}).get("dtype") or args[0].dtype
        size = math.prod(args[1]) * dtype.itemsize
        # Beyond both ends is memory of this storage, so that a wrong access hits nothing else.
        storage = torch.randint(256, (size + 1024,), dtype=torch.uint8)
        begin = -storage.data_ptr() % 256 + 256
        self.storages.append(storage)
        self.parts.append(storage[begin : begin + size])
        self.hip.register(self.parts[-1])
        return self.parts[-1].view(dtype).view(args[1])

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        for part in self.parts:
            self.hip.unregister(part)


# Arguments that are read before they are written, and beside what others they are not;
# decode_layers' are read in any case. rope_and_cache, which has places, only writes caches.
READ_TOO = {
    "residual": "addend", "qkv": None, "k_caches": None, "v_caches": None, "k_cache": "places",
    "v_cache": "places",
}  # fmt: skip


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of memory."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


class CheckedOp:
    """An op of the binding; each call is `checked` with the tensors that its schema names."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.op, self.default, self._schema = op, self, op._schema
        aliases = [argument.alias_info for argument in op._schema.arguments]
        self.writes = any(alias is not None and alias.is_write for alias in aliases)

    def tensors(self, arguments: tuple) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that a call writes and those that it reads."""
        written, read, schema = [], [], self.op._schema.arguments
        arguments += tuple(argument.default_value for argument in schema[len(arguments) :])
        given = dict(zip((argument.name for argument in schema), arguments, strict=True))
        for argument, value in zip(schema, arguments, strict=True):
            for tensor in value if isinstance(value, list) else [value]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                writes = argument.alias_info is not None and argument.alias_info.is_write
                name = argument.name
                read_too = name in READ_TOO and given.get(READ_TOO[name]) is None
                (written if writes and not read_too else read).append(tensor)
        # What is worked on in place is read before it is written, too.
        return [out for out in written if not any(is_same(out, other) for other in read)], read

    def __call__(self, *arguments, seed: int | None = None):
        written, read = self.tensors(arguments)
        if not written and not self.writes:  # it launches nothing
            return self.op(*arguments)
        if any(isinstance(mode, Seen) for mode in _get_current_dispatch_mode_stack()):
            return self.op(*arguments)
        with checked(written, read, seed):
            return self.unchecked(*arguments)

    def unchecked(self, *arguments):
        """The binding's function itself, so that a dispatch mode sees what that calls."""
        return self.op._op_dk(torch._C.DispatchKey.CPU, *arguments)


class Seen(TorchDispatchMode):
    """Has calls of ops go through the dispatch modes that are entered within, before they are
    checked."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != NAME:
            return function(*args, **(kwargs or {}))
        return CheckedOp(function)(*args)


class CheckedOps:
    """What the package's `_ops.ops` is here."""

    def __getattr__(self, name: str) -> CheckedOp:
        found = CheckedOp(getattr(getattr(torch.ops, NAME), name).default)
        setattr(self, name, found)
        return found

    def linear_limits(self, *_) -> tuple[int, int, int, int]:
        """torch._scaled_mm would be the CPU's."""
        return (torch.iinfo(torch.int64).max,) * 2 + (0, 0)

    linear_limits.default = linear_limits


ops = CheckedOps()


@functools.cache
def functional() -> ModuleType:
    """The package, whose functional API runs on the simulated device."""
    folder = package_folder()
    simulator.load_runtime()  # before the extension, which then resolves HIP functions to it
    torch.ops.load_library(folder / f"{NAME}.abi3.so")
    name = "simulated_rocm_kernels"
    its_ops = types.ModuleType(f"{name}._ops")
    its_ops.ops, its_ops.add_op_namespace_prefix = ops, lambda op: f"{NAME}::{op}"
    sys.modules[its_ops.__name__] = its_ops
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    # torch takes the tensors for the CPU's, whose dialect is OCP's.
    for module in [m for n, m in sys.modules.items() if n == name or n.startswith(f"{name}.")]:
        if hasattr(module, "native_fp8_dtype"):
            module.native_fp8_dtype = lambda device: NATIVE
    return package
