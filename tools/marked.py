"""Tables that a script writes into a page of the documents, between two marks."""

from __future__ import annotations

from pathlib import Path


def replace(page: Path, begin: str, end: str, made: str) -> None:
    """Puts ``made`` in the place of what stands between the marks.

    Raises:
        ValueError: a mark is not on the page.
    """
    text = page.read_text()
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} must hold {begin!r} and, after it, {end!r}")
    page.write_text(before + begin + made + end + after)
