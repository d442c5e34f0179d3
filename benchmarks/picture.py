"""README's picture: how many times as quick as the quickest other these kernels were on one H200.

    python benchmarks/picture.py    # writes docs/plots/gains.svg

Made of what the benchmarks saved; tests/test_pages.py compares. Rows where ours lost are shown too.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

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


if __name__ == "__main__":
    PICTURE.write_text(picture(gains()))
