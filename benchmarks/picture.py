"""The pictures that are drawn of what the benchmarks saved; tests/test_pages.py compares.

    python benchmarks/picture.py    # writes them into docs/plots

gains.svg is README's: how many times as quick as the quickest other these kernels were on one H200.
Rows where ours lost are shown too. step_timeline.svg is docs/decode.md's: the kernels of a layer in
a decode step, before and after use_decode_step, once generate.py --timeline has saved them.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import gpu_report  # noqa: E402
import tables  # noqa: E402

import moe  # noqa: E402

PICTURE = ROOT / "docs" / "plots" / "gains.svg"
BAR, LABEL, WIDTH, ROW, TOP = 150, 290, 820, 26, 64  # pixels; BAR is one time as quick


class Gain(NamedTuple):
    title: str
    times: float  # as quick as the other
    other: str


def decoding(title: str, model: str, batch: int, ours: str) -> Gain:
    """Tokens per second beside the quickest candidate that is not ours."""
    found = {
        name: by_batch[str(batch)]["tokens_per_second"]
        for name, by_batch in tables.saved(model)["candidates"].items()
    }
    others = {name: speed for name, speed in found.items() if "rocm-kernels" not in name}
    best = max(others, key=lambda name: others[name])
    return Gain(f"{title}, batch {batch}", found[ours] / others[best], best)


def kernel(title: str, ours: float, others: dict[str, float]) -> Gain:
    best = min(others, key=lambda name: others[name])
    return Gain(title, others[best] / ours, best)


def gains() -> list[Gain]:
    found = [
        decoding("Llama 8B decodes", "h200_model", batch, "rocm-kernels, torch.compile")
        for batch in (1, 32)
    ]
    found += [
        decoding("Qwen3-MoE 30B decodes", "h200_experts_model", batch, "rocm-kernels, CUDA graph")
        for batch in (1, 64)
    ]
    for cell in tables.saved("h200_moe")["cells"]:
        if cell["model"] == "Qwen3-30B-A3B" and cell["tokens"] in (1, 64, 4096):
            others = {name: us for name, us in cell["us"].items() if name in moe.THEIRS}
            found.append(
                kernel(
                    f"fused_moe, {cell['tokens']} token{'s' * (cell['tokens'] > 1)}",
                    cell["us"]["FP8"],
                    others,
                )
            )
    for op, m, n, title in [
        ("rmsnorm_fp8", 1, 0, "rmsnorm_fp8, 1 x 16384"),
        ("rmsnorm_fp8", 2048, 0, "rmsnorm_fp8, 2048 x 16384"),
        ("swiglu_fp8", 2048, 0, "swiglu_fp8, 2048 x 16384"),
        ("skinny_gemm", 8, 2304, "skinny_gemm, 8 x 2304 x 16384"),
        ("skinny_gemm", 64, 13312, "skinny_gemm, 64 x 13312 x 16384"),
    ]:
        times = {name: t.median for name, t in tables.case(op, m, n).times.items()}
        others = {name: us for name, us in times.items() if not name.startswith("rocm-kernels")}
        found.append(kernel(title, times["rocm-kernels"], others))
    for m in (128, 4096):
        cell = tables.gemm_cell(m, 4096, 7168, "row")
        title = f"gemm, scales per row, {m} x 4096 x 7168"
        found.append(kernel(title, cell["ours"], {"torch._scaled_mm": cell["library"]}))
    return found


def picture(rows: list[Gain]) -> str:
    height = TOP + ROW * len(rows) + 12
    dates = sorted(tables.saved(name)["date"] for name in ("h200", "h200_moe", "h200_gemm"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="22" font-size="15" font-weight="bold">'
        "Times as quick as the quickest other, one NVIDIA H200</text>",
        f'<text x="12" y="42" fill="#555555">measured {dates[0]} to {dates[-1]}, all candidates '
        "of a row in one run; at the bar: the other</text>",
    ]
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        colour = "#1b7f5c" if row.times >= 1 else "#b5533c"
        length = BAR * row.times
        lines += [
            f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(row.title)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="17" fill="{colour}"/>',
            f'<text x="{LABEL + 6}" y="{y + 13}" fill="#ffffff">{row.times:.2f}</text>',
            f'<text x="{LABEL + max(length, BAR) + 6:.1f}" y="{y + 13}" fill="#555555" '
            f'font-size="10">{escape(row.other)}</text>',
        ]
    even = LABEL + BAR
    lines.append(
        f'<line x1="{even}" x2="{even}" y1="{TOP - 6}" y2="{height - 8}" stroke="#222222"/>'
    )
    return "\n".join([*lines, "</svg>\n"])


# ---- step_timeline.svg

TIMELINE = ROOT / "docs" / "plots" / "step_timeline.svg"
COLOURS = {  # by what gpu_report.kind_of says of a kernel
    "matrix products": "#1b7f5c",
    "attention": "#b5533c",
    "norm and FP8": "#3b6ea5",
    "activation, FP8": "#c79a2b",
    "experts: routing, sums": "#7a5ba6",
}
OTHERS = "#888888"


class Launch(NamedTuple):
    side: str
    kernel: str
    begin: float  # us behind the layer before
    end: float


def launches() -> list[Launch]:
    """What generate.py has saved; none before it was run."""
    if not (tables.RESULTS / "tables" / "step_timeline.csv").exists():
        return []
    return [Launch(side, name, float(begin), float(end))
            for side, name, begin, end in tables.printed("step_timeline")[1]]  # fmt: skip


def timeline_source() -> str:
    """On what and of what they were measured."""
    text = (tables.RESULTS / "tables" / "step_timeline.csv").read_text()
    return [line[2:] for line in text.splitlines() if line.startswith("# ")][-1]


def timeline(found: list[Launch], source: str) -> str:
    """All sides to one scale, then the last side alone over the whole width."""
    by_side: dict[str, list[Launch]] = {}
    for launch in found:
        by_side.setdefault(launch.side, []).append(launch)
    ends = {side: lane[-1].end for side, lane in by_side.items()}
    last = list(by_side)[-1]
    lanes = [(side, lane, max(ends.values())) for side, lane in by_side.items()]
    lanes.append((f"{last}, enlarged", by_side[last], ends[last]))
    left, across, high = 12, WIDTH - 24, 30
    height = TOP + 62 * len(lanes) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="22" font-size="15" font-weight="bold">'
        "The kernels of one layer in a decode step</text>",
        f'<text x="{left}" y="42" fill="#555555">{escape(source)}; grey ground: no kernel runs'
        "</text>",
    ]
    kinds: list[str] = []
    for i, (side, lane, whole) in enumerate(lanes):
        y = TOP + 62 * i
        title = f"{side}: {lane[-1].end:.0f} us, {len(lane)} kernels"
        lines += [
            f'<text x="{left}" y="{y + 12}">{escape(title)}</text>',
            f'<rect x="{left}" y="{y + 18}" width="{across * lane[-1].end / whole:.1f}" '
            f'height="{high}" fill="#e8e8e8"/>',
        ]
        for launch in lane:
            kind = gpu_report.kind_of(launch.kernel)
            kind = kind if kind in COLOURS else "others"
            kinds += [kind] if kind not in kinds else []
            lines.append(
                f'<rect x="{left + across * launch.begin / whole:.2f}" y="{y + 18}" '
                f'width="{across * (launch.end - launch.begin) / whole:.2f}" height="{high}" '
                f'fill="{COLOURS.get(kind, OTHERS)}"><title>{escape(launch.kernel)}, '
                f"{launch.end - launch.begin:.1f} us</title></rect>"
            )
    x, y = left, height - 24
    for kind in kinds:
        lines += [
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS.get(kind, OTHERS)}"/>',
            f'<text x="{x + 17}" y="{y + 11}">{escape(kind)}</text>',
        ]
        x += 40 + 7 * len(kind)
    return "\n".join([*lines, "</svg>\n"])


def pictures() -> dict[Path, str]:
    """Each picture's file, and what is in it."""
    made = {PICTURE: picture(gains())}
    if found := launches():
        made[TIMELINE] = timeline(found, timeline_source())
    return made


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
