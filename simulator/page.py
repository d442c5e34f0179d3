"""One HTML page about a launch: where its cycles went, by SIMD, source line and memory level.

The page needs nothing beside itself: style, script and pictures are in it. Everything that comes
from a code object or a source file is escaped.
"""

from __future__ import annotations

import collections
import os.path
import pathlib
import string
from html import escape
from typing import ClassVar

from .api import Result
from .page_pictures import KINDS, memory_levels, share_bar, simd_shares, unit_over_time
from .timing import occupancy_of

_HERE = pathlib.Path(__file__).parent
_AROUND = 3  # source lines shown before and after one that cost something
_TIMELINE = """<section><h2>One compute unit over time</h2>
<p class="about">The first one: resident waves and the matrix pipe by SIMD, then LDS, memory
operations under way and waves at barriers.</p>
{}
</section>"""


def _number(value: float) -> str:
    """1234567 as 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{value:,.0f}"


def _card(value: str, words: str, bad: bool = False) -> str:
    kind = "card bad" if bad else "card"
    return f'<div class="{kind}"><b>{escape(value)}</b><span>{escape(words)}</span></div>'


def _cards(result: Result) -> str:
    raw, spent = result.cycles.raw, result.cycles.spent
    memory, machine = raw["memory"], raw["machine"]
    moved = memory["memory_read_bytes"] + memory["memory_written_bytes"]
    moved *= machine["dies"] / raw["sampled_dies"]
    waiting = sum(part for name, part in spent.items() if KINDS[name].waits)
    found = str(len(result.findings)) if result.raw["checked"] else "off"
    cards = [
        (f"{result.cycles.seconds * 1e6:.2f} us", "modelled time, with the launch"),
        (_number(result.counters["instructions"]), "wave-instructions executed"),
        (f"{raw['waves_per_simd']:.1f} of {machine['waves']}", "waves a SIMD, on average"),
        (f"{waiting:.0%}", "of SIMD cycles nothing was issued"),
        (f"{moved / 1e6:,.1f} MB", f"to and from HBM, busy {memory['memory_busy']:.0%}"),
        (found, "findings of the checkers", bool(result.findings)),
    ]
    if result.counters["by_class"]["matrix"]:
        cards.insert(3, (f"{spent['matrix']:.0%}", "of SIMD cycles in the matrix pipe"))
    return "".join(_card(*card) for card in cards)


def _limit(kind: str, name: str, share: float, words: str) -> str:
    return (
        f'<div class="limit {kind}"><b>{name}</b><div class="bar"><div style="width:{share:.1%}">'
        f"</div></div><span>{escape(words)}</span></div>"
    )


def _occupancy(result: Result) -> str:
    raw, resources = result.cycles.raw, result.raw["resources"]
    m, waves = raw["machine"], result.counters["waves_per_workgroup"]
    vgprs, lds = resources["vgprs"], resources["lds"] + result.raw["dynamic_lds"]
    workgroups, units = result.counters["workgroups"], m["dies"] * m["units"]
    registers = occupancy_of(vgprs, m["waves"], m["registers"], m["register_granule"])
    of_groups = lambda groups: groups * waves / m["simds"]  # noqa: E731
    limits = [
        ("wave slots", m["waves"], "of a SIMD"),
        ("vector registers", registers, f"{vgprs} of {m['registers']} a lane"),
        ("LDS", of_groups(m["lds_bytes"] // lds) if lds else m["waves"],
         f"{lds / 1024:.3g} of {m['lds_bytes'] >> 10} KiB a workgroup"),
        ("whole workgroups", of_groups(registers * m["simds"] // waves), f"of {waves} waves"),
        ("the grid", of_groups(workgroups / units), f"{workgroups:,} workgroups"),
    ]  # fmt: skip
    least = min(allowed for _, allowed, _ in limits)
    rows = [
        _limit(
            "least" if allowed == least else "",
            name,
            min(allowed, m["waves"]) / m["waves"],
            f"{min(allowed, m['waves']):.3g}: {words}",
        )
        for name, allowed, words in limits
    ]
    reached = raw["waves_per_simd"]
    rows.append(_limit("reached", "reached", reached / m["waves"], f"{reached:.2f}, on average"))
    return "".join(rows)


def _findings(result: Result) -> str:
    if not result.raw["checked"]:
        return "<p>The checkers were off in this run.</p>"
    if not result.findings:
        return '<p class="none">None: no race, missing wait, stray access or unwritten byte.</p>'
    return "".join(
        f'<div class="finding"><b>{escape(f.kind)}</b> at {escape(f.source)}: {escape(f.message)}'
        f"<br><code>{escape(f.instruction)}</code> workgroup {','.join(map(str, f.workgroup))} "
        f"wave {f.wave} lane {f.lane}, {f.count:,} times</div>"
        for f in result.findings
    )


def _text(path: str) -> list[str]:
    """The file's lines, none where it is not at hand."""
    try:
        return pathlib.Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


class _Costs:
    """Cycles by source line and by instruction, as rows of two tables."""

    COLOURS: ClassVar = {"stood": "#f6c9a8", "awaited": "#f0a3a0"}

    def __init__(self, code: list[dict]):
        self.code = code
        self.lines = collections.defaultdict(lambda: {"issued": 0, "stood": 0.0, "awaited": 0.0})
        for i in code:
            for key, value in self.lines[i["source"]].items():
                self.lines[i["source"]][key] = value + i[key]
        self.number = {source: n for n, source in enumerate(self.lines)}
        self.total = {key: sum(i[key] for i in code) for key in self.COLOURS}
        self.costliest = max(self.lines.values(), key=lambda x: x["stood"])
        self.most_of_line = {k: max(x[k] for x in self.lines.values()) for k in self.COLOURS}
        self.most_of_one = {k: max(i[k] for i in code) for k in self.COLOURS}

    def row(self, of: dict, most: dict, cells: tuple[str, str], link: str, tip: str = "") -> str:
        shares = ""
        for key, colour in self.COLOURS.items():
            share = of[key] / (self.total[key] or 1)
            width = of[key] / (most[key] or 1)
            shares += (
                f'<td class="cost" style="background-image:linear-gradient({colour},{colour});'
                f'background-size:{width:.0%} 80%">{f"{share:.1%}" if share >= 0.0005 else ""}</td>'
            )
        marks = f' data-tip="{escape(tip)}"' if tip else ""
        if of is self.costliest:
            marks += " data-most"
        return (
            f'<tr data-l="{self.number[link]}"{marks}><td>{cells[0]}</td>'
            f"<td>{_number(of['issued'])}</td>{shares}<td>{escape(cells[1])}</td></tr>"
        )

    def instructions(self) -> str:
        return "".join(
            self.row(
                i,
                self.most_of_one,
                (f"{i['address']:x}", i["text"]),
                i["source"],
                "\nin ".join(map(os.path.basename, [i["source"], *i["callers"]])),
            )
            for i in self.code
        )

    def source(self) -> str:
        """File by file, the costliest first."""
        files: dict[str, dict[int, str]] = collections.defaultdict(dict)
        cost: dict[str, float] = collections.defaultdict(float)
        for source, costs in self.lines.items():
            path, _, line = source.rpartition(":")
            files[path][int(line) if line.isdigit() else 0] = source
            cost[path] += costs["stood"] if path else 0
        out = []
        for path in sorted(files, key=lambda path: -cost[path]):
            name = escape(_shown(path) if path else "no debug information")
            out.append(f'<tr class="file"><td colspan="5">{name}</td></tr>')
            out += self._file(_text(path) if path else [], files[path])
        return "".join(out)

    def _file(self, text: list[str], lines: dict[int, str]) -> list[str]:
        near = {n for line in lines for n in range(line - _AROUND, line + _AROUND + 1)}
        shown = sorted({n for n in near if 1 <= n <= len(text)} | set(lines))
        rows, before = [], shown[0]
        for n in shown:
            if n > before + 1:
                rows.append('<tr class="gap"><td colspan="5">...</td></tr>')
            before = n
            words = text[n - 1] if 1 <= n <= len(text) else ""
            if n in lines:
                cells = (str(n or ""), words)
                rows.append(self.row(self.lines[lines[n]], self.most_of_line, cells, lines[n]))
            else:
                rows.append(f"<tr><td>{n}</td>{'<td></td>' * 3}<td>{escape(words)}</td></tr>")
        return rows


def _shown(path: str) -> str:
    """Relative to the current folder, if the file is in it."""
    path, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(path) if os.path.commonpath([path, here]) == here else path


def html_page(result: Result) -> str:
    """The page of a launch that was played on the cycle model.

    With cycles=machine_for(target, traced=1) it shows a compute unit over time, too. ValueError
    without the cycle model.
    """
    if result.cycles is None:
        raise ValueError("required a launch with cycles=True, got one without the cycle model")
    raw = result.cycles.raw
    played, dies = raw["sampled_dies"], raw["machine"]["dies"]
    costs, timeline = _Costs(raw["code"]), unit_over_time(raw)
    return string.Template((_HERE / "page.html").read_text()).substitute(
        style=(_HERE / "page.css").read_text(),
        script=(_HERE / "page.js").read_text(),
        kernel=escape(result.raw["readable"]),
        target=escape(result.raw["target"]),
        grid=" x ".join(map(str, result.raw["grid"])),
        block=" x ".join(map(str, result.raw["block"])),
        sample=f" {played} of {dies} dies were played; bytes are scaled." if played < dies else "",
        cards=_cards(result),
        shares=share_bar(result.cycles.spent) + simd_shares(raw),
        timeline=_TIMELINE.format(timeline) if timeline else "",
        memory=memory_levels(result),
        occupancy=_occupancy(result),
        findings=_findings(result),
        source=costs.source(),
        instructions=costs.instructions(),
    )
