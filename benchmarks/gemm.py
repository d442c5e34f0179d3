"""gemm beside the library on this GPU: every kind of scales, bfloat16, and FP8 weights alone.

    python benchmarks/gemm.py [--save] [--quick]

Times are medians of CUDA-graph replays with the weights rotated over 600 MB (gpu.py has the clock),
microseconds a product. Both sides of a cell run in turns with a pause before each, because a GPU at
its power limit slows whatever runs last. The library is torch._scaled_mm (one scale a tensor and
blocks of 128: cuBLASLt; one a row: CUTLASS) and F.linear; beside FP8 weights of a bfloat16 a it is
F.linear of bfloat16 ones. The floor: the rate of --tflops for FP8
(half of it for bfloat16), or the bytes at the read rate measured in the same run.

--save writes results/<device>_gemm.json, and docs/<device>_gemm.md from it.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Callable

import gpu
import page
import torch
import torch.nn.functional as F
from gpu_report import markdown

# (N, K): layers of DeepSeek-V3 (TP8), Llama-3.1-8B, and what no table of the chooser has.
SHAPES = [(7168, 2048), (4096, 7168), (2112, 7168), (24576, 1536), (28672, 4096), (4096, 14336),
          (8192, 8192), (5120, 3072)]  # fmt: skip
ROWS = [24, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096]
BANDS = [(24, 48, 64), (96, 128), (256,), (512,), (1024,), (2048,), (4096,)]  # of M, summed up
KINDS = ("tensor", "row", "block", "bf16", "weights")
TURNS = 2
PAUSE_S = 0.03


def operands(kind: str, m: int, n: int, k: int) -> tuple:
    """a, the copies of w, and the scales of a and w."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    if kind == "bf16":
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        return x, [w.clone() for _ in range(gpu.buffers(2 * n * k))], None, None
    if kind == "weights":
        return x, gpu.fp8_weights(n, k), None, torch.rand(n, 1, device="cuda") + 0.5
    blocks = -(-k // 128)
    sizes = {"tensor": ((1,), (1,)), "row": ((m, 1), (n, 1)),
             "block": ((m, blocks), (-(-n // 128), blocks))}[kind]  # fmt: skip
    scales = [torch.rand(size, device="cuda") + 0.5 for size in sizes]
    return x.to(torch.float8_e4m3fn), gpu.fp8_weights(n, k), *scales


def library(kind: str, a, scale_a, scale_w) -> Callable:
    if kind == "bf16":
        return lambda w: F.linear(a, w)
    if kind == "block":
        # Scales of a by columns of 128, contiguous along M; those of w as they are.
        scale_a, scale_w = scale_a.t().contiguous().t(), scale_w.t()
    elif kind == "row":
        scale_w = scale_w.t()
    return lambda w: torch._scaled_mm(a, w.t(), scale_a, scale_w, out_dtype=torch.bfloat16)


def cell(package, kind: str, m: int, n: int, k: int) -> dict:
    a, weights, scale_a, scale_w = operands(kind, m, n, k)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    calls = {"ours": lambda w: package.gemm(a, w, scale_a, scale_w, out=out)}
    if kind != "weights":  # beside which the library's time is bf16's
        calls["library"] = library(kind, a, scale_a, scale_w)
    found = {
        "kind": kind, "m": m, "n": n, "k": k,
        "config": package.gemm_config(a, weights[0], scale_a, scale_w),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            time.sleep(PAUSE_S)
            try:
                times[name].append(gpu.measure(package, call, weights).median)
            except RuntimeError as error:  # a shape that the library does not take
                found[f"{name}_error"] = str(error).splitlines()[0][:120]
    return {**found, **{name: statistics.median(t) for name, t in times.items() if t}}


def floor_us(cell: dict, rate: float, tflops: float) -> float:
    m, n, k = cell["m"], cell["n"], cell["k"]
    element = 2 if cell["kind"] in ("bf16", "weights") else 1
    moved = element * (m + n) * k + 2 * m * n
    return max(moved / rate * 1e6, 2 * m * n * k / (tflops / element * 1e12) * 1e6)


def summary(saved: dict) -> str:
    """The library's time over ours by M: least, median and most over the layers; last against its
    time with one scale a tensor, or with bfloat16 weights."""
    library = {(c["kind"], c["m"], c["n"], c["k"]): c.get("library") for c in saved["cells"]}
    columns = {kind: (kind, kind) for kind in KINDS[:4]}
    columns |= {f"{kind}, per tensor's": (kind, "tensor") for kind in ("row", "block")}
    if any(c["kind"] == "weights" for c in saved["cells"]):
        columns["weights, bf16's"] = "weights", "bf16"
    lines = []
    for band in BANDS:
        line = [f"{band[0]} to {band[-1]}" if len(band) > 1 else str(band[0])]
        for kind, beside in columns.values():
            cells = [c for c in saved["cells"] if c["kind"] == kind and c["m"] in band]
            times = [(library[beside, c["m"], c["n"], c["k"]], c["ours"]) for c in cells]
            found = [theirs / ours for theirs, ours in times if theirs is not None]
            line.append(f"{min(found):.2f}, {statistics.median(found):.2f}, {max(found):.2f}")
        lines.append(line)
    return markdown(["M", *columns], lines)


def aims(saved: dict) -> str:
    """How many cells take no longer than the project wants, than 1.03 and than 1.1 times that."""
    times = {(c["kind"], c["m"], c["n"], c["k"]): c for c in saved["cells"]}
    at = sorted({key[1:] for key in times})
    prompts = [shape for shape in at if 96 <= shape[0] <= 256]

    def library(kind: str, shape: tuple) -> float:
        return times[kind, *shape]["library"]

    def wanted_of_few(kind: str, shape: tuple) -> float:
        floor = floor_us(times[kind, *shape], saved["read_rate"], saved["tflops"])
        return max(library(kind, shape) / 1.2, 1.25 * floor)

    wanted = {
        "row: the library's time with one scale a tensor":
            ("row", at, lambda s: library("tensor", s)),
        "block: 1.1 times that": ("block", at, lambda s: 1.1 * library("tensor", s)),
        "block: the library's time in blocks": ("block", at, lambda s: library("block", s)),
        "bf16: the library's over 0.95": ("bf16", at, lambda s: library("bf16", s) / 0.95),
        "row, M = 96 to 256: the library's over 1.2, or 1.25 times the floor":
            ("row", prompts, lambda s: wanted_of_few("row", s)),
        "block, M = 96 to 256: the same": ("block", prompts, lambda s: wanted_of_few("block", s)),
    }  # fmt: skip
    lines = []
    for name, (kind, shapes, limit) in wanted.items():
        over = [times[kind, *shape]["ours"] / limit(shape) for shape in shapes]
        kept = [str(sum(x <= allowed for x in over)) for allowed in (1, 1.03, 1.1)]
        lines.append([name, str(len(over)), *kept])
    return markdown(["wanted", "cells", "kept", "within 3 %", "within 10 %"], lines)


def document(saved: dict) -> str:
    kinds = list(dict.fromkeys(cell["kind"] for cell in saved["cells"]))
    by_shape: dict[tuple, dict] = {}
    for found in saved["cells"]:
        by_shape.setdefault((found["n"], found["k"], found["m"]), {})[found["kind"]] = found
    header = ["M, N x K"]
    for kind in kinds:
        header += [f"{kind}: ours", "library", "x"]
    alone = "; FP8 weights alone beside bfloat16's library" if "weights" in kinds else ""
    lines = []
    for (n, k, m), found in by_shape.items():
        line = [f"{m}, {n} x {k}"]
        for kind in kinds:
            ours = found[kind]["ours"]
            theirs = found["bf16" if kind == "weights" else kind].get("library")
            line += [f"{ours:.1f}", "-" if theirs is None else f"{theirs:.1f}"]
            line += ["-" if theirs is None else f"{theirs / ours:.2f}"]
        floor = floor_us(found["row"], saved["read_rate"], saved["tflops"])
        lines.append([*line, f"{floor:.1f}"])
    return "\n".join(
        [
            f"# gemm on {saved['machine']}\n",
            f"Measured {saved['date']} by `python benchmarks/gemm.py --save`: us, medians; "
            "x: the library's time\nover ours. Scales: one a tensor, one a row, blocks of 128; and "
            f"bfloat16{alone}. Floor: of FP8, {saved['tflops']:.0f} TFLOP/s or\n"
            f"{saved['read_rate'] / 1e12:.2f} TB/s. What bounds it: "
            "[kernels/gemm.md](kernels/gemm.md).\n",
            markdown([*header, "FP8 floor"], lines),
            "",
        ]
    )


def main() -> int:
    arguments = page.arguments(__doc__, quick="two products")
    torch.manual_seed(0)
    package = gpu.load_package()
    shapes, rows = (SHAPES[:1], ROWS[:2]) if arguments.quick else (SHAPES, ROWS)
    cells = [cell(package, kind, m, n, k) for n, k in shapes for m in rows for kind in KINDS]
    saved = {
        "machine": gpu.machine(), "date": str(datetime.date.today()), "tflops": arguments.tflops,
        "read_rate": gpu.read_rate(package), "cells": cells,
    }  # fmt: skip
    page.publish(f"{gpu.device_name()}_gemm", saved, document(saved), arguments.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
