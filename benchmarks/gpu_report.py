"""Tables and plots of the saved results of gpu.py and end_to_end.py.

    python benchmarks/gpu_report.py NAME

reads ``results/NAME.json`` and, where there are such, ``results/NAME_model.json`` and
``results/NAME_experts_model.json``; writes ``docs/NAME_benchmarks.md`` and its pictures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"

OURS = "rocm-kernels"
WEIGHT_ONLY = "rocm-kernels, bf16 x FP8"
LIBRARY = "cuBLASLt FP8"
MODELS = ("model", "experts_model")  # what their results' names end with

TITLES = {
    "skinny_gemm": "skinny_gemm: FP8 x FP8 to bfloat16, scales per tensor",
    "gemv_fp16": "skinny_gemm: one row, float16",
    "rmsnorm_fp8": "Residual + RMSNorm + FP8, {k} columns, float16, static scale",
    "swiglu_fp8": "SwiGLU + FP8, {k} to {half} columns, float16, static scale",
    "rmsnorm": "Residual + RMSNorm without quantisation, {k} columns, float16",
    "swiglu": "SwiGLU without quantisation, {k} to {half} columns, float16",
}

# What a kernel of the model belongs to, by the first pattern that its name has.
KINDS = {
    "torch.compile's kernels": r"^triton_",
    "matrix products": r"gemm|gemv|cutlass|nvjet|splitK|ring_kernel|stream_kernel|skinny|_mm_|dot_"
    r"|wide_kernel|plain_kernel|moe_(streamed|tiled|resident)",
    "experts: routing, sums": r"moe_(route|count|place|plan|combine)|topk|sort|searchsorted",
    "attention": r"flash|fmha|attention|sdpa|softmax|mem_eff",
    "norm and FP8": r"rmsnorm|rms_norm|quantize",
    "activation, FP8": r"swiglu",
    "copies, cache, mask": r"copy|Memcpy|Memset|memset|memcpy|index|cat|fill|arange|gather|scatter",
    "element-wise and reductions": r"",
}


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


def read_cases(saved: dict) -> list[Case]:
    return [
        Case(**{**case, "times": {peer: Measured(**t) for peer, t in case["times"].items()}})
        for case in saved["cases"]
    ]


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def table(cases: list[Case], rate: float) -> str:
    """One op: a column a candidate, the floor, and how far ahead of the best peer we are."""
    names = list(dict.fromkeys(name for case in cases for name in case.times))
    header = ["shape", "rows", *(f"{name}, us" for name in names), "spread", "floor, us"]
    header += ["of floor", "x best peer"]
    lines = []
    for case in cases:
        ours, floor = case.times[OURS], case.bytes / rate * 1e6
        shape = f"{case.n} x {case.k} {case.model}".strip() if case.n else str(case.k)
        best = min(t.median for name, t in case.times.items() if not name.startswith(OURS))
        cells = (f"{case.times[name].median:.2f}" if name in case.times else "-" for name in names)
        lines.append(
            [
                shape,
                str(case.m),
                *cells,
                f"{(ours.high - ours.low) / ours.median:.1%}",
                f"{floor:.2f}",
                f"{floor / ours.median:.0%}",
                f"{best / ours.median:.2f}",
            ]
        )
    return markdown(header, lines)


def document(saved: dict, name: str) -> str:
    """The part of the page that gpu.py measured."""
    cases, rate = read_cases(saved), saved["read_rate"]
    versions = ", ".join(f"{peer} {version}" for peer, version in saved.get("peers", {}).items())
    absent = "; ".join(f"{peer} ({why})" for peer, why in saved.get("missing", {}).items())
    parts = [
        f"# Benchmarks on {saved['machine']}\n",
        f"Measured {saved['date']} by `make bench-gpu`, `benchmarks/gpu.py`; tables and plots made "
        f"by\n`benchmarks/gpu_report.py` from `benchmarks/results/{name}.json`. Read rate of the "
        f"run: {rate / 1e12:.2f} TB/s.\nSpread: tenth to ninetieth percentile of ours. Method: "
        "the script's first lines.\n",
        f"Public kernels in the same run: {versions or 'none'}. Not measured: {absent or 'none'}."
        "\n",
    ]
    for op, title in TITLES.items():
        if chosen := [case for case in cases if case.op == op]:
            k = chosen[0].k
            parts.append(f"## {title.format(k=k, half=k // 2)}\n\n{table(chosen, rate)}\n")
    return "\n".join(parts)


def kind_of(kernel: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.I))


def by_kind(kernels: dict[str, float]) -> dict[str, float]:
    """Microseconds a step of each kind of kernel."""
    sums = dict.fromkeys(KINDS, 0.0)
    for kernel, time in kernels.items():
        sums[kind_of(kernel)] += time
    return sums


def model_document(saved: dict, name: str) -> str:
    """The part of the page that end_to_end.py measured."""
    batches = saved["batches"]
    header = ["tokens per second, median (spread)", *(f"batch {batch}" for batch in batches)]
    header.append("prompt, ms")
    lines = []
    for candidate, results in saved["candidates"].items():
        cells = []
        for batch in batches:
            result = results.get(str(batch), {})
            if "median_ms" in result:
                spread = (result["high_ms"] - result["low_ms"]) / result["median_ms"]
                cells.append(f"{result['tokens_per_second']:,.0f} ({spread:.0%})")
            else:
                cells.append("-")
        prefill = results.get("1", {}).get("prefill_ms")
        lines.append([candidate, *cells, "-" if prefill is None else f"{prefill:.1f}"])
    failed = [
        f"- {candidate}, batch {batch}: {result['error']}"
        for candidate, results in saved["candidates"].items()
        for batch, result in results.items()
        if "error" in result
    ]
    parts = [
        f"## A model of {saved['parameters'] / 1e9:.1f} billion parameters decodes: "
        f"{saved['model']}\n",
        f"{saved['machine']}, transformers {saved['transformers']}, {saved['date']}; "
        f"`python benchmarks/end_to_end.py --model {saved['model']} --save`, "
        f"`results/{name}.json`.\n"
        f"{saved['description']}\n",
        markdown(header, lines) + "\n",
        *(["What broke:\n", *failed, ""] if failed else []),
        f"![where a step's time goes](plots/{name}.png)\n",
    ]
    for batch in batches:
        profiles = {
            candidate: by_kind(results[str(batch)]["kernels_us"])
            for candidate, results in saved["candidates"].items()
            if results.get(str(batch), {}).get("kernels_us")
        }
        if profiles:
            rows = [
                [kind, *(f"{profile[kind]:,.0f}" for profile in profiles.values())]
                for kind in KINDS
            ]
            rows.append(["all kernels", *(f"{sum(p.values()):,.0f}" for p in profiles.values())])
            header = [f"batch {batch}, us a step", *profiles]
            parts.append(markdown(header, rows) + "\n")
    return "\n".join(parts)


def plot_gemm(pyplot, cases: list[Case], rate: float, path: Path) -> None:
    """Time over rows beside the floor, one panel a shape."""
    cases = [c for c in cases if c.op == "skinny_gemm"]
    shapes = list(dict.fromkeys((c.model, c.n, c.k) for c in cases))
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(shapes) // columns), columns, figsize=(15, 9), sharex=True, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axis in axes.flat[len(shapes) :]:
        axis.axis("off")
    for axis, (model, n, k) in zip(axes.flat, shapes, strict=False):
        chosen = [c for c in cases if (c.model, c.n, c.k) == (model, n, k)]
        styles = {OURS: "o-", LIBRARY: "s--", "F.linear bf16": "^:"}
        plot_times(axis, chosen, rate, styles)
        axis.set_title(f"{model}: N {n}, K {k}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("rows of a")
    figure.supylabel("microseconds")
    figure.savefig(path, dpi=100)


def plot_times(axis, cases: list[Case], rate: float, styles: dict[str, str]) -> None:
    for peer, style in styles.items():
        points = [(c.m, c.times[peer].median) for c in cases if peer in c.times]
        if points:
            axis.plot(*zip(*points, strict=True), style, label=peer, markersize=4)
    floors = [c.bytes / rate * 1e6 for c in cases]
    axis.plot([c.m for c in cases], floors, "k-", lw=0.8, label="floor")


def plot_rowwise(pyplot, cases: list[Case], rate: float, path: Path) -> None:
    ops = [op for op in ("rmsnorm_fp8", "swiglu_fp8", "rmsnorm", "swiglu")
           if any(c.op == op for c in cases)]  # fmt: skip
    figure, axes = pyplot.subplots(-(-len(ops) // 2), 2, figsize=(11, 8), layout="constrained")
    names = ("o-", "s--", "^:", "v--", "D--", "x--", "P--")
    peers = [OURS, "torch.compile", "eager", "FlashInfer", "vLLM", "Liger", "quack"]
    for axis, op in zip(axes.flat, ops, strict=False):
        chosen = [c for c in cases if c.op == op]
        plot_times(axis, chosen, rate, dict(zip(peers, names, strict=True)))
        axis.set_title(f"{op}, {chosen[0].k} columns", fontsize=10)
        axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="microseconds", ylim=(0.5, None))
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def plot_model(pyplot, saved: dict, path: Path) -> None:
    """A bar a candidate: where a decode step's time goes, and how much of it no kernel fills."""
    batches = [
        batch for batch in saved["batches"]
        if any(r.get(str(batch), {}).get("kernels_us") for r in saved["candidates"].values())
    ]  # fmt: skip
    figure, axes = pyplot.subplots(
        len(batches), 1, figsize=(10, 3 * len(batches)), layout="constrained", squeeze=False
    )
    colors = pyplot.get_cmap("tab10").colors
    for axis, batch in zip(axes.flat, batches, strict=True):
        bars = {
            candidate: results[str(batch)]
            for candidate, results in saved["candidates"].items()
            if results.get(str(batch), {}).get("kernels_us")
        }
        names = list(bars)
        left = [0.0] * len(bars)
        for color, kind in zip(colors, KINDS, strict=False):
            widths = [by_kind(bar["kernels_us"])[kind] / 1e3 for bar in bars.values()]
            axis.barh(names, widths, left=left, color=color, label=kind)
            left = [x + width for x, width in zip(left, widths, strict=True)]
        steps = [bar["median_ms"] for bar in bars.values()]
        idle = [max(0.0, step - busy) for step, busy in zip(steps, left, strict=True)]
        axis.barh(names, idle, left=left, color="0.9", label="no kernel runs", hatch="//")
        axis.invert_yaxis()
        axis.set_title(f"batch {batch}", fontsize=10)
    axes.flat[-1].set_xlabel("milliseconds a step")
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=90)


def read_saved(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def page(name: str) -> str:
    """What ``docs/NAME_benchmarks.md`` says."""
    text = document(read_saved(name), name)
    pictures = (
        f"![skinny_gemm](plots/{name}_skinny_gemm.png)\n\n"
        f"![norm and activation](plots/{name}_rowwise.png)\n"
    )
    head, rest = text.split("\n## ", 1)
    text = f"{head}\n{pictures}\n## {rest}"
    for of_model in MODELS:
        model = read_saved(f"{name}_{of_model}")
        text += f"\n{model_document(model, f'{name}_{of_model}')}" if model else ""
    return text


def write(name: str) -> None:
    """The page and the pictures of a saved run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    saved = read_saved(name)
    cases, rate = read_cases(saved), saved["read_rate"]
    plots = DOCS / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    plot_gemm(pyplot, cases, rate, plots / f"{name}_skinny_gemm.png")
    plot_rowwise(pyplot, cases, rate, plots / f"{name}_rowwise.png")
    for of_model in MODELS:
        model = read_saved(f"{name}_{of_model}")
        if model:
            plot_model(pyplot, model, plots / f"{name}_{of_model}.png")
    (DOCS / f"{name}_benchmarks.md").write_text(page(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the results, such as h200")
    write(parser.parse_args().name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
