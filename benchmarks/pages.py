"""Writes tables of results into the pages, or tells which pages differ from the results.

    python benchmarks/pages.py            # says what differs from results/
    python benchmarks/pages.py --write    # puts the tables in

A table stands between the marks `<!-- results: NAME -->` and `<!-- end of results -->`; tables.py
makes the one of that NAME. Pages that hold nothing else are made whole by the scripts that measure.
tests/test_pages.py compares them all.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from tables import TABLES, is_number, markdown, printed  # noqa: E402

BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->\n)", re.DOTALL)


def pages() -> list[Path]:
    """All pages that people read."""
    folders = (ROOT, *(ROOT / "docs" / name for name in ("", "kernels", "results")))
    found = [path for folder in folders for path in folder.glob("*.md")]
    found += [*(ROOT / "integrations").glob("*/*.md"), *(ROOT / "simulator").rglob("*.md")]
    return sorted(found)


@functools.cache
def made(name: str) -> str:
    """The table of that name, from its results."""
    table = TABLES[name]() if name in TABLES else markdown(*printed(name))
    return table.rstrip("\n") + "\n"


def rendered(text: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(lambda found: found[1] + made(found[2]) + found[4], text)


# ---- Tables in a page


def tables(text: str) -> Iterator[tuple[int, list[list[str]]]]:
    """Where each table of a page begins, and the cells of its rows, without the header."""
    for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = found[0].splitlines()[2:]
        yield found.start(), [[c.strip() for c in line.strip("|").split("|")] for line in lines]


def holds_results(rows: list[list[str]]) -> bool:
    """Whether most cells of a table, the first of each row aside, begin with a number."""
    cells = list(itertools.chain.from_iterable(row[1:] for row in rows))
    cells = [cell for cell in cells if cell]
    return sum(is_number(cell) for cell in cells) > len(cells) / 2


def typed_by_hand(text: str) -> list[int]:
    """Lines at which tables of results begin that stand between no marks."""
    marked = [found.span() for found in BLOCK.finditer(text)]
    return [
        text.count("\n", 0, start) + 1
        for start, rows in tables(text)
        if holds_results(rows) and not any(begin < start < end for begin, end in marked)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    arguments = parser.parse_args()
    differing = [page for page in pages() if rendered(page.read_text()) != page.read_text()]
    for page in differing:
        print(page.relative_to(ROOT))
        if arguments.write:
            page.write_text(rendered(page.read_text()))
    return 1 if differing and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
