"""Says what a given environment lacks of requirements.txt; other versions are only told.

python tools/environment.py        # of the Python that runs it
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("requirements.txt", "requirements-model.txt")


def main() -> int:
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        print(f"error: {sys.prefix} lacks what requirements.txt lists", file=sys.stderr)
        return 1
    missing, others = [], []
    lines = [line for name in FILES for line in (ROOT / name).read_text().splitlines()]
    for line in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            missing.append(text)
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            others.append(f"{wanted.name} {version} (tested with {wanted.specifier})")
    if others:
        print(f"note: {sys.prefix} has {', '.join(others)}")
    if missing:
        print(f"error: {sys.prefix} lacks {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
