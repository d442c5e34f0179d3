"""The suites of other people's kernels: their table, and how public programs are judged."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

import simulator

FOLDER = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(FOLDER / "suites"))

import public_kernels  # noqa: E402
import suite_table  # noqa: E402

PROGRAM = """
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#include "common.h"
#include <cstdio>
__global__ void turn(int* x) {
  __shared__ int s[256];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[255 - threadIdx.x];
}
int main() {
  int h[256], *d;
  for (int i = 0; i < 256; ++i) h[i] = i;
  if (hipMalloc(&d, SIZE) || hipMemcpy(d, h, SIZE, hipMemcpyHostToDevice)) return 2;
  turn<<<1, 256>>>(d);
  if (hipMemcpy(h, d, SIZE, hipMemcpyDeviceToHost)) return 3;
  for (int i = 0; i < 256; ++i) if (h[i] != 255 - i) return 4;
  return 0;
}
"""


def git(folder, *words):
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A public repository, but on this disk."""
    try:
        simulator.runtime()
    except simulator.SimulatorError as error:
        pytest.skip(str(error))
    origin = tmp_path / "origin"
    for name, text in {
        "a/turn/main.hip": PROGRAM,
        "a/wrong/main.hip": PROGRAM.replace("__syncthreads();", ""),
        "a/odd/main.hip": "int main() { return nothing; }",
        "a/idle/main.hip": "int main() {}",
        "shared/common.h": "#define SIZE 1024\n",
    }.items():
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text(text)
    git(origin, "init", "-q")
    git(origin, "add", "-A")
    git(origin, "commit", "-qm", "all")
    monkeypatch.setattr(public_kernels, "CHECKOUTS", tmp_path / "clones")
    monkeypatch.setattr(suite_table, "PAGE", tmp_path / "suites.md")
    marks = "<!-- suite: public -->", "<!-- end of suite: public -->"
    suite_table.PAGE.write_text("\n".join([marks[0], "outdated", marks[1], "end\n"]))
    return public_kernels.Repository("few", origin.as_uri(), ("a/*/main.hip",), ("shared",),
                                     {"a/turn": (1,)})  # fmt: skip


def test_public_programs_are_cloned_run_and_told(repository, capsys):
    missing = public_kernels.Repository("gone", repository.url + "-gone", ("*",))
    assert public_kernels.main(["--write"], [repository, missing]) == 1, "one of them is wrong"
    said = capsys.readouterr().out
    assert "pass  few: a/turn (gfx942), correct: clean" in said
    assert "pass  few: a/turn, its barrier 1 taken out (gfx942), planted bug: " in said
    assert re.search(r"FAIL  few: a/wrong \(gfx942\), correct: .*lds-race", said)
    assert "left out  few: a/odd: does not compile here: use of undeclared" in said
    assert "left out  few: a/idle: launches no kernel" in said
    assert "left out  gone: " in said and "could not be cloned" in said
    page = suite_table.PAGE.read_text()
    assert "| few: a/turn |  | clean | - |" in page and "Left out:\n- few: a/idle" in page
    assert re.search(r"Programs as published, few at [0-9a-f]{10} of \d{4}-\d\d-\d\d: ", page)
    assert "outdated" not in page and page.endswith("end\n")


@pytest.mark.slow
def test_clones_that_are_there_are_taken(repository, tmp_path, capsys):
    git(tmp_path, "clone", "-q", tmp_path / "origin", tmp_path / "had" / "few")
    gone = dataclasses.replace(repository, url="file:///nowhere")
    words = ["--clones", str(tmp_path / "had"), "--only", "few: a/turn"]
    assert public_kernels.main(words, [gone]) == 0
    assert "1 runs of correct kernels, false alarms or wrong values in 0" in capsys.readouterr().out
    assert not (tmp_path / "clones").exists()


def suite_in_page(name):
    """The rows of a suite's table that `make triton` or `make public-kernels` has written, of which
    none may tell of a false alarm, and how many bugs were planted: all of them told."""
    text = (FOLDER / "docs" / "suites.md").read_text()
    table = re.search(rf"<!-- suite: {name} -->\n(.*?)<!-- end", text, re.S)[1]
    assert "false alarms or wrong values in 0;" in table and "| **" not in table
    _, planted, told = map(int, re.search(
        r"(\d+) runs of .*?; (\d+) of planted bugs, (\d+) told", table).groups())  # fmt: skip
    assert planted == told
    return [line for line in table.splitlines() if line.startswith("| ")][2:], planted


def test_the_page_claims_what_its_table_says():
    rows, planted = suite_in_page("triton")
    assert planted == 2 * sum("| yes |" in row for row in rows) > 20
    assert len(rows) >= 24


def test_the_page_claims_what_public_programs_say():
    rows, planted = suite_in_page("public")
    assert planted == sum("| yes |" in row for row in rows) > 5


def test_the_kernels_of_the_suite():
    pytest.importorskip("triton", reason="make triton runs all of them")
    command = [sys.executable, FOLDER / "suites" / "triton_suite.py", "--seeds", "1", "--only"]
    done = subprocess.run([*command, "split_k"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
