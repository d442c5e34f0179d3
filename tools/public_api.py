"""The public API as data: what `__all__` of the package offers, with every signature.

    python tools/public_api.py           # says what differs from tools/public_api.json
    python tools/public_api.py --write   # stores it: after a version bump, or while unreleased

The version in build.toml is a promise to those who load it, so a released version's API does not
change: the version goes up, CHANGELOG.md says why, and then the file is written. A version whose
heading in CHANGELOG.md ends in "(unreleased)" is still free.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "tools" / "public_api.json"
PACKAGE = ROOT / "torch-ext" / "rocm_kernels"


def public_api(package: Path = PACKAGE) -> dict:
    """Signatures by name; a module or a class is a dictionary of its own public names. Constants
    are left out.

    Args:
        package: a folder with an ``__init__.py`` that has ``__all__``. What it imports is looked up
            in its modules, and so on in folders among them.
    """
    tree = ast.parse((package / "__init__.py").read_text())
    found = _members(tree)
    module = functools.cache(lambda name: _module(package, name))  # which many names come from
    exported: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            exported = ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                if node.module is None:
                    found[alias.name] = module(alias.name)
                else:
                    found[alias.name] = module(node.module).get(alias.name)
    return {name: found[name] for name in sorted(exported) if found.get(name) is not None}


def _module(package: Path, name: str) -> dict:
    if (package / name).is_dir():
        return public_api(package / name)
    path = (package / name.replace(".", "/")).with_suffix(".py")
    return _members(ast.parse(path.read_text()))


def _members(tree: ast.Module | ast.ClassDef) -> dict:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            found[node.name] = f"({ast.unparse(node.args)}){returns}"
        elif isinstance(node, ast.ClassDef):
            found[node.name] = _members(node)
        elif isinstance(tree, ast.ClassDef) and isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = f"= {ast.unparse(node.value)}" if node.value else ""
    return {name: value for name, value in sorted(found.items()) if not name.startswith("_")}


def version() -> int:
    with open(ROOT / "build.toml", "rb") as file:
        return tomllib.load(file)["general"]["version"]


def newest_entry() -> tuple[int, bool]:
    """The version that CHANGELOG.md tells of first, and whether it is released."""
    heading = re.search(r"^## (\d+)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return int(heading[1]), "(unreleased)" not in heading[2]


def difference(stored: dict, current: dict) -> str:
    before, after = (json.dumps(api, indent=1).splitlines() for api in (stored, current))
    return "\n".join(difflib.unified_diff(before, after, "stored", "current", lineterm="", n=1))


def may_write(stored: dict, current: dict) -> str | None:
    """Why the current API may not be stored, or None.

    Args:
        stored: {"version", "released", "api"} as in the file.
        current: the same of the sources.
    """
    free = not stored["released"] or current["version"] > stored["version"]
    if current["api"] == stored["api"] or free:
        return None
    return f"version {stored['version']} is released: raise `version` in build.toml first"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="store the current API")
    arguments = parser.parse_args()
    entry, released = newest_entry()
    if entry != version():
        print(f"error: CHANGELOG.md begins with {entry}, build.toml says {version()}")
        return 1
    current = {"version": version(), "released": released, "api": public_api()}
    stored = json.loads(STORED.read_text()) if STORED.exists() else {**current, "api": {}}
    if arguments.write:
        if refusal := may_write(stored, current):
            print(f"error: {refusal}")
            return 1
        STORED.write_text(json.dumps(current, indent=1) + "\n")
        return 0
    print(difference(stored, current) or "no difference")
    return int(stored != current)


if __name__ == "__main__":
    sys.exit(main())
