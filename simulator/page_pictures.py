"""The pictures of page.py: bars and SVG, from the cycle model's report."""

from __future__ import annotations

import itertools
import json
from html import escape
from typing import NamedTuple

from .api import Result


class Kind(NamedTuple):
    """How cycles of one kind are shown."""

    words: str
    colour: str
    waits: bool


# In the order in which they are stacked.
KINDS = {
    "matrix": Kind("matrix pipe", "#3d348b", False),
    "valu": Kind("vector pipe", "#2f6fb7", False),
    "scalar": Kind("scalar", "#4ba3c3", False),
    "lds": Kind("issue to LDS", "#2a9d8f", False),
    "vmem": Kind("issue to memory", "#57b894", False),
    "branch": Kind("branch", "#8fa6b8", False),
    "internal": Kind("waits, barriers, turns", "#b4c3d0", False),
    "wait_memory": Kind("wait for memory", "#e4572e", True),
    "wait_lds": Kind("wait for LDS", "#f3a712", True),
    "wait_scalar": Kind("wait for scalar load", "#f2cc5c", True),
    "memory_queue": Kind("memory queue full", "#b23a48", True),
    "lds_queue": Kind("LDS queue full", "#d98324", True),
    "barrier": Kind("barrier", "#a05195", True),
    "sleep": Kind("s_sleep, s_nop", "#c9ada7", True),
    "empty": Kind("no wave", "#e3e7ed", True),
}
_PALE = ("branch", "internal", "wait_scalar", "sleep", "empty")
_WAVES, _GROUND, _BOX = "#c6d4e6", "#f4f6f9", "#eef2f8"
_WIDTH = 1240


def _columns(name: str, texts: list[str]) -> str:
    """Texts that the script shows over a picture's columns; no content can end the element."""
    data = json.dumps(texts).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{data}</script>'


def _svg(height: float, parts: list[str], attributes: str = "") -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" {attributes}>{"".join(parts)}</svg>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return (f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">'
            f"{escape(words)}</text>")  # fmt: skip


def _rect(x: float, y: float, width: float, height: float, colour: str, more: str = "") -> str:
    return (f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" '
            f'fill="{colour}" {more}/>')  # fmt: skip


def _swatch(colour: str, words: str) -> str:
    return f'<span><i style="background:{colour}"></i>{words}</span>'


def _steps(lower: list[float], upper: list[float], height: float, step: float, colour: str) -> str:
    """The area between two step functions of 0 to 1."""
    forth = "".join(f"V{(1 - y) * height:.1f}h{step:.2f}" for y in upper)
    back = "".join(f"V{(1 - y) * height:.1f}h-{step:.2f}" for y in reversed(lower))
    return f'<path fill="{colour}" d="M0 {height}{forth}{back}z"/>'


def share_bar(spent: dict[str, float]) -> str:
    """One bar and its legend."""
    bar, legend = [], []
    for name, kind in KINDS.items():
        part = spent[name]
        if part < 0.0005:
            continue
        words = f"{part:.0%}" if part >= 0.035 else ""
        ink = ";color:var(--ink)" if name in _PALE else ""
        bar.append(
            f'<div style="width:{part:.2%};background:{kind.colour}{ink}" '
            f'data-tip="{kind.words}: {part:.1%}">{words}</div>'
        )
        legend.append(_swatch(kind.colour, f"{kind.words} <em>{part:.1%}</em>"))
    return f'<div class="share">{"".join(bar)}</div><div class="legend">{"".join(legend)}</div>'


def simd_shares(raw: dict) -> str:
    """All SIMDs, side by side, each a column of its shares."""
    names, simds = raw["spent_names"], raw["machine"]["simds"]
    rows = [[row[names.index(name)] for name in KINDS] for row in raw["simds"]]
    rows = [[part / (sum(row) or 1) for part in row] for row in rows]
    height, step = 150, _WIDTH / len(rows)
    lower, parts = [0.0] * len(rows), []
    for n, kind in enumerate(KINDS.values()):
        upper = [low + row[n] for low, row in zip(lower, rows, strict=True)]
        if upper != lower:
            parts.append(_steps(lower, upper, height, step, kind.colour))
        lower = upper
    a_die = raw["machine"]["units"] * simds
    for die in range(raw["sampled_dies"]):
        x = die * a_die * step
        parts.append(_rect(x - 1, 0, 2, height, "#fff"))
        parts.append(_text(x + a_die * step / 2, height + 16, f"die {die}", "soft"))
    texts = []
    for n, row in enumerate(rows):
        most = sorted(zip(row, KINDS.values(), strict=True), key=lambda x: -x[0])[:6]
        place = f"die {n // a_die}, unit {n % a_die // simds}, SIMD {n % simds}"
        texts.append("\n".join([place, *(f"{part:6.1%}  {k.words}" for part, k in most if part)]))
    picture = _svg(height + 22, parts, 'data-columns="simd-texts"')
    return picture + _columns("simd-texts", texts)


class _Bins:
    """How many intervals are under way, on average in each slice of time."""

    def __init__(self, end: float, count: int):
        self.size = end / count
        self.values = [0.0] * count

    def add(self, begin: float, end: float) -> None:
        first, last = int(begin / self.size), min(int(end / self.size), len(self.values) - 1)
        for n in range(first, last + 1):
            inside = min(end, (n + 1) * self.size) - max(begin, n * self.size)
            self.values[n] += max(0.0, inside) / self.size


def unit_over_time(raw: dict, count: int = 620) -> str:
    """Waves, matrix pipe, LDS and memory of the first compute unit; "" without a trace."""
    trace, machine = raw.get("trace"), raw["machine"]
    if not trace or not trace["waves"]:
        return ""
    waves, end = trace["waves"], raw["cycles"] - raw["launch_cycles"]
    resident, matrix = ([_Bins(end, count) for _ in range(machine["simds"])] for _ in "ab")
    lds, memory, barrier = (_Bins(end, count) for _ in "abc")
    for unit, simd, *_, begin, stop in waves:
        if unit == 0:
            resident[simd].add(begin, stop)
    for number, _, begin, stop in trace["matrix"]:
        if waves[number][0] == 0:
            matrix[waves[number][1]].add(begin, stop)
    barriers = ([w[0], w[1], *w[3:]] for w in trace["waits"] if w[2] == "barrier")
    for spans, bins in ((trace["lds"], lds), (trace["memory"], memory), (barriers, barrier)):
        for number, _, begin, stop in spans:
            if waves[number][0] == 0:
                bins.add(begin, stop)

    # A lane: its name and curves, each values, what fills the lane, colour.
    lanes = [
        (f"SIMD {n}", [(r.values, machine["waves"], _WAVES), (m.values, 1, KINDS["matrix"].colour)])
        for n, (r, m) in enumerate(zip(resident, matrix, strict=True))
    ]
    lanes.append(("LDS busy", [(lds.values, 1, KINDS["lds"].colour)]))
    for words, bins, kind in (("memory", memory, "wait_memory"), ("barriers", barrier, "barrier")):
        most = max(bins.values)
        if most:
            lanes.append((f"{words}, up to {most:.0f}", [(bins.values, most, KINDS[kind].colour)]))
    left, height, gap = 140, 44, 8
    width, parts, y = _WIDTH - left, [], 0
    for words, curves in lanes:
        areas = [
            _steps([0.0] * count, [v / full for v in values], height, width / count, colour)
            for values, full, colour in curves
        ]
        parts.append(_text(0, y + height / 2 + 4, words, anchor="start"))
        ground = _rect(0, 0, width, height, _GROUND)
        parts.append(f'<g transform="translate({left} {y})">{ground}{"".join(areas)}</g>')
        y += height + gap
    microseconds = end / machine["clock_hz"] * 1e6
    anchors = ["start", *["middle"] * 7, "end"]
    for n, anchor in enumerate(anchors):
        x = left + width * n / 8
        parts.append(_text(x, y + 12, f"{microseconds * n / 8:.3g} us", "soft", anchor))
    parts.append(_rect(left, 0, width, y, "transparent", 'data-columns="unit-texts"'))
    texts = []
    for n in range(count):
        simds = [f"SIMD {k}: {r.values[n]:.1f} waves, matrix pipe {m.values[n]:.0%}"
                 for k, (r, m) in enumerate(zip(resident, matrix, strict=True))]  # fmt: skip
        rest = f"LDS {lds.values[n]:.0%}, {memory.values[n]:.0f} memory operations under way"
        texts.append("\n".join([f"{(n + 0.5) / count * microseconds:.2f} us", *simds, rest]))
    words = f"resident waves, of {machine['waves']}"
    legend = _swatch(_WAVES, words) + _swatch(KINDS["matrix"].colour, "matrix pipe busy")
    picture = _svg(y + 18, parts)
    return f'<div class="legend">{legend}</div>{picture}{_columns("unit-texts", texts)}'


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _arrow(begin: float, end: float, y: float, count: float, most: float, colour: str) -> str:
    if not count:
        return ""
    thick = 1.5 + 16 * count / most
    neck, side = end + (-10 if end > begin else 10), max(6.0, thick * 0.9)
    upper = f"M{begin:.0f} {y - thick / 2:.1f}H{neck:.0f}V{y - side:.1f}"
    lower = f"L{neck:.0f} {y + side:.1f}V{y + thick / 2:.1f}H{begin:.0f}z"
    return f'<path fill="{colour}" d="{upper}L{end:.0f} {y}{lower}"/>'


def _levels(result: Result) -> tuple[list, list]:
    """Boxes (name, size, hits), and between them flows (bytes read, written, bytes a cycle)."""
    raw, c = result.cycles.raw, result.counters
    memory, machine = raw["memory"], raw["machine"]
    dies, units = machine["dies"], machine["dies"] * machine["units"]

    def hits(level: str) -> str:
        share = memory[f"{level}_hits"] / max(1, memory[f"{level}_requests"])
        return f"hits {share:.0%}"

    def flow(read: str, written: str, rate: float) -> tuple[float, float, float]:
        scale = dies / raw["sampled_dies"]
        return memory[read] * scale, memory[written] * scale, rate

    boxes = [
        ("registers", f"{units} compute units", ""),
        ("L1", f"{units} x {machine['l1_size'] >> 10} KiB", hits("l1")),
        ("L2", f"{dies} x {machine['l2_size'] / 2**20:.3g} MiB", hits("l2")),
    ]
    asked = c["global_read_bytes"], c["global_written_bytes"], units * machine["l1_bytes"]
    flows = [
        asked,
        flow("l2_read_bytes", "l2_written_bytes", dies * machine["l2_bytes"]),
        flow("fetch_bytes", "write_bytes", dies * machine["fabric_bytes"]),
    ]
    if machine["infinity_kib"]:
        boxes.append(("Infinity Cache", f"{machine['infinity_kib'] >> 10} MiB", hits("infinity")))
        behind = flow("memory_read_bytes", "memory_written_bytes", machine["memory_bytes"])
        flows.append(behind)
    boxes.append(("HBM", "all stacks", ""))
    return boxes, flows


def memory_levels(result: Result) -> str:
    """Registers, caches and memory as boxes, bytes as arrows."""
    raw, c = result.cycles.raw, result.counters
    boxes, flows = _levels(result)
    width, height, top = 128, 86, 24
    stride = (_WIDTH - width) / (len(boxes) - 1)
    edge = 'rx="8" stroke="#c6d0de"'
    parts = []
    for n, (name, size, hits) in enumerate(boxes):
        x = n * stride
        parts.append(_rect(x, top, width, height, _BOX, edge))
        for y, words, kind in ((26, name, "big"), (46, size, "soft"), (68, hits, "")):
            parts.append(_text(x + width / 2, top + y, words, kind))
    most = max(1.0, *itertools.chain(*(flow[:2] for flow in flows)))
    cycles = max(1.0, raw["cycles"] - raw["launch_cycles"])
    for n, (read, written, rate) in enumerate(flows):
        begin, end = n * stride + width + 6, (n + 1) * stride - 6
        middle, share = (begin + end) / 2, (read + written) / cycles / rate
        parts.append(_arrow(end, begin, top + 26, read, most, KINDS["valu"].colour))
        parts.append(_arrow(begin, end, top + 62, written, most, KINDS["lds_queue"].colour))
        parts.append(_text(middle, top + 9, _bytes(read)))
        parts.append(_text(middle, top + 87, _bytes(written)))
        parts.append(_text(middle, top + 107, f"{share:.0%} of its rate", "soft"))
    y = top + height + 34
    parts.append(_rect(0, y, width, 40, _BOX, edge))
    parts.append(_text(width / 2, y + 25, "LDS", "big"))
    moved = f"{_bytes(c['lds_bytes'])} read and written"
    cost = f"{c['lds_cycles']:,} cycles of banks, {c['lds_conflict_cycles']:,} of them conflicts"
    parts.append(_text(width + 14, y + 17, moved, anchor="start"))
    parts.append(_text(width + 14, y + 34, cost, "soft", anchor="start"))
    return _svg(y + 46, parts)
