"""The text of a file in results/: JSON with one measured row a line."""

from __future__ import annotations

import json
from typing import Any

LONGEST_ROW = 1000  # characters; what is longer has a line for each of its members


def result_text(saved: dict) -> str:
    return _lines(saved, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    text = json.dumps(value)
    if (len(text) <= LONGEST_ROW and indent) or not isinstance(value, (dict, list)):
        return text
    inner = indent + " "
    if isinstance(value, list):
        members = [_lines(member, inner) for member in value]
    else:
        members = [f"{json.dumps(key)}: {_lines(value[key], inner)}" for key in value]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return (
        opening + "\n" + ",\n".join(inner + member for member in members) + f"\n{indent}{closing}"
    )
