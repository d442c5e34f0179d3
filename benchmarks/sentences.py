"""Makes the measured numbers that stand in sentences of pages from the saved results;
tests/test_pages.py looks for each sentence in its page. A measured number in a page is made here
or in tables.py, and nowhere else."""

from __future__ import annotations

import csv
import statistics

import gemm_schedules
import tables

THEIRS = ("grouped_mm", "batched_mm", "FP8 _scaled_grouped_mm")
VLLM = {"FP8": "vLLM FP8", "FP8 blocks": "vLLM FP8 blocks", "bf16": "vLLM bf16"}


def model_sentences() -> list[str]:
    candidates = tables.saved("h200_model")["candidates"]
    eager = [
        (step["high_ms"] - step["low_ms"]) / step["median_ms"]
        for name in ("bfloat16, eager", "rocm-kernels, eager")
        for step in candidates[name].values()
    ]
    step = candidates["rocm-kernels, CUDA graph"]["32"]
    copies = sum(us for name, us in step["kernels_us"].items() if "copy" in name.lower()) / 1e3
    return [
        f"steps differed by up to {max(eager):.0%}".replace("%", " %"),
        f"copies lead at larger batches, {copies:.0f} of {step['median_ms']:.0f} milliseconds",
    ]


def readme_sentences() -> list[str]:
    least, most = product_errors()
    return [
        f"its median error is {median_error():.1f} % on published numbers",
        f"FP8 products for {least:.0f} to {most:.0f} % quicker than they were",
    ]


def calibration() -> list[dict]:
    with open(tables.CALIBRATION / "points.csv", newline="") as file:
        return list(csv.DictReader(file))


def errors(**wanted: str) -> list[float]:
    """Lists the cycle model's errors in percent, for those calibration points that it was not
    fitted to."""
    points = [point for point in calibration() if point["use"] == "judge"]
    return [
        100 * (float(point["modelled"]) / float(point["published"]) - 1)
        for point in points
        if wanted.items() <= point.items()
    ]


def median_error() -> float:
    return statistics.median(map(abs, errors()))


def product_errors() -> tuple[float, float]:
    """By how much the model is too quick for published FP8 products, at least and at most."""
    found = [-error for error in errors(quantity="product, us")]
    return min(found), max(found)


def simulator_sentences() -> list[str]:
    found = errors()
    near = sum(abs(error) <= 25 for error in found)
    fetched, took = (
        [abs(error) for error in errors(source="MI250X", quantity=quantity)]
        for quantity in ("FETCH_SIZE, GB", "time, ms")
    )
    rows = [abs(error) for error in errors(source="MI300X", quantity="time, us")]
    products = [abs(error) for error in errors(quantity="product, us")]
    (attention,) = errors(quantity="attention, TFLOP/s")
    least, most = product_errors()
    return [
        f"{len(found)} of them, the median error is {median_error():.1f} %, and {near} lie within "
        f"25 %: FETCH_SIZE {statistics.median(fetched):.1f} % (worst {max(fetched):.1f}), times on "
        f"the MI250X {statistics.median(took):.1f} % (worst {max(took):.0f}), of the row kernels "
        f"on the MI300X {statistics.median(rows):.1f} % (worst {max(rows):.0f}), of six FP8 "
        f"products {statistics.median(products):.0f} % (worst {max(products):.0f}), of one "
        f"attention {attention:.0f} %.",
        f"*FP8 products are {least:.0f} to {most:.0f} % too quick*.",
        f"*Attention is {attention:.0f} % too quick*",
    ]


def skinny_gemm_sentences() -> list[str]:
    played = tables.calibrated()
    times = [f"{played[f'FP8 product {m} x 2304 x 16384, ours']:.1f}" for m in (1, 8, 32)]
    rows = {(row[0], row[1]): row for row in tables.printed("skinny_gemm_mi300x")[1]}
    theirs = [rows[m, "2304 x 16384"][9] for m in ("1", "8", "32")]
    return [
        f"for 2304 x 16384 it gives {times[0]}, {times[1]} and {times[2]} us at M = 1, 8 and 32, "
        f"where hf-rocm-kernels publishes {theirs[0]}, {theirs[1]} and {theirs[2]}.",
        f"its median error is {median_error():.1f} %",
    ]


def rmsnorm_sentences() -> list[str]:
    one, many = (tables.case("rmsnorm_fp8", m).times["rocm-kernels"].median for m in (1, 2048))
    return [f"1 row takes {one:.2f} us, 2048 rows {many:.1f} us"]


def swiglu_sentences() -> list[str]:
    one, many = (tables.case("swiglu_fp8", m) for m in (1, 2048))
    took = many.times["rocm-kernels"].median
    return [
        f"1 row takes {one.times['rocm-kernels'].median:.2f} us, 2048 rows {took:.1f} us",
    ]


def gemm_sentences() -> list[str]:
    rows = [row for row in tables.saved("cpu")["rows"] if "fp8_linear" in row["times_us"]]
    ratios = {
        name: [r["times_us"]["F.linear bf16"] / r["times_us"][name] for r in rows]
        for name in ("gemm", "fp8_linear")
    }
    behind = {name: sorted(r for r in found if r < 1) for name, found in ratios.items()}
    least, next_least = behind["gemm"]
    fp8, bf16 = gemm_schedules.groups(gemm_schedules.saved("h200")).values()
    quick, near, worst = [], [], []
    for found in (fp8, bf16):
        gains, late = gemm_schedules.gains(found, "choice"), gemm_schedules.behind(found)
        quick.append(100 * statistics.mean(g >= 1 - gemm_schedules.EVEN for g in gains))
        near.append(100 * statistics.mean(x <= gemm_schedules.SLOWER for x in late))
        worst.append(max(late))
    return [
        f"`gemm` is behind in {len(behind['gemm'])} of the {len(rows)} cells, at 512 rows: "
        f"{least:.2f} of `F.linear`'s speed for 576 x 1536, {next_least:.2f} for 3072 x 576.",
        f"`fp8_linear` is behind in {len(behind['fp8_linear'])}:",
        f"as quick as data-parallel in {quick[0]:.1f} % of FP8's products and {quick[1]:.1f} % of "
        f"bf16's (the aim is 99.2), and at most 3 % behind the best of the three in {near[0]:.1f} "
        f"and {near[1]:.1f} %, {max(worst):.2f} at worst for both",
    ]


def moe_sentences() -> list[str]:
    cells = tables.saved("h200_moe")["cells"]
    theirs = [name for name in (*THEIRS, *VLLM.values())]
    ahead = [min(c["us"][t] for t in theirs if t in c["us"]) / c["us"]["FP8"] for c in cells]
    torchs = [min(c["us"][t] for t in THEIRS if t in c["us"]) / c["us"]["FP8"] for c in cells]
    rows = sum(ratio > 1 for ratio in ahead)
    beside = [
        [c["us"][peer] / c["us"][ours] for c in cells if peer in c["us"]]
        for ours, peer in VLLM.items()
    ]
    behind = sum(c["us"]["vLLM bf16"] < c["us"]["bf16"] for c in cells)
    channel, blocks, bf16 = (f"{min(found):.2f} to {max(found):.2f}" for found in beside)
    return [
        f"quicker than the quickest of theirs in {rows} of {len(cells)} cells, up to "
        f"{max(ahead):.2f} times, and within {100 * (1 - min(ahead)):.1f} % of it in the other",
        f"it is {min(torchs):.2f} to {max(torchs):.2f} times as quick",
        f"{channel} with a scale a channel, {blocks} in blocks, {bf16} in bfloat16, where "
        f"vLLM is quicker in {behind} cells.",
    ]


def serving_sentences() -> list[str]:
    before, after = tables.saved("h200_serving").values()
    found = [b["step_ms"] / a["step_ms"] for b, a in zip(before, after, strict=True)]
    return [f"decode steps is {min(found):.2f} to {max(found):.2f} times as quick"]


SENTENCES = {
    "README.md": readme_sentences,
    "docs/results/models.md": model_sentences,
    "docs/serving.md": serving_sentences,
    "simulator/docs/simulator.md": simulator_sentences,
    "docs/results/skinny_gemm.md": skinny_gemm_sentences,
    "docs/results/rmsnorm_fp8.md": rmsnorm_sentences,
    "docs/results/swiglu_fp8.md": swiglu_sentences,
    "docs/results/gemm.md": gemm_sentences,
    "docs/results/moe.md": moe_sentences,
}


def missing(page: str, text: str) -> list[str]:
    """The sentences that a page does not have, wherever its lines end."""
    words = " ".join(text.split())
    return [sentence for sentence in SENTENCES[page]() if sentence not in words]
