"""The simulator is a product by itself: its module and its engine need nothing of the kernels, and
what is its own lies in its folder."""

import ast
import io
import itertools
import pathlib
import re
import subprocess
import sys

import pytest

from simulator import _build

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


class Log(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_the_engine_s_compilation_says_how_far_it_is(monkeypatch, terminal):
    """And not a word when it is over in a second."""
    for seconds in (0.01, 0.1):
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(_build.time, "monotonic", lambda clock=clock: next(clock))
        monkeypatch.setattr(sys, "stderr", Log(terminal))
        assert list(_build._shown(iter(range(40)), 40)) == list(range(40))
        said = re.findall(r"(\d+) of 40 files", sys.stderr.getvalue())
        slow = range(11, 41) if terminal else (11, 20, 30, 40)
        assert [int(n) for n in said] == (list(slow) if seconds > 0.05 else [])
        assert sys.stderr.getvalue().count("\n") == (
            0 if not said else 1 if terminal else len(said)
        )
