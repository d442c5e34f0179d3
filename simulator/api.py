"""Loading code objects and launching kernels from Python."""

from __future__ import annotations

import ctypes
import dataclasses
import fnmatch
import functools
import itertools
import json
import os
import pathlib
import struct

import numpy as np

from . import _build
from .cycles import Cycles, Machine, machine_for
from .timing import Time, modelled_time


class SimulatorError(RuntimeError):
    """A launch that could not start, or a kernel that stopped before its end."""


class _Options(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("late", "race", "bounds", "uninit", "caches", "threads")
    ] + [
        ("seed", ctypes.c_uint64),
        ("max_instructions", ctypes.c_uint64),
        ("cycles", ctypes.c_void_p),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("initialised", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("written", ctypes.c_void_p),
        ("read_only", ctypes.c_uint32),
    ]


@functools.cache
def _engine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_build.build() / "libsimulator.so"))
    library.sim_error.restype = ctypes.c_char_p
    library.sim_open.restype = ctypes.c_void_p
    library.sim_open.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_char_p]
    library.sim_close.argtypes = [ctypes.c_void_p]
    library.sim_describe.restype = ctypes.c_char_p
    library.sim_describe.argtypes = [ctypes.c_void_p]
    library.sim_launch.restype = ctypes.c_char_p
    library.sim_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_uint32 * 3,
        ctypes.c_uint32 * 3,
        ctypes.c_uint32,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(_Buffer),
        ctypes.c_uint32,
        ctypes.POINTER(_Options),
    ]
    return library


_LEVELS = ("error", "suspicious")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that hardware might punish: what, where in the code, who, at which address."""

    kind: str  # missing-wait, lds-race, global-race, out-of-bounds, uninitialised, misaligned, ...
    level: str  # error, or suspicious: hardware is known to forgive it, though no rule allows it
    kernel: str
    message: str
    source: str  # file:line from the debug information
    instruction: str
    address: int
    code_address: int
    workgroup: tuple[int, int, int]
    wave: int
    lane: int
    count: int

    def matches(self, pattern: str) -> bool:
        """Is it meant by `KIND`, `KIND@FILE` or `KIND@FILE:LINE`?

        Shell wildcards are allowed in both parts; FILE is the end of the path, as in
        `lds-race@reduce.hip:40` or `*@vendor/*`.
        """
        kind, _, place = pattern.partition("@")
        if not fnmatch.fnmatchcase(self.kind, kind):
            return False
        file, _, line = self.source.rpartition(":")
        wanted, _, number = place.rpartition(":")
        if not number.isdigit():
            wanted, number = place, line
        return not place or (
            number == line
            and fnmatch.fnmatchcase("/" + file.lstrip("/"), "*/" + wanted.lstrip("/"))
        )

    def __str__(self) -> str:
        where = ",".join(map(str, self.workgroup))
        sure = "suspicious: " if self.level == "suspicious" else ""
        return (
            f"{sure}{self.kind} in {self.kernel} at {self.source}: {self.message} "
            f"['{self.instruction}' at {self.code_address:#x}, workgroup {where} wave "
            f"{self.wave} lane {self.lane}, address {self.address:#x}, {self.count} times]"
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """What a launch did.

    counters: totals by name, see docs/simulator.md; findings: in order of kind;
    time: the quick bound, None for gfx90a; lines: executions by source line;
    cycles: what the cycle model found, None unless it was asked for;
    raw: everything as the engine reports it.
    """

    counters: dict
    findings: list[Finding]
    time: Time | None
    lines: list[dict]
    raw: dict
    cycles: Cycles | None = None

    def select(self, level: str = "suspicious", suppress=()) -> list[Finding]:
        """Findings of at least `level` (error, suspicious) that no pattern of `suppress` means.

        A pattern is `KIND`, `KIND@FILE` or `KIND@FILE:LINE`, see `Finding.matches`.
        """
        if level not in _LEVELS:
            raise ValueError(f"level: required one of {', '.join(_LEVELS)}, got {level!r}")
        wanted = _LEVELS[: _LEVELS.index(level) + 1]
        patterns = [suppress] if isinstance(suppress, str) else list(suppress)
        return [
            f
            for f in self.findings
            if f.level in wanted and not any(f.matches(p) for p in patterns)
        ]

    def check(self, level: str = "error", suppress=()) -> Result:
        """Returns itself, or raises SimulatorError that lists the findings `select` gives.

        What hardware is known to forgive passes, unless level="suspicious" asks for it.
        """
        found = self.select(level, suppress)
        if found:
            raise SimulatorError("\n".join(map(str, found)))
        return self


class Out:
    """Marks a buffer whose contents are undefined at launch: reading before writing is found."""

    def __init__(self, array):
        self.array = array


def result_from(raw: dict) -> Result:
    """The Result of the engine's JSON; SimulatorError when the kernel stopped."""
    findings = [Finding(**{**f, "workgroup": tuple(f["workgroup"])}) for f in raw["findings"]]
    if "error" in raw:
        raise SimulatorError("\n".join([raw["error"], *map(str, findings)]))
    cycles = Cycles(raw["cycles"]) if "cycles" in raw else None
    return Result(raw["counters"], findings, modelled_time(raw), raw["lines"], raw, cycles)


_FLOATS = {8: "<d", 4: "<f", 2: "<e"}  # formats of struct, by size


def _read_only(value) -> bool:
    return isinstance(value, np.ndarray) and not value.flags.writeable


def _pointer(value) -> tuple[int, int] | None:
    """Address and size in bytes of a NumPy array or torch tensor, None for anything else."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError(
                "required a contiguous array, got one with strides "
                f"{value.strides}: pass np.ascontiguousarray(...)"
            )
        return value.ctypes.data, value.nbytes
    if hasattr(value, "data_ptr"):
        if not value.is_contiguous() or value.device.type != "cpu":
            raise ValueError(
                "required a contiguous tensor on the CPU, got strides "
                f"{value.stride()} on {value.device}"
            )
        return value.data_ptr(), value.numel() * value.element_size()
    return None


def _scalar(value, spec: dict, position: int) -> bytes:
    """The bytes of a number, a structure or an address. Where the debug information tells the
    parameter's type (compile with -g), a Python number becomes that, or is refused."""
    size, kind = spec["size"], spec["type"]
    who = f"argument {position}" + (f" ({spec['name']})" if spec["name"] else "")
    number = isinstance(value, (bool, int, float)) and not isinstance(value, np.generic)
    if number and kind == "float":
        value = float(value)
    if isinstance(value, float) and kind in ("integer", "pointer", "structure"):
        raise TypeError(f"{who}: required {kind} of {size} bytes, got the float {value}")
    if kind in ("integer", "float") and isinstance(value, np.generic):
        its = "float" if isinstance(value, np.floating) else "integer"
        if its != kind:
            raise TypeError(f"{who}: required {kind} of {size} bytes, got {value!r}")
    if number and isinstance(value, int) and not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
        raise ValueError(f"{who}: {value} does not fit the kernel's {size} bytes")
    if isinstance(value, (bytes, bytearray)):
        data = bytes(value)
    elif isinstance(value, (np.generic, ctypes._SimpleCData)):
        data = bytes(value) if not isinstance(value, np.generic) else value.tobytes()
    elif isinstance(value, ctypes.Structure):
        data = bytes(value)
    elif isinstance(value, float):
        if size not in _FLOATS:
            raise TypeError(f"{who}: the kernel takes {size} bytes, got the float {value}")
        data = struct.pack(_FLOATS[size], value)
    elif value is None or isinstance(value, (bool, int)):
        data = (int(value or 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    else:
        raise TypeError(
            f"{who}: required a buffer, number, ctypes structure or "
            f"bytes, got {type(value).__name__}"
        )
    if len(data) != size:
        raise ValueError(f"{who}: the kernel takes {size} bytes, got {len(data)}")
    return data


def _dims(value, what: str) -> ctypes.Array:
    dims = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"{what}: required 1 to 3 dimensions, got {dims}")
    return (ctypes.c_uint32 * 3)(*dims, *(1,) * (3 - len(dims)))


class _Apart:
    """Copies of arguments that lie side by side, so that an overrun of one does not meet the next.

    An argument that overlaps another moves with it. Nothing moves that a structure may point into.
    """

    GAP = 256  # bytes between arguments from which on an overrun is seen anyway
    PAGE = 4096  # alignment within this is kept

    def __init__(self, args, buffers):
        arrays = [a.array if isinstance(a, Out) else a for a in args]
        ranges = sorted(p for p in map(_pointer, arrays) if p)
        plain = all(isinstance(a, (int, float, np.generic)) or a is None or _pointer(a)
                    for a in arrays)  # fmt: skip
        self.moves: list[tuple[int, int, np.ndarray, int]] = []
        if buffers or not plain:
            return
        merged: list[list[int]] = []
        for begin, size in ranges:
            if merged and begin < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], begin + size)
            else:
                merged.append([begin, begin + size])
        for (_, before), (begin, end) in itertools.pairwise(merged):
            if begin - before >= self.GAP or end == begin:
                continue
            copy = np.empty(end - begin + 3 * self.PAGE, np.uint8)
            shift = self.PAGE + (begin - copy.ctypes.data) % self.PAGE
            ctypes.memmove(copy.ctypes.data + shift, begin, end - begin)
            self.moves.append((begin, end, copy, copy.ctypes.data + shift))

    def place(self, begin: int, size: int) -> tuple[int, int]:
        """Where the kernel finds the bytes."""
        for first, last, _, to in self.moves:
            if first <= begin < last:
                return to + begin - first, size
        return begin, size

    def bring_back(self, raw: dict) -> None:
        """Copies results back; findings name the caller's addresses."""
        for first, last, _, at in self.moves:
            ctypes.memmove(first, at, last - first)
            for finding in raw["findings"]:
                if at <= finding["address"] < at + last - first:
                    finding["address"] += first - at


def _further(buffers) -> list[_Buffer]:
    known = []
    for extra in buffers:
        initialised = not isinstance(extra, Out)
        array = extra if initialised else extra.array
        address, size = _pointer(array)
        known.append(_Buffer(address, size, initialised, b"a further buffer", None,
                             _read_only(array)))  # fmt: skip
    return known


class CodeObject:
    """Kernels of one file.

    `target`, `kernels` (arguments and resources by name), `variables` (address and size by name)
    and `unknown` (instructions in it that the simulator does not know) describe it.
    """

    def __init__(self, data: bytes, path: str, target: str | None = None):
        self._engine = _engine()
        self._handle = self._engine.sim_open(
            data, len(data), path.encode(), target.encode() if target else None
        )
        if not self._handle:
            raise SimulatorError(self._engine.sim_error().decode())
        described = json.loads(self._engine.sim_describe(self._handle))
        self.target: str = described["target"]
        self.kernels: dict = described["kernels"]
        self.variables: dict = described["variables"]
        self.unknown: list[str] = described["unknown"]

    def __del__(self):
        if getattr(self, "_handle", None):
            self._engine.sim_close(self._handle)

    def _need(self, kernel: str) -> None:
        if kernel not in self.kernels:
            raise SimulatorError(
                f"there is no kernel {kernel}; the file has {', '.join(sorted(self.kernels))}"
            )

    def _arguments(self, kernel: str, args, apart: _Apart) -> tuple[bytes, list[_Buffer]]:
        explicit = [a for a in self.kernels[kernel]["args"] if not a["kind"].startswith("hidden")]
        if len(args) != len(explicit):
            raise ValueError(f"kernel {kernel} takes {len(explicit)} arguments, got {len(args)}")
        segment = bytearray(self.kernels[kernel]["kernarg_bytes"])
        buffers = []
        for n, (value, spec) in enumerate(zip(args, explicit, strict=True)):
            initialised = not isinstance(value, Out)
            value = value if initialised else value.array
            at = _pointer(value)
            if at:
                name = spec["name"] or f"argument {n}"
                if spec["size"] != 8 or spec["type"] in ("integer", "float"):
                    what = spec["type"] or "a value"
                    raise TypeError(f"argument {n} ({name}): required {what} of "
                                    f"{spec['size']} bytes, got an array")  # fmt: skip
                fixed = _read_only(value)
                at = apart.place(*at)
                buffers.append(_Buffer(at[0], at[1], initialised, name.encode(), None, fixed))
                value = at[0]
            data = _scalar(value, spec, n)
            segment[spec["offset"] : spec["offset"] + spec["size"]] = data
        return bytes(segment), buffers

    def launch(
        self,
        kernel: str,
        grid,
        block,
        args,
        lds: int = 0,
        *,
        checks: bool = True,
        seed: int = 0,
        buffers=(),
        caches: bool = True,
        threads: int = 0,
        max_instructions: int = 200_000_000,
        late: bool | None = None,
        race: bool | None = None,
        cycles: bool | Machine = False,
    ) -> Result:
        """Runs `kernel` to its end.

        grid: workgroups in x, y, z (or one int); block: threads; lds: bytes of dynamic LDS.
        args: one for each explicit argument: NumPy arrays or CPU tensors (passed by address, and
        the only memory the kernel may touch), `Out(array)`, numbers, ctypes structures, bytes.
        buffers: further arrays that pointers inside structures lead to.
        checks: the adversarial modes and checkers, in the order that `seed` gives; False is fast.
        late, race: switch these two apart. caches: model L1, L2 and the Infinity Cache.
        threads: host threads, 0 for all cores. max_instructions: of one wave before it is stuck.
        cycles: play the launch on the cycle model too; a Machine says which GPU and how.
        Raises SimulatorError when the launch is not possible or the kernel stops.
        """
        self._need(kernel)
        apart = _Apart(args, buffers)
        segment, known = self._arguments(kernel, args, apart)
        known += _further(buffers)
        options = _Options(
            checks if late is None else late,
            checks if race is None else race,
            True,
            checks,
            caches,
            threads,
            seed,
            max_instructions,
            None,
        )
        if cycles:
            machine = machine_for(self.target) if cycles is True else cycles
            played = machine.structure()
            options.cycles = ctypes.addressof(played)
        text = self._engine.sim_launch(
            self._handle,
            kernel.encode(),
            _dims(grid, "grid"),
            _dims(block, "block"),
            lds,
            segment,
            len(segment),
            (_Buffer * len(known))(*known),
            len(known),
            ctypes.byref(options),
        )
        if text is None:
            raise SimulatorError(self._engine.sim_error().decode())
        raw = json.loads(text)
        apart.bring_back(raw)
        return result_from(raw)


def load(path: str | os.PathLike, target: str | None = None) -> CodeObject:
    """Opens a code object, an offload bundle, or a host object or library with a fat binary.

    target: which code to take when there are several, gfx942 if not said.
    """
    path = pathlib.Path(path)
    return CodeObject(path.read_bytes(), str(path), target)
