"""The CPU kernels beside what PyTorch offers for the same work, in one run on this machine.

    python benchmarks/cpu.py [--save] [--threads N]

Candidates take turns, so that a slow moment of the machine meets all of them; the median is shown.
With one thread its processor time counts, which other work on the machine does not stretch as much.
Weights rotate over more than the last-level cache holds, activations stay hot as they do in a
model. The floor is the time that the bytes take at the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import kernels
import torch
import torch.nn.functional as F
from eager import rmsnorm_fp8_eager, swiglu_fp8_eager
from gpu_report import markdown
from result_text import result_text
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.benchmark import Timer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
REPORT = ROOT / "docs" / "cpu_benchmarks.md"

ELEMENTWISE_SHAPES = [(1, 16384), (8, 16384), (256, 4096), (2048, 4096)]
GEMM_SHAPES = [(2304, 16384), (13312, 16384), (16384, 6656)]
GEMM_ROWS = [1, 8, 16, 32, 64]
LINEAR_SHAPES = [(3072, 576), (576, 1536), (1000, 1000), (4096, 4096), (5000, 4208), (11008, 2560)]
LINEAR_ROWS = [8, 16, 17, 32, 48, 64, 100, 128, 200, 512]
ROTATED_BYTES = 256 << 20
CACHED = (
    "Weights are cold. Activations are hot, as they are in a model: where they came out of a cache "
    'quicker than memory delivers, the share of the floor says nothing, and "cached" stands for it.'
)


@dataclass
class Row:
    """One line of a table: times in microseconds, bytes that must move."""

    case: str
    times_us: dict[str, float]
    bytes: int


def clock() -> Callable[[], float]:
    return time.perf_counter if torch.get_num_threads() > 1 else time.thread_time


def timer_of(statement: str, variables: dict) -> Timer:
    threads = torch.get_num_threads()
    return Timer(statement, timer=clock(), globals=variables, num_threads=threads)


def medians_us(candidates: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median time of each candidate; they take turns for about ``seconds`` in all."""
    timers, counts = {}, {}
    for name, call in candidates.items():
        timers[name] = timer_of("call()", {"call": call})
        for _ in range(3):
            call()
        once = timers[name].timeit(1).median
        counts[name] = max(1, int(seconds / len(candidates) / 15 / once))
    rounds = {name: [] for name in candidates}
    for _ in range(15):
        for name, timer in timers.items():
            rounds[name].append(timer.timeit(counts[name]).median * 1e6)
    return {name: statistics.median(times) for name, times in rounds.items()}


def read_bandwidth() -> float:
    """Bytes a second of reducing 1 GiB: the best of two reductions, a dozen times each."""
    data = torch.ones(1 << 28)
    timers = [timer_of(f"x.{op}()", {"x": data}) for op in ("sum", "max")]
    return max(data.nbytes / timer.timeit(1).median for timer in timers for _ in range(12))


def rotating(n: int, k: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Gives one of so many weights, in turn, that none is still cached."""
    count = max(2, ROTATED_BYTES // (n * k * dtype.itemsize) + 1)
    cycle = itertools.cycle(
        [torch.randn(n, k, dtype=torch.bfloat16).to(dtype) for _ in range(count)]
    )
    return lambda: next(cycle)


def norm_row(package, compiled: Callable, count: int, columns: int) -> Row:
    x, residual = (torch.randn(count, columns).bfloat16() for _ in range(2))
    weight, scale = torch.randn(columns).bfloat16(), torch.tensor([0.05])
    # Zeroing keeps the residual from growing without bounds; it is no part of the op.
    calls = {
        "eager": lambda: rmsnorm_fp8_eager(x, residual.zero_(), weight, scale),
        "torch.compile": lambda: compiled(x, residual.zero_(), weight, scale),
        "rocm-kernels": lambda: package.rmsnorm_fp8(
            x, weight, residual=residual.zero_(), scale=scale
        ),
        "per token": lambda: package.rmsnorm_fp8(x, weight, residual=residual.zero_()),
        "zeroing": residual.zero_,
    }
    times = medians_us(calls, 2.0)
    zeroing = times.pop("zeroing")
    times = {name: time - zeroing for name, time in times.items()}
    moved = count * columns * (2 + 2 + 2 + 1) + 2 * columns
    return Row(f"residual + RMSNorm + FP8, {count} x {columns}", times, moved)


def activation_row(package, compiled: Callable, count: int, columns: int) -> Row:
    x, scale = torch.randn(count, columns).bfloat16(), torch.tensor([0.05])
    calls = {
        "eager": lambda: swiglu_fp8_eager(x, scale),
        "torch.compile": lambda: compiled(x, scale),
        "rocm-kernels": lambda: package.swiglu_fp8(x, scale=scale),
        "per token": lambda: package.swiglu_fp8(x),
    }
    moved = count * columns * 2 + count * columns // 2
    case = f"SwiGLU + FP8, {count} x {columns} -> {columns // 2}"
    return Row(case, medians_us(calls, 2.0), moved)


def elementwise_rows(package) -> list[Row]:
    norm, activation = (
        torch.compile(eager, fullgraph=True, dynamic=False)
        for eager in (rmsnorm_fp8_eager, swiglu_fp8_eager)
    )
    rows = []
    for shape in track(ELEMENTWISE_SHAPES, description="norm and activation", transient=True):
        rows.append(norm_row(package, norm, *shape))
        rows.append(activation_row(package, activation, *shape))
    return rows


def gemm_row(package, wide: Callable, narrow: Callable, m: int, n: int, k: int) -> Row:
    x = torch.randn(m, k).bfloat16()
    a, scale_a = package.quantize_fp8(x)
    scale_w = torch.rand(n, 1)
    calls = {
        "F.linear bf16": lambda: F.linear(x, wide()),
        "rocm-kernels FP8": lambda: package.skinny_gemm(a, narrow(), scale_a, scale_w),
        "weight only": lambda: package.skinny_gemm(x, narrow(), None, scale_w),
    }
    moved = n * k + m * k + 2 * m * n + 4 * (m + n)
    return Row(f"M {m}, N {n}, K {k}", medians_us(calls, 3.0), moved)


def gemm_rows(package) -> list[Row]:
    rows = []
    for n, k in track(GEMM_SHAPES, description="skinny_gemm", transient=True):
        wide = rotating(n, k, torch.bfloat16)
        narrow = rotating(n, k, torch.float8_e4m3fn)
        rows += [gemm_row(package, wide, narrow, m, n, k) for m in GEMM_ROWS]
    return rows


def linear_row(package, wide: Callable, narrow: Callable, m: int, n: int, k: int) -> Row:
    """fp8_linear, which quantises its input, and the two products that it chooses from."""
    x, out = torch.randn(m, k).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
    a, scale_a = package.quantize_fp8(x)
    scale_w = torch.rand(n, 1)
    ops = package.functional.ops

    def slices() -> None:
        w = narrow()
        for rows in range(0, m, 64):
            part = slice(rows, rows + 64)
            ops.skinny_gemm(out[part], a[part], w, scale_a[part], scale_w, None)

    calls = {
        "F.linear bf16": lambda: F.linear(x, wide()),
        "fp8_linear": lambda: package.fp8_linear(x, narrow(), scale_w),
        "skinny_gemm, slices": slices,
        "gemm": lambda: ops.gemm(out, a, narrow(), scale_a, scale_w, None),
    }
    path = package.fp8_linear_path(m, narrow(), scale_w)
    case = f"M {m}, N {n}, K {k}: {path}"
    return Row(case, medians_us(calls, 2.0), n * k + 2 * m * k + 2 * m * n + 4 * n)


def linear_rows(package) -> list[Row]:
    rows = []
    for n, k in track(LINEAR_SHAPES, description="fp8_linear", transient=True):
        wide = rotating(n, k, torch.bfloat16)
        narrow = rotating(n, k, torch.float8_e4m3fn)
        rows += [linear_row(package, wide, narrow, m, n, k) for m in LINEAR_ROWS]
    return rows


def of_floor(floor: float, time: float) -> str:
    """What memory would allow, of what is reached; data that is quicker never came from there."""
    return f"{floor / time:.0%}" if time >= floor else "cached"


def table(rows: list[Row], bandwidth: float, baseline: str, ours: str):
    names = list(rows[0].times_us)
    header = ["case", *(f"{name}, us" for name in names), "floor, us", "of floor", f"x {baseline}"]
    lines = []
    for row in rows:
        floor = row.bytes / bandwidth * 1e6
        lines.append(
            [
                row.case,
                *(f"{row.times_us[name]:,.1f}" for name in names),
                f"{floor:,.1f}",
                of_floor(floor, row.times_us[ours]),
                f"{row.times_us[baseline] / row.times_us[ours]:.2f}",
            ]
        )
    return header, lines


# Title of each table, and the columns that it compares: a row belongs to the table whose own
# candidate it has.
TABLES = {
    "Norm and activation, bfloat16 in, static scale": ("eager", "rocm-kernels"),
    "Matrix products, cold weights": ("F.linear bf16", "rocm-kernels FP8"),
    "Linear layers of many rows, cold weights, and which product fp8_linear chose":
        ("F.linear bf16", "fp8_linear"),
}  # fmt: skip


def tables(saved: dict) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Header and lines of each table of saved results, by its title."""
    rows = [Row(**row) for row in saved["rows"]]
    return {
        title: table([r for r in rows if ours in r.times_us], saved["bandwidth"], baseline, ours)
        for title, (baseline, ours) in TABLES.items()
    }


def document(saved: dict) -> str:
    """The page of saved results."""
    sections = [f"## {title}\n\n{markdown(*lines)}\n" for title, lines in tables(saved).items()]
    return (
        f"# CPU benchmarks\n\nMeasured by `{saved['command']}` on: {saved['machine']}.\n\n"
        "Medians of candidates that take turns. Floor: the bytes that must move, at the read "
        f"bandwidth of the same run.\n{CACHED}\n\n" + "\n".join(sections)
    )


def show(console: Console, title: str, header: list[str], lines: list[list[str]]) -> None:
    grid = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        grid.add_column(name, justify="right" if index else "left")
    for line in lines:
        grid.add_row(*line)
    console.print(grid)


def processor() -> str:
    """Its name, and whether it has tiles, which F.linear multiplies bfloat16 by too."""
    lines = dict(
        map(str.strip, line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    name = lines.get("model name", platform.machine())
    return f"{name} with AMX" if "amx_bf16" in lines.get("flags", "") else name


def command() -> str:
    options = " ".join(["--save", *(f"--threads {n}" for n in [torch.get_num_threads()] if n == 1)])
    return f'make bench ARGS="{options}"'


def threads_used() -> str:
    threads = torch.get_num_threads()
    return f"{threads} threads" if threads > 1 else "the processor time of one thread"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--save", action="store_true", help=f"write {RESULTS.name} and {REPORT.name} too"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ.setdefault("LOCAL_KERNELS", f"org/rocm-kernels={ROOT}")
    package = kernels.get_kernel("org/rocm-kernels", version=1, backend="cpu")
    torch.manual_seed(0)

    bandwidth = read_bandwidth()
    elementwise = elementwise_rows(package)
    gemm = gemm_rows(package)
    linear = linear_rows(package)
    machine = (
        f"{processor()}, {threads_used()}, read bandwidth {bandwidth / 1e9:.1f} GB/s; "
        f"torch {torch.__version__}; {datetime.date.today()}"
    )
    saved = {"command": command(), "machine": machine, "bandwidth": bandwidth}
    saved["rows"] = [asdict(row) for row in elementwise + gemm + linear]
    console = Console(width=150 if not sys.stdout.isatty() else None)
    console.print(machine)
    for title, (header, lines) in tables(saved).items():
        show(console, title, header, lines)
    console.print(CACHED)
    if arguments.save:
        RESULTS.write_text(result_text(saved))
        REPORT.write_text(document(saved))
    return 0


if __name__ == "__main__":
    sys.exit(main())
