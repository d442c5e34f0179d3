"""The tutorial's table: every step of laplacian.hip on the cycle model of an MI250X.

    python simulator/examples/laplacian/laplacian.py [--kernels baseline tiled_8] [--planes 24 48]

A grid of 512 x 512 x 512 takes minutes a step to execute, so two shallower grids are played and
what a plane adds between them is carried on to 512 planes: the planes keep their size, and with it
the distances of reuse that L2 sees. Published numbers stand beside the modelled ones.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT), str(ROOT / "tools")]

import rocm  # noqa: E402

import simulator  # noqa: E402
from simulator.timing import occupancy_of  # noqa: E402

SOURCE = Path(__file__).with_name("laplacian.hip")
PUBLISHED = Path(__file__).with_name("published.csv")
TARGET = "gfx90a"
NX = NY = NZ = 512
THREADS = 256
PLANES = (24, 48)
# As the published code was compiled: a load for each neighbour, scratch through scratch
# instructions, which is what the simulator knows of gfx90a.
FLAGS = ("-DSEPARATE_LOADS", "-Xclang", "-target-feature", "-Xclang", "+enable-flat-scratch")


class Grid(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("nx", "ny", "nz", "_")] + [
        (n, ctypes.c_double) for n in "xyzc"
    ]


@dataclasses.dataclass(frozen=True)
class Step:
    """A kernel at 512^3: bytes over the fabric, hit rate, seconds, and what the compiler took."""

    fetch_bytes: float
    write_bytes: float
    l2_hit: float
    seconds: float
    vgprs: int
    sgprs: int
    scratch: int
    occupancy: int


def published() -> dict[str, dict]:
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    return {row["kernel"]: row for row in csv.DictReader(lines)}


def compiled(target: str = TARGET, flags: tuple[str, ...] = FLAGS) -> simulator.CodeObject:
    folder = ROOT / "build" / "laplacian"
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"laplacian-{target}.co"
    toolchain = rocm.find_toolchain()
    subprocess.run(toolchain.device_command(SOURCE, output, target, extra=flags), check=True)
    return simulator.load(output, target)


def aligned(count: int) -> np.ndarray:
    """Doubles that start on a page of 2 MiB, as hipMalloc gives them: lines depend on it."""
    page = 1 << 21
    raw = np.zeros(count * 8 + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + count * 8].view(np.float64)


def launch(code: simulator.CodeObject, kernel: str, planes: int, machine) -> simulator.api.Result:
    """Runs a step on NX x NY x planes points of random data and checks some rows of the result."""
    u, f = aligned(NX * NY * planes), aligned(NX * NY * planes)
    u[:] = np.random.default_rng(0).standard_normal(u.size)
    x, y, z = 1.0, 2.0, 3.0
    grid = Grid(NX, NY, planes, 0, x, y, z, -2 * (x + y + z))
    tile = int(kernel.rpartition("_")[2]) if kernel[-1].isdigit() else 1
    blocks = (NX // THREADS, NY // tile, planes)
    result = code.launch(
        kernel, blocks, THREADS, [f, u, grid], checks=False, caches=False, cycles=machine
    )
    v, got = u.reshape(planes, NY, NX), f.reshape(planes, NY, NX)
    for k, j in ((1, 1), (planes // 2, NY // 2), (planes - 2, NY - 2)):
        want = (
            v[k, j, 1:-1] * grid.c
            + (v[k, j, :-2] + v[k, j, 2:]) * x
            + (v[k, j - 1, 1:-1] + v[k, j + 1, 1:-1]) * y
            + (v[k - 1, j, 1:-1] + v[k + 1, j, 1:-1]) * z
        )
        np.testing.assert_allclose(got[k, j, 1:-1], want, atol=1e-12)
    return result


def step(code: simulator.CodeObject, kernel: str, planes=PLANES, machine=None) -> Step:
    machine = machine or simulator.machine_for(TARGET)
    results = [launch(code, kernel, n, machine) for n in planes]

    def carried(value) -> float:
        few, many = (value(r.cycles) for r in results)
        return many + (many - few) / (planes[1] - planes[0]) * (NZ - planes[1])

    requests, hits = (
        carried(lambda c, name=name: c.raw["memory"][name]) for name in ("l2_requests", "l2_hits")
    )
    resources = results[0].raw["resources"]
    return Step(
        carried(lambda c: c.fetch_bytes),
        carried(lambda c: c.write_bytes),
        100 * hits / requests,
        carried(lambda c: c.seconds),
        resources["vgprs"],
        resources["sgprs"],
        resources["scratch"],
        occupancy_of(
            resources["vgprs"], machine.waves, machine.registers, machine.register_granule
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = published()
    parser.add_argument("--kernels", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--planes", nargs=2, type=int, default=PLANES)
    options = parser.parse_args()
    code = compiled()
    print(
        "| kernel | VGPRs | scratch | waves a SIMD | FETCH_SIZE, GB | L2 hits, % | speed-up | ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    base = None
    for name in options.kernels:
        s, p = step(code, name, options.planes), known[name]
        base = base or s.seconds * float(p["speedup"])
        print(
            f"| {p['step']} | {s.vgprs} ({p['vgprs']}) | {s.scratch} ({p['scratch']}) "
            f"| {s.occupancy} ({p['occupancy']}) | {s.fetch_bytes / 1e9:.3f} ({p['fetch_gb']}) "
            f"| {s.l2_hit:.1f} ({p['l2_hit']}) | {base / s.seconds:.2f} ({p['speedup']}) "
            f"| {s.seconds * 1e3:.2f} ({2.64172 / float(p['speedup']):.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
