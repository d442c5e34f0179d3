"""The tables of the suites in simulator/docs/suites.md, between marks."""

from __future__ import annotations

import dataclasses
import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "suites.md"


@dataclasses.dataclass
class Row:
    name: str
    target: str
    planted: bool
    said: str
    passed: bool

    def words(self) -> str:
        what = "planted bug" if self.planted else "correct"
        return (
            f"{'pass' if self.passed else 'FAIL'}  {self.name} ({self.target}), {what}: {self.said}"
        )


def summary(rows: list[Row]) -> str:
    correct = [r for r in rows if not r.planted]
    planted = [r for r in rows if r.planted]
    return (
        f"{len(correct)} runs of correct kernels, false alarms or wrong values in "
        f"{sum(not r.passed for r in correct)}; "
        f"{len(planted)} of planted bugs, {sum(r.passed for r in planted)} told"
    )


def markdown(head: str, rows: list[Row]) -> str:
    lines = [f"{head}: {summary(rows)}.", "", "| kernel | planted | gfx942 | gfx950 |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    for name in dict.fromkeys(r.name for r in rows):
        mine = {r.target: r for r in rows if r.name == name}
        cells = [
            "-" if t not in mine else mine[t].said if mine[t].passed else f"**{mine[t].said}**"
            for t in ("gfx942", "gfx950")
        ]
        planted = "yes" if next(iter(mine.values())).planted else ""
        lines.append(f"| {name} | {planted} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def write(mark: str, head: str, rows: list[Row], left=()) -> None:
    """Puts the table between its marks, and below it what was left out."""
    begin, end = f"<!-- suite: {mark} -->", f"<!-- end of suite: {mark} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    text = PAGE.read_text()
    if not pattern.search(text):
        raise RuntimeError(f"{PAGE}: required the marks {begin} and {end}")
    body = markdown(head, rows)
    if left:
        body += "\n\nLeft out:\n" + "\n".join(f"- {line}" for line in left)
    table = f"{begin}\n{body}\n{end}"
    PAGE.write_text(pattern.sub(lambda _: table, text))
