"""The simulator is a product by itself: its module and its engine need nothing of the kernels, and
what is its own lies in its folder."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1]
MAY_IMPORT = {*sys.stdlib_module_names, "numpy"}


@pytest.mark.parametrize("path", FOLDER.glob("*.py"), ids=lambda p: p.name)
def test_module_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {name.name.split(".")[0] for name in node.names} <= MAY_IMPORT
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1 or node.module.split(".")[0] in MAY_IMPORT


@pytest.mark.parametrize("path", (FOLDER / "engine").iterdir(), ids=lambda p: p.name)
def test_engine_includes(path):
    for name in re.findall(r'#include "([^"]+)"', path.read_text()):
        assert (FOLDER / "engine" / name).is_file()


def test_nothing_of_it_lies_elsewhere():
    """But the list of its faults, and the tables that benchmarks/pages.py puts into pages."""
    command = ["git", "ls-files", "*simulator*"]
    listed = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=True)
    beside = ("simulator/", "tests/mutants/", "benchmarks/results/tables/")
    assert not [name for name in listed.stdout.splitlines() if not name.startswith(beside)]
