"""What others measured on AMD GPUs beside what the cycle model says of the same kernels.

    make calibrate                 all sources, minutes to half an hour; writes the table
    python simulator/calibration/calibrate.py --sources rows --rows 1 128    a part, to the screen

Nothing here was measured on an AMD GPU by this project. Sources:

  laplacian  AMD's notes on an MI250X: 13 kernels, their own with clang 15, whose registers are the
             published ones, or as written anew in examples/laplacian
  rows       hf-rocm-kernels' published MI300X times for its own two row kernels
  radeonflow RadeonFlow's FP8 product with block scales, its times on an MI300X
  moonmath   its bfloat16 attention on an MI300X, with clang 19
  hipkittens its bfloat16 products on an MI325X and an MI355X
  skinny     its table for FP8 products of few rows, beside *our* kernel: shown, not judged
  triton     a product of gfx950 in another Triton, beside the same in the Triton that is installed
             (pip install triton): shown, not judged

Kernels of others are compiled from checkouts in build/calibration, amd-lab-notes, hf-rocm-kernels,
radeonflow and moonmath, or where $AMD_LAB_NOTES, $HF_ROCM_KERNELS, $RADEONFLOW and $MOONMATH say;
without one the source is named as missing. hipkittens ($HIPKITTENS) has a folder for each of its
branches main and cdna3, and needs a checkout of ROCm/clr, whose headers have the 8-bit and bfloat16
types that a distribution's lack, in build/calibration/clr or $ROCM_CLR.

A constant of the model was chosen on points marked `fit`; those marked `judge` played no part.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import dataclasses
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path += [
    str(ROOT),
    str(ROOT / "tests"),
    str(ROOT / "tools"),
    str(ROOT / "simulator" / "examples" / "laplacian"),
]

import laplacian  # noqa: E402
import rocm  # noqa: E402

import simulator  # noqa: E402

DATA = ROOT / "benchmarks" / "data"
OUTPUT = ROOT / "simulator" / "docs" / "calibration_table.md"
POINTS = Path(__file__).with_name("points.csv")
COLUMNS = 16384
# Points on which constants were chosen: L2's share and queue depths of gfx90a; launch_s and
# write_bytes_per_s of gfx942.
FITTED = (
    {("laplacian", name) for name in ("baseline", "baseline_streaming", "tiled_1", "tiled_8")}
    | {("swiglu", rows) for rows in (1, 32, 256, 1024)}
    | {("rmsnorm", rows) for rows in (512, 1024)}
)
# What hf-rocm-kernels' files include; hf_rocm_kernels.hip has what they need of it.
HEADERS = ("torch/all.h", "hip/hip_bf16.h", "hip/hip_fp16.h", "hip/hip_fp8.h",
           "hipcub/util_type.hpp", "hipcub/hipcub.hpp")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """One published number: what it is, and the model's."""

    source: str
    case: str
    quantity: str  # with its unit
    published: float
    modelled: float
    use: str  # fit, judge or shown

    @property
    def error(self) -> float:
        return self.modelled / self.published - 1

    def line(self) -> str:
        return (f"| {self.source} | {self.case} | {self.quantity} | {self.published:.4g} "
                f"| {self.modelled:.4g} | {self.error:+.1%} | {self.use} |")  # fmt: skip


def _use(*key) -> str:
    return "fit" if key in FITTED else "judge"


def laplacian_points(kernels: list[str] | None, planes=laplacian.PLANES) -> Iterator[Point]:
    """FETCH_SIZE, hit rate, time and occupancy of the Laplacian's steps on an MI250X."""
    import lab_notes

    known = laplacian.published()
    if lab_notes.available():
        code = lab_notes.Kernels()
    else:
        print(f"laplacian: required a checkout in {lab_notes.checkout()} and {lab_notes.COMPILER}: "
              "the kernels of examples/laplacian stand in", file=sys.stderr)  # fmt: skip
        code = laplacian.compiled()
    for name in kernels or known:
        row, step = known[name], laplacian.step(code, name, planes)
        use, case = _use("laplacian", name), row["step"]
        yield Point(
            "MI250X", case, "FETCH_SIZE, GB", float(row["fetch_gb"]), step.fetch_bytes / 1e9, use
        )
        yield Point("MI250X", case, "L2CacheHit, %", float(row["l2_hit"]), step.l2_hit, use)
        time = 2.64172 / float(row["speedup"])
        yield Point("MI250X", case, "time, ms", time, step.seconds * 1e3, use)
        yield Point("MI250X", case, "VGPRs", float(row["vgprs"]), step.vgprs, "shown")
        yield Point(
            "MI250X", case, "waves a SIMD", float(row["occupancy"]), step.occupancy, "shown"
        )


def _published(op: str) -> dict[int, float]:
    text = (DATA / "mi300x_published_us.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {
        int(r["rows"]): float(r["hf_rocm_kernels"]) for r in csv.DictReader(lines) if r["op"] == op
    }


def _checkout() -> Path:
    return Path(os.environ.get("HF_ROCM_KERNELS", ROOT / "build/calibration/hf-rocm-kernels"))


def _empty_headers() -> Path:
    folder = ROOT / "build" / "calibration" / "include"
    for header in HEADERS:
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / header).write_text("")
    return folder


def _row_kernels() -> simulator.CodeObject:
    checkout, folder = _checkout(), ROOT / "build" / "calibration"
    extra = (f"-I{_empty_headers()}", f"-I{checkout}", f"-I{checkout / 'csrc'}", "-w")
    source = Path(__file__).with_name("hf_rocm_kernels.hip")
    command = rocm.find_toolchain().device_command(
        source, folder / "rows.co", "gfx942", extra=extra
    )
    subprocess.run(command, check=True)
    return simulator.load(folder / "rows.co")


def _array(shape, dtype, random: np.random.Generator | None = None) -> np.ndarray:
    """An array that starts on a page, as device memory does."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    array = raw[start : start + count].view(dtype).reshape(shape)
    if random is not None:
        array[...] = random.standard_normal(shape)
    return array


def row_points(rows: list[int] | None) -> Iterator[Point]:
    """hf-rocm-kernels' SwiGLU and residual + RMSNorm on an MI300X, launched as its wrappers do."""
    if not (_checkout() / "csrc").exists():
        print(f"rows: {_checkout()} has no checkout of hf-rocm-kernels: left out", file=sys.stderr)
        return
    code, random = _row_kernels(), np.random.default_rng(0)
    machine = simulator.machine_for("gfx942", warm=True)  # their benchmark repeats one graph
    names = {op: next(k for k in code.kernels if op in k) for op in ("swiglu", "residual_rms")}
    scale, none = _array(1, np.float32), _array(8, np.float16)
    scale[:] = 0.02
    options = {"checks": False, "caches": False, "cycles": machine}
    for n, time in _published("swiglu_fp8").items():
        if rows and n not in rows:
            continue
        threads = 64 if n <= 8 else 256 if n <= 32 else 192
        x, out = _array((n, COLUMNS), np.float16, random), _array((n, COLUMNS // 2), np.uint8)
        arguments = [x, scale, out, none, np.int32(n), np.int32(COLUMNS // 2), np.int32(0)]
        grid = -(-n * COLUMNS // 16 // threads)
        got = code.launch(names["swiglu"], grid, threads, arguments, **options).cycles.seconds
        yield Point(
            "MI300X", f"SwiGLU + FP8, {n} rows", "time, us", time, got * 1e6, _use("swiglu", n)
        )
    weight = _array(COLUMNS, np.float16, random)
    for n, time in _published("rmsnorm_fp8").items():
        if rows and n not in rows:
            continue
        threads = 768 if 16 < n <= 32 else 960 if 64 < n <= 256 else 1024
        x, residual = (_array((n, COLUMNS), np.float16, random) for _ in range(2))
        arguments = [x, residual, weight, scale, _array((n, COLUMNS), np.uint8), none,
                     np.float32(1e-5), np.int32(COLUMNS), np.int32(0)]  # fmt: skip
        got = code.launch(names["residual_rms"], n, threads, arguments, **options).cycles.seconds
        yield Point(
            "MI300X", f"RMSNorm + FP8, {n} rows", "time, us", time, got * 1e6, _use("rmsnorm", n)
        )


def skinny_points(all_shapes: bool) -> Iterator[Point]:
    """Our skinny_gemm beside hf-rocm-kernels' own: another kernel, so nothing is judged."""
    import simulated
    import torch

    simulated.CHECKS = False
    hip = simulator.load_runtime()
    hip.cycles(simulator.machine_for("gfx942"))  # they rotate weights: nothing is in a cache
    try:
        for line in (DATA / "mi300x_skinny_gemm_us.csv").read_text().splitlines():
            if line.startswith(("#", "m,")):
                continue
            m, n, k, _, time = line.split(",")
            if not all_shapes and (int(n) > 2304 or int(m) not in (1, 8, 32)):
                continue
            a, w = (torch.randn(int(r), int(k)).to(torch.float8_e4m3fnuz) for r in (m, n))
            one = torch.ones(1)
            simulated.functional().skinny_gemm(a, w, one, one)
            got = hip.last().cycles.seconds * 1e6
            yield Point(
                "MI300X",
                f"FP8 product {m} x {n} x {k}, ours",
                "time, us",
                float(time),
                got,
                "shown",
            )
    finally:
        hip.cycles(None)


def radeonflow_points() -> Iterator[Point]:
    """RadeonFlow's product: transposes, main loop and sum, launched as its launcher does."""
    import radeonflow

    if not (radeonflow.checkout() / "src").exists():
        print(f"radeonflow: {radeonflow.checkout()} has no checkout: left out", file=sys.stderr)
        return
    machine = simulator.machine_for("gfx942", warm=True)  # its benchmark repeats the launches
    for case, got in radeonflow.cases(_array, machine):
        name = f"FP8 product {case.m} x {case.n} x {case.k}, RadeonFlow"
        yield Point("MI300X", name, "product, us", case.microseconds, got * 1e6, "judge")


def moonmath_points() -> Iterator[Point]:
    """moonmath's attention, one round of the GPU."""
    import moonmath

    if not (moonmath.checkout() / "csrc").exists() or not moonmath.compiler():
        print(f"moonmath: required a checkout in {moonmath.checkout()} and {moonmath.COMPILER}: "
              "left out", file=sys.stderr)  # fmt: skip
        return
    machine = simulator.machine_for("gfx942", warm=True)
    published, got = moonmath.teraflops(_array, machine, _empty_headers())
    name = f"attention, {moonmath.HEADS} heads x {moonmath.CONTEXT}, moonmath"
    yield Point("MI300X", name, "attention, TFLOP/s", published, got, "judge")


def hipkittens_points() -> Iterator[Point]:
    """HipKittens' products, all workgroups, some of K."""
    import hipkittens

    include = _empty_headers()
    for case in hipkittens.CASES:
        needed = (hipkittens.checkout() / case.file, hipkittens.headers() / "hip/amd_detail")
        if missing := [str(path) for path in needed if not path.exists()]:
            print(f"hipkittens: {' and '.join(missing)} not found: left out", file=sys.stderr)
            continue
        found = hipkittens.findings(case, _array, include)
        print(f"hipkittens: {case.gpu}: instructions with findings: {found}", file=sys.stderr)
        got = hipkittens.teraflops(case, _array, include)
        name = f"bfloat16 product, {case.size}^3, HipKittens"
        yield Point(case.gpu, name, "TFLOP/s", case.teraflops, got, "judge")


# TFLOP/s of 4096 x 4096 x 4096 in float16 on gfx950, by tile and LDS buffers: pull requests 1407
# and 1548 of facebookexperimental/triton, the rows without warp pipelining.
TRITON = {(256, 256, 3): 856, (256, 256, 2): 888, (256, 128, 3): 734, (128, 128, 3): 623}


def _triton_product(*case) -> tuple[Path, int, int]:
    """Of a process of its own: Triton ends in a segmentation fault where torch and the simulated
    launchers were loaded before it."""
    import triton_product

    return *triton_product.compiled(*case), triton_product.WAVES


def triton_points(size: int = 4096) -> Iterator[Point]:
    """A product like the published one, compiled by the Triton that is installed: its code differs,
    so nothing is judged."""
    if importlib.util.find_spec("triton") is None:
        print("triton: required the package triton: left out", file=sys.stderr)
        return
    folder, random = ROOT / "build" / "calibration", np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    a, b = (_array((size, size), np.float16, random) for _ in range(2))
    c = _array((size, size), np.float16)
    machine = simulator.machine_for("gfx950", warm=True, sampled=2)
    for (block_m, block_n, stages), published in TRITON.items():
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
            case = ("gfx950", block_m, block_n, stages, folder)
            file, lds, waves = process.submit(_triton_product, *case).result()
        code = simulator.load(file, "gfx950")
        grid, block = size // block_m * (size // block_n), 64 * waves
        arguments = [a, b, simulator.Out(c), size, size, size, None, None]
        got = code.launch("product", grid, block, arguments, lds, checks=False, caches=False,
                          cycles=machine).cycles.seconds  # fmt: skip
        want = a[:8].astype(np.float32) @ b.astype(np.float32).T
        if not np.allclose(c[:8], want, rtol=2e-3, atol=0.1):
            raise RuntimeError(f"{file.name}: required a @ b.T, got another product")
        case = f"float16 product, {size}^3, {block_m} x {block_n}, {stages} buffers, Triton"
        yield Point("gfx950", case, "TFLOP/s", published, 2e-12 * size**3 / got, "shown")


def summary(points: list[Point]) -> str:
    lines = ["| quantity | use | points | median error | worst |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[float]] = {}
    for p in points:
        if p.use != "shown":
            groups.setdefault((f"{p.source}: {p.quantity}", p.use), []).append(abs(p.error))
            groups.setdefault(("all", p.use), []).append(abs(p.error))
    for (quantity, use), errors in sorted(groups.items()):
        lines.append(f"| {quantity} | {use} | {len(errors)} | {statistics.median(errors):.1%} "
                     f"| {max(errors):.1%} |")  # fmt: skip
    return "\n".join(lines)


HEAD = """\
| GPU | case | quantity | published | modelled | error | use |
|---|---|---|---|---|---|---|"""


def saved() -> list[Point]:
    """The points of the last run that was written."""
    with open(POINTS, newline="") as file:
        return [
            Point(**{**row, **{name: float(row[name]) for name in ("published", "modelled")}})
            for row in csv.DictReader(file)
        ]


def document(points: list[Point]) -> str:
    """The page."""
    table = "\n".join([HEAD, *(point.line() for point in points)])
    return (
        "# Published against modelled\n\nWritten by `make calibrate`; "
        f"[simulator.md](simulator.md) says what it means.\n\n{summary(points)}\n\n{table}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sources = ("laplacian", "rows", "radeonflow", "moonmath", "hipkittens", "skinny", "triton")
    parser.add_argument("--sources", nargs="+", choices=sources, default=sources)
    parser.add_argument("--kernels", nargs="+", help="steps of the Laplacian")
    parser.add_argument("--rows", nargs="+", type=int, help="rows of the row kernels")
    parser.add_argument("--all-shapes", action="store_true", help="the large products too")
    parser.add_argument(
        "--write", action="store_true", help=f"writes {POINTS.name} and {OUTPUT.name}"
    )
    options = parser.parse_args()
    points = []
    print(HEAD)
    for name, found in (("laplacian", lambda: laplacian_points(options.kernels)),
                        ("rows", lambda: row_points(options.rows)),
                        ("radeonflow", radeonflow_points),
                        ("moonmath", moonmath_points),
                        ("hipkittens", hipkittens_points),
                        ("skinny", lambda: skinny_points(options.all_shapes)),
                        ("triton", triton_points)):  # fmt: skip
        for point in found() if name in options.sources else ():
            points.append(point)
            print(point.line(), flush=True)
    print("\n" + summary(points))
    if options.write:
        with open(POINTS, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(field.name for field in dataclasses.fields(Point))
            writer.writerows(dataclasses.astuple(point) for point in points)
        OUTPUT.write_text(document(points))


if __name__ == "__main__":
    main()
