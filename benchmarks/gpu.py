"""The CUDA or ROCm kernels beside their peers, in one run on this GPU.

    python benchmarks/gpu.py [--save]

Every candidate is captured into a CUDA graph of many launches and the graph is replayed: the time
is the median over replays, for each launch; the spread is that from the tenth to the ninetieth
percentile. Weights and inputs rotate over more than 512 MB, so that none is still in a cache, but
over 256 buffers at most: what is smaller than 2 MB is partly cached for all candidates alike. The
floor is the time that the bytes take at the read rate measured in the same run.

Peers: PyTorch eager, torch.compile, cuBLASLt (hipBLASLt) through torch._scaled_mm with fast
accumulation, and F.linear in 16 bits.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"

OURS = "rocm-kernels"
WEIGHT_ONLY = "rocm-kernels, bf16 x FP8"
ROTATED_BYTES = 600 << 20
MAX_BUFFERS = 256
MIN_LAUNCHES = 24
REPLAYS = 15

# (N, K): Llama-3.1-405B under 8-way tensor parallelism, 8B on one device, 70B under 8-way.
GEMM_SHAPES = {
    "405B TP8": [(2304, 16384), (13312, 16384), (16384, 6656)],
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "70B TP8": [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)],
}
GEMM_ROWS = [1, 2, 4, 8, 16, 24, 32, 48, 64]
GEMV_SHAPES = [(128, 128), (1024, 128), (4096, 128), (1024, 1024), (2048, 2048), (4096, 4096)]
COLUMNS = 16384
ROW_COUNTS = [1, 8, 32, 128, 512, 2048]


@dataclass
class Measured:
    """Microseconds of one candidate: median, tenth and ninetieth percentile over replays."""

    median: float
    low: float
    high: float


@dataclass
class Case:
    """One product or one row-wise op: its sizes, the bytes that must move, a time for each peer."""

    op: str
    model: str
    m: int
    n: int
    k: int
    bytes: int
    times: dict[str, Measured]


def load_package():
    """The built kernel, from its folder: `kernels` need not be installed."""
    platform = "rocm" if torch.version.hip else "cu"
    variants = sorted((ROOT / "build").glob(f"torch-stable-abi*-{platform}*"))
    if not variants:
        sys.exit(f"no build/*-{platform}* found: run make build with BACKEND=cuda or rocm")
    spec = importlib.util.spec_from_file_location(
        "rocm_kernels_built",
        variants[0] / "__init__.py",
        submodule_search_locations=[str(variants[0])],
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measure(call: Callable, inputs: list) -> Measured:
    """Captures a call for each input, MIN_LAUNCHES or more in all, and replays the graph."""
    inputs = inputs * -(-MIN_LAUNCHES // len(inputs))
    with torch.cuda.stream(torch.cuda.Stream()):
        call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for item in inputs:
            call(item)
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    deciles = statistics.quantiles(times, n=10)
    return Measured(statistics.median(times), deciles[0], deciles[-1])


def buffers(bytes_each: int) -> int:
    return max(2, min(MAX_BUFFERS, ROTATED_BYTES // bytes_each + 1))


def read_rate() -> float:
    """Bytes a second of summing 2 GiB."""
    data = torch.ones(1 << 29, device="cuda")
    return data.nbytes / (measure(torch.sum, [data] * 4).median * 1e-6)


def fp8_weights(n: int, k: int) -> list[torch.Tensor]:
    values = torch.randn(n * k, device="cuda", dtype=torch.float16).to(torch.float8_e4m3fn)
    return [values.view(n, k).clone() for _ in range(buffers(n * k))]


def gemm_times(package, m: int, weights: list[torch.Tensor], wide: list[torch.Tensor]):
    n, k = weights[0].shape
    one = torch.ones(1, device="cuda")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    a = x.to(torch.float8_e4m3fn)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def library(w):
        return torch._scaled_mm(
            a, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return {
        OURS: measure(lambda w: package.skinny_gemm(a, w, one, one, out=out), weights),
        "cuBLASLt FP8": measure(library, weights),
        "F.linear bf16": measure(lambda w: F.linear(x, w), wide),
        WEIGHT_ONLY: measure(lambda w: package.skinny_gemm(x, w, None, one, out=out), weights),
    }


def gemm_cases(package) -> list[Case]:
    cases = []
    for model, shapes in GEMM_SHAPES.items():
        for n, k in shapes:
            weights = fp8_weights(n, k)
            wide = [w.to(torch.bfloat16) for w in weights[: buffers(2 * n * k)]]
            for m in GEMM_ROWS:
                times = gemm_times(package, m, weights, wide)
                cases.append(Case("skinny_gemm", model, m, n, k, n * k + m * k + 2 * m * n, times))
    return cases


def gemv_case(package, n: int, k: int) -> Case:
    half = {"device": "cuda", "dtype": torch.float16}
    weights = [torch.randn(n, k, **half) for _ in range(buffers(2 * n * k))]
    a = torch.randn(1, k, **half)
    times = {
        OURS: measure(lambda w: package.skinny_gemm(a, w), weights),
        "cuBLAS fp16": measure(lambda w: F.linear(a, w), weights),
    }
    return Case("gemv_fp16", "", 1, n, k, 2 * (n * k + k + n), times)


def quantize_eager(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def rmsnorm_eager(x, residual, weight, scale):
    residual.add_(x)
    h = residual.float()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    return quantize_eager(y, scale)


def swiglu_eager(x, scale):
    gate, up = x.chunk(2, -1)
    return quantize_eager(F.silu(gate.float()) * up.float(), scale)


def rowwise_cases(package, rows: int, norm: Callable, activation: Callable) -> list[Case]:
    half = {"device": "cuda", "dtype": torch.float16}
    weight, scale = torch.randn(COLUMNS, **half), torch.full((1,), 0.05, device="cuda")
    moved = rows * COLUMNS * (2 + 2 + 2 + 1)
    pairs = [torch.randn(2, rows, COLUMNS, **half) for _ in range(buffers(moved))]

    def ours(pair):
        return package.rms_norm_fp8(pair[0], weight, residual=pair[1], scale=scale)

    times = {
        OURS: measure(ours, pairs),
        "torch.compile": measure(lambda pair: norm(*pair, weight, scale), pairs),
        "eager": measure(lambda pair: rmsnorm_eager(*pair, weight, scale), pairs[:32]),
    }
    cases = [Case("rmsnorm_fp8", "", rows, 0, COLUMNS, moved, times)]

    moved = rows * COLUMNS * 2 + rows * COLUMNS // 2
    inputs = [x for pair in pairs for x in pair]
    times = {
        OURS: measure(lambda x: package.swiglu_fp8(x, scale=scale), inputs),
        "torch.compile": measure(lambda x: activation(x, scale), inputs),
        "eager": measure(lambda x: swiglu_eager(x, scale), inputs[:32]),
    }
    return [*cases, Case("swiglu_fp8", "", rows, 0, COLUMNS, moved, times)]


def tables(cases: list[Case], rate: float) -> str:
    """Markdown, one table an op."""
    titles = {
        "skinny_gemm": "skinny_gemm: FP8 x FP8 to bfloat16, scales per tensor",
        "gemv_fp16": "skinny_gemm: one row, float16",
        "rmsnorm_fp8": f"residual + RMSNorm + FP8, {COLUMNS} columns, float16, static scale",
        "swiglu_fp8": f"SwiGLU + FP8, {COLUMNS} to {COLUMNS // 2} columns, float16, static scale",
    }
    parts = []
    for op, title in titles.items():
        chosen = [case for case in cases if case.op == op]
        if not chosen:
            continue
        peers = list(chosen[0].times)
        best = [peer for peer in peers if not peer.startswith(OURS)]
        header = ["shape", "rows", *(f"{peer}, us" for peer in peers), "spread", "floor, us"]
        header += ["of floor", "x best peer"]
        lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
        for case in chosen:
            ours, floor = case.times[OURS], case.bytes / rate * 1e6
            shape = f"{case.n} x {case.k} {case.model}".strip() if case.n else str(case.k)
            peer = min(case.times[name].median for name in best)
            lines.append(
                [
                    shape,
                    str(case.m),
                    *(f"{case.times[name].median:.2f}" for name in peers),
                    f"{(ours.high - ours.low) / ours.median:.1%}",
                    f"{floor:.2f}",
                    f"{floor / ours.median:.0%}",
                    f"{peer / ours.median:.2f}",
                ]
            )
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"## {title}\n\n{body}\n")
    return "\n".join(parts)


def plot_gemm(cases: list[Case], rate: float, path: Path) -> None:
    """Time over floor by rows, one panel a shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((c.model, c.n, c.k) for c in cases if c.op == "skinny_gemm"))
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(shapes) // columns), columns, figsize=(15, 9), sharex=True, layout="constrained"
    )
    for axis in axes.flat[len(shapes) :]:
        axis.axis("off")
    for axis, (model, n, k) in zip(axes.flat, shapes, strict=False):
        chosen = [
            c for c in cases if c.op == "skinny_gemm" and (c.model, c.n, c.k) == (model, n, k)
        ]
        for peer, style in ((OURS, "o-"), ("cuBLASLt FP8", "s--"), ("F.linear bf16", "^:")):
            axis.plot(
                [c.m for c in chosen], [c.times[peer].median for c in chosen], style, label=peer
            )
        axis.plot([c.m for c in chosen], [c.bytes / rate * 1e6 for c in chosen], "k-", lw=0.8,
                  label="floor")  # fmt: skip
        axis.set_title(f"{model}: N {n}, K {k}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("rows of a")
    figure.supylabel("microseconds")
    figure.savefig(path, dpi=110)


def plot_rowwise(cases: list[Case], rate: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, op in zip(axes, ("rmsnorm_fp8", "swiglu_fp8"), strict=True):
        chosen = [c for c in cases if c.op == op]
        for peer, style in ((OURS, "o-"), ("torch.compile", "s--"), ("eager", "^:")):
            axis.plot(
                [c.m for c in chosen], [c.times[peer].median for c in chosen], style, label=peer
            )
        axis.plot([c.m for c in chosen], [c.bytes / rate * 1e6 for c in chosen], "k-", lw=0.8,
                  label="floor")  # fmt: skip
        axis.set_title(f"{op}, {COLUMNS} columns", fontsize=10)
        axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="microseconds", ylim=(0.5, None))
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def report(name: str) -> None:
    """Writes the tables and plots of a saved run."""
    saved = json.loads((RESULTS / f"{name}.json").read_text())
    cases = [
        Case(**{**case, "times": {peer: Measured(**t) for peer, t in case["times"].items()}})
        for case in saved["cases"]
    ]
    rate = saved["read_rate"]
    plots = DOCS / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    plot_gemm(cases, rate, plots / f"{name}_skinny_gemm.png")
    plot_rowwise(cases, rate, plots / f"{name}_rowwise.png")
    (DOCS / f"{name}_benchmarks.md").write_text(
        f"# Benchmarks on {saved['machine']}\n\n"
        f"Measured {saved['date']} by `python benchmarks/gpu.py --save`; tables and plots made "
        f"from `benchmarks/results/{name}.json`.\nRead rate of the run: {rate / 1e12:.2f} TB/s. "
        "Spread: tenth to ninetieth percentile of ours. Method: the script's first lines.\n\n"
        f"![skinny_gemm](plots/{name}_skinny_gemm.png)\n\n"
        f"![norm and activation](plots/{name}_rowwise.png)\n\n{tables(cases, rate)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write the JSON, tables and plots too")
    parser.add_argument("--report", metavar="NAME", help="only make tables and plots of NAME.json")
    arguments = parser.parse_args()
    if arguments.report:
        report(arguments.report)
        return 0

    torch.manual_seed(0)
    package = load_package()
    rate = read_rate()
    norm, activation = (
        torch.compile(eager, fullgraph=True, dynamic=False)
        for eager in (rmsnorm_eager, swiglu_eager)
    )
    cases = gemm_cases(package)
    cases += [gemv_case(package, n, k) for n, k in GEMV_SHAPES]
    for rows in ROW_COUNTS:
        cases += rowwise_cases(package, rows, norm, activation)
    device = torch.cuda.get_device_name()
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    machine = f"{device}, {runtime}, torch {torch.__version__}"
    print(f"{machine}, read rate {rate / 1e12:.2f} TB/s\n\n{tables(cases, rate)}")
    if arguments.save:
        name = re.sub(r"[^a-z0-9]+", "_", device.lower().removeprefix("nvidia ")).strip("_")
        RESULTS.mkdir(exist_ok=True)
        saved = {"machine": machine, "date": str(datetime.date.today()), "read_rate": rate}
        saved["cases"] = [asdict(case) for case in cases]
        (RESULTS / f"{name}.json").write_text(json.dumps(saved, indent=1) + "\n")
        report(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
