"""tools/neighbours.py: its table and its choice of versions, of made-up results."""

import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import neighbours

WHOLE = {"phi3": (2, 2, ""), "gemma": (2, 2, "")}
TABLE = """\
| neighbour | version | passed | failed |
| --- | --- | ---: | ---: |
| here | transformers 5.22.2 | 40 | 0 |
| transformers | 5.30.0 | 38 | 2 |

| whole layers | here transformers 5.22.2 | transformers 5.30.0 |
| --- | ---: | ---: |
| phi3 | 2 of 2 | 1 of 2 |
| gemma | 2 of 2 | unknown to it |

transformers 5.30.0: phi3: model.layers.1: has no mlp
transformers 5.30.0: gemma: unknown to it
transformers 5.30.0: failed tests.test_families::test_a[phi3]
transformers 5.30.0: failed tests.test_families::test_b
"""


def results():
    layers = {"phi3": (1, 2, "model.layers.1: has no mlp"), "gemma": (0, 0, neighbours.UNKNOWN)}
    failed = [f"tests.test_families::{name}" for name in ("test_a[phi3]", "test_b")]
    return [
        neighbours.Result("here", "transformers 5.22.2", 40, [], WHOLE),
        neighbours.Result("transformers", "5.30.0", 38, failed, layers),
    ]


def test_the_table_names_what_failed_and_what_is_not_whole():
    assert neighbours.table(results()) == TABLE


@pytest.fixture
def ran(monkeypatch):
    """What would be run, with results that a test may set: no network, no environment."""
    seen = SimpleNamespace(runs=[], failed=[], layers=WHOLE, newer={})

    def run(name, version, python):
        seen.runs.append((name, version, python))
        return neighbours.Result(name, version, 3, seen.failed, seen.layers)

    def newest(names):
        return {name: seen.newer.get(name, neighbours.pinned()[name]) for name in names}

    monkeypatch.setattr(neighbours, "run", run)
    monkeypatch.setattr(neighbours, "newest", newest)
    monkeypatch.setattr(neighbours, "environment", lambda name, version: f"{name}-{version}")
    seen.main = lambda *words: (
        monkeypatch.setattr(sys, "argv", ["neighbours.py", *words]), neighbours.main()
    )[1]  # fmt: skip
    return seen


HERE = ("here", f"transformers {neighbours.pinned()['transformers']}", sys.executable)


def test_without_news_what_is_here_runs_alone(ran, capsys):
    assert ran.main() == 0
    assert ran.runs == [HERE]
    said = capsys.readouterr().out
    assert said.startswith("PyPI has nothing newer") and "| phi3 | 2 of 2 |" in said


def test_each_newer_neighbour_runs_by_itself(ran, capsys):
    ran.newer = {"transformers": "99.1", "torchao": "99.2"}
    assert ran.main() == 0
    assert ran.runs[0] == HERE
    assert ran.runs[1:] == [
        ("transformers", "99.1", "transformers-99.1"), ("torchao", "99.2", "torchao-99.2")
    ]  # fmt: skip
    assert "| torchao | 99.2 | 3 | 0 |" in capsys.readouterr().out


def test_versions_that_are_asked_for(ran):
    ran.newer = {"transformers": "99.1", "torchao": "99.2"}
    assert ran.main("--transformers", "5.17.0", "5.23.0") == 0
    versions = [version for _, version, _ in ran.runs[1:]]
    assert versions == ["5.17.0", "5.23.0"]


def test_a_failure_or_a_layer_that_is_not_whole_is_an_error(ran):
    ran.failed = ["tests.test_families::test_b"]
    assert ran.main() == 1
    ran.failed, ran.layers = [], {"phi3": (0, 2, "model.layers.0: has no mlp")}
    assert ran.main() == 1


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_good"/>
<testcase classname="tests.test_a" name="test_left_out"><skipped/></testcase>
<testcase classname="tests.test_a" name="test_bad[1]"><failure message="x"/></testcase>
<testcase classname="tests.test_a" name="test_broken"><error message="x"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("report", [JUNIT, None])
def test_tests_are_counted(monkeypatch, tmp_path, report):
    """Also where pytest ends before it has a report."""

    def pytest_runs(command, **options):
        path = next(word for word in command if word.startswith("--junitxml="))
        if report is not None:
            Path(path.partition("=")[2]).write_text(report)

    monkeypatch.setattr(neighbours, "ROOT", tmp_path)
    monkeypatch.setattr(neighbours, "count_with", lambda python: WHOLE)
    monkeypatch.setattr(subprocess, "run", pytest_runs)
    result = neighbours.run("peft", "99", "python")
    assert result.layers == WHOLE and result.left() == []
    if report is None:
        assert result.passed == 0 and result.failed == ["pytest itself"]
    else:
        assert result.passed == 1
        assert result.failed == ["tests.test_a::test_bad[1]", "tests.test_a::test_broken"]


def test_every_neighbour_has_a_version_here():
    assert set(neighbours.NEIGHBOURS) <= set(neighbours.pinned())
    assert all((ROOT / path).exists() for path in neighbours.TESTS)


@pytest.mark.parametrize("found", [True, False])
def test_what_pip_cannot_fetch_is_skipped_where_it_finds_nothing(
    fetching, monkeypatch, tmp_path, found
):
    if found:
        with zipfile.ZipFile(tmp_path / "packaging-1.0-py3-none-any.whl", "w") as wheel:
            about = "packaging-1.0.dist-info/"
            wheel.writestr(
                f"{about}METADATA", "Metadata-Version: 2.1\nName: packaging\nVersion: 1.0\n"
            )
            wheel.writestr(f"{about}WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{about}RECORD", "")
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    expected = subprocess.CalledProcessError if found else pytest.skip.Exception
    with pytest.raises(expected), fetching:
        subprocess.run(["false"], check=True)
