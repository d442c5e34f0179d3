"""Launches of several devices, run beside each other and judged together."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json

from .api import (
    CodeObject,
    Finding,
    Result,
    SimulatorError,
    _Apart,
    _Buffer,
    _dims,
    _engine,
    _further,
    _Options,
    result_from,
)


class _Call(ctypes.Structure):
    _fields_ = [
        ("object", ctypes.c_void_p),
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_lds", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("kernarg", ctypes.c_char_p),
        ("kernarg_bytes", ctypes.c_uint64),
    ]


@functools.cache
def _launcher():
    function = _engine().sim_launch_together
    function.restype = ctypes.c_char_p
    function.argtypes = [
        ctypes.POINTER(_Call),
        ctypes.c_uint32,
        ctypes.POINTER(_Buffer),
        ctypes.c_uint32,
        ctypes.POINTER(_Options),
    ]
    return function


@dataclasses.dataclass(frozen=True)
class Call:
    """One launch of `launch_together`: a kernel of `code`, and what `CodeObject.launch` takes."""

    code: CodeObject
    kernel: str
    grid: int | tuple
    block: int | tuple
    args: list
    lds: int = 0


def launch_together(
    devices,
    *,
    seed: int = 0,
    checks: bool = True,
    buffers=(),
    caches: bool = True,
    max_instructions: int = 200_000_000,
) -> list[list[Result]]:
    """Runs launches of several devices beside each other, interleaved as `seed` says.

    devices: for each device the Calls of its stream, which follow one another. Every device may
    touch the arrays of all. They are judged together: races between launches and between devices,
    where device scope is not enough, and a hang is one of all that are under way.
    Returns the results in the same shape; the other arguments are those of `CodeObject.launch`.
    """
    calls = [(n, call) for n, stream in enumerate(devices) for call in stream]
    if not calls:
        raise ValueError("devices: required at least one Call, got none")
    apart = _Apart([a for _, call in calls for a in call.args], buffers)
    known, structures = _further(buffers), []
    for n, call in calls:
        call.code._need(call.kernel)
        segment, its = call.code._arguments(call.kernel, call.args, apart)
        known += its
        structures.append(
            _Call(call.code._handle, call.kernel.encode(), _dims(call.grid, "grid"),
                  _dims(call.block, "block"), call.lds, n, n, segment, len(segment))
        )  # fmt: skip
    options = _Options(checks, checks, True, checks, caches, 1, seed, max_instructions, None)
    text = _launcher()(
        (_Call * len(structures))(*structures),
        len(structures),
        (_Buffer * len(known))(*known),
        len(known),
        ctypes.byref(options),
    )
    if text is None:
        raise SimulatorError(_engine().sim_error().decode())
    raws = json.loads(text)["launches"]
    apart.bring_back({"findings": [f for raw in raws for f in raw["findings"]]})
    if any("error" in raw for raw in raws):
        words = [
            f"device {n}: {raw['error']}" for (n, _), raw in zip(calls, raws, strict=True)
            if "error" in raw
        ]  # fmt: skip
        findings = [Finding(**{**f, "workgroup": tuple(f["workgroup"])})
                    for raw in raws for f in raw["findings"]]  # fmt: skip
        raise SimulatorError("\n".join([*words, *map(str, findings)]))
    results = iter(map(result_from, raws))
    return [[next(results) for _ in stream] for stream in devices]
