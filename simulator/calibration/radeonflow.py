"""RadeonFlow's FP8 product with block scales on an MI300X, launched as its launcher does.

C [M, N] = A B with a [K, M] and b [K, N] in FP8: both are transposed first, then multiplied, and
the parts of a split K are summed by a last kernel. The published time holds all of them.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import rocm

import simulator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "calibration"


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    split: int
    microseconds: float  # the best that its README prints for an MI300X


# The README has the first six of eighteen.
CASES = [
    Case(1024, 1536, 7168, 4, 76.33),
    Case(1024, 3072, 1536, 2, 42.78),
    Case(1024, 576, 7168, 8, 45.14),
    Case(1024, 7168, 256, 1, 20.37),
    Case(1024, 7168, 2048, 1, 75.29),
    Case(1024, 4608, 7168, 2, 136.35),
]
# The launcher's choice by (rows, columns): tile, threads, elements a thread.
TRANSPOSES = {
    (256, 1024): (64, 256, 4),
    (256, 7168): (64, 256, 8),
    (1536, 1024): (64, 1024, 4),
    (1536, 3072): (64, 512, 4),
    (2048, 1024): (64, 1024, 4),
    (2048, 7168): (128, 512, 8),
    (7168, 576): (64, 512, 4),
    (7168, 1024): (64, 256, 4),
    (7168, 1536): (128, 1024, 8),
    (7168, 4608): (128, 512, 8),
}
TILE_M, TILE_N, THREADS, BLOCK = 256, 128, 512, 128


def checkout() -> Path:
    return Path(os.environ.get("RADEONFLOW", FOLDER / "radeonflow"))


def _compiled() -> simulator.CodeObject:
    source, output = Path(__file__).with_name("radeonflow.hip"), FOLDER / "radeonflow.co"
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = rocm.find_toolchain().device_command(
        source, output, "gfx942", extra=(f"-I{checkout()}", "-w")
    )
    subprocess.run(command, check=True)
    return simulator.load(output)


def _e4m3fnuz() -> np.ndarray:
    """Value of each byte; 0x80, the NaN, is never drawn."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 11), mantissa * 2.0**-10)
    return np.where(byte & 128, -value, value).astype(np.float32)


def _named(code: simulator.CodeObject, *parts: str) -> str:
    (name,) = (k for k in code.kernels if all(part in k for part in parts))
    return name


def seconds(case: Case, array, machine: simulator.cycles.Machine, code) -> float:
    """Modelled time of all the case's kernels; RuntimeError when the product is wrong.

    array: makes an array of a shape and type that starts on a page."""
    m, n, k, split = case.m, case.n, case.k, case.split
    random, value = np.random.default_rng(0), _e4m3fnuz()
    options = {"checks": False, "caches": False, "cycles": machine}
    total, turned = 0.0, []
    for columns in (m, n):
        given, out = array((k, columns), np.uint8), array((columns, k), np.uint8)
        sign = random.integers(2, size=given.shape) << 7
        given[...] = random.integers(0x28, 0x48, given.shape) | sign
        tile, threads, width = TRANSPOSES[k, columns]
        kernel = _named(code, "transpose", f"Li{k}ELi{columns}ELi{tile}ELi{threads}E")
        block = (tile // width, threads * width // tile)
        got = code.launch(kernel, (columns // tile, k // tile), block, [out, given], **options)
        total += got.cycles.seconds
        turned.append(out)
    scales = [array((k // BLOCK, size), np.float32) for size in (m, -(-n // BLOCK))]
    for scale in scales:
        scale[...] = random.random(scale.shape) + 0.5
    out = array((m, n), np.uint16)
    parts = array((split, m, n), np.float32)
    grid = (-(-n // TILE_N) * 2, -(-m // TILE_M) // 2, split)
    kernel = _named(code, "gemm_kernel11", f"Li{m}ELi{n}ELi{k // split}E", f"Li{k}ELi{k}E")
    given = [*turned, parts if split > 1 else out, *scales]
    total += code.launch(kernel, grid, THREADS, given, **options).cycles.seconds
    if split > 1:
        kernel = _named(code, "reduce_kernel", f"Li{m}ELi{n}ELi{split}E")
        got = code.launch(kernel, m * n // 4 // 256, 256, [parts, out], **options)
        total += got.cycles.seconds
    a, b = (value[x] for x in turned)
    wide = np.repeat(np.repeat(scales[1], BLOCK, 0), BLOCK, 1)[:, :n]
    want = (a[:4] * np.repeat(scales[0], BLOCK, 0).T[:4]) @ (b.T * wide)
    found = (out[:4].astype(np.uint32) << 16).view(np.float32)
    if not np.allclose(found, want, rtol=1e-2, atol=1e-2 * np.abs(want).max()):
        raise RuntimeError(f"{case}: required the product of A and B, got another")
    return total


def cases(array, machine: simulator.cycles.Machine) -> Iterator[tuple[Case, float]]:
    """Each published case and its modelled seconds."""
    code = _compiled()
    for case in CASES:
        yield case, seconds(case, array, machine, code)
