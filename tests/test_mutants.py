"""The lists of faults for `make mutants` fit the files that they are planted in, and the tool tells
a fault that is noticed from one that is not."""

import importlib
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections import Counter

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "tools"))
mutants = importlib.import_module("mutants")

LISTED = mutants.listed()


@pytest.mark.parametrize("mutant", LISTED, ids=str)
def test_a_listed_fault_can_be_planted(mutant):
    """And the tests named with it are files that are there."""
    text = (ROOT / mutant.file).read_text()
    assert mutant.planted(text) != text
    files = [word.partition("::")[0] for word in shlex.split(mutant.tests) if "tests/" in word]
    assert files and all((ROOT / file).is_file() for file in files), mutant.tests
    assert re.search(r"\w+ \w+", mutant.why), "says what it breaks"


@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in LISTED}))
def test_a_listed_fault_names_tests_that_there_are(tests):
    """Words of -k stand in their text, but for what pytest makes of parameters: words joined by
    -, numbers behind names of values that have no text."""
    words = shlex.split(tests)
    if "-k" not in words:
        return
    text = "".join((ROOT / word).read_text() for word in words if word.endswith(".py"))
    for word in re.findall(r"\w+", words[words.index("-k") + 1]):
        if word not in ("and", "or", "not", "None", "True", "False") and not word[0].isdigit():
            assert word in text or word.rstrip("0123456789") in text, word


def test_no_fault_is_listed_twice():
    counts = Counter((m.file, m.find, m.replace) for m in LISTED)
    assert max(counts.values()) == 1


def test_every_python_file_of_the_package_has_tests_to_notice_its_faults():
    folder = ROOT / mutants.PACKAGE
    for path in folder.glob("*/*.py"):
        for word in shlex.split(mutants.fitting_tests(path.relative_to(ROOT).as_posix())):
            assert not word.startswith("tests/") or (ROOT / word).is_file(), word
    named = tomllib.loads((mutants.LISTS / "python" / "tests.toml").read_text())
    assert all((folder / name).exists() for name in named)


@pytest.mark.parametrize(
    ("find", "found"),
    [("x: int", "stands 0 times"), ("x", "stands 2 times"), ("def", "replaced by itself")],
)
def test_a_fault_that_fits_no_more_is_refused(find, found):
    mutant = mutants.Mutant("a", "f.py", find, "def", "tests/t.py", "breaks f")
    with pytest.raises(ValueError, match=found):
        mutant.planted("def f(x): return x")


@pytest.mark.parametrize(
    ("replace", "area", "found"),
    [
        ("return x - 1", "a", "noticed"),
        ("return 1 + x", "a", "survived"),
        ("return x +", "a", "pytest ends with 2"),
        ("return x +", "python", "noticed"),
        ("while True: pass", "a", "noticed"),
        ("__import__('os').abort()", "a", "noticed"),
        ("build.fails", "a", "does not build"),
    ],
)
def test_what_tests_say_of_a_fault(tmp_path, monkeypatch, replace, area, found):
    """In a clone of one file and one test; and both it and its build/ are as before."""
    for name in ("tree/tools", "tree/build", "clean"):
        (tmp_path / name).mkdir(parents=True)
    source, kept = tmp_path / "tree" / "f.py", tmp_path / "tree" / "build" / "kept"
    source.write_text("def f(x):\n    return x + 1\n")
    os.utime(source, (1e9, 1e9))
    (tmp_path / "clean" / "kept").write_text("before")
    (tmp_path / "tree" / "tools" / "build.py").write_text(
        "import pathlib, sys\npathlib.Path('build/kept').write_text('after')\n"
        "sys.exit('fails' in pathlib.Path('f.py').read_text())\n"
    )
    test = "from f import f\n\ndef test_f():\n    assert f(2) == 3\n"
    (tmp_path / "tree" / "test_f.py").write_text(test)
    shutil.copyfile(ROOT / "conftest.py", tmp_path / "tree" / "conftest.py")
    monkeypatch.setattr(mutants, "TREE", tmp_path / "tree")
    monkeypatch.setattr(mutants, "CLEAN", tmp_path / "clean")
    monkeypatch.setattr(mutants, "patience", lambda _: 2 if "while" in replace else 60)
    mutant = mutants.Mutant(area, "f.py", "return x + 1", replace, "test_f.py", "breaks f")
    assert mutants.outcome(mutant, 0).startswith(found)
    assert source.read_text() == "def f(x):\n    return x + 1\n"
    assert source.stat().st_mtime == 1e9 and kept.read_text() == "before"
