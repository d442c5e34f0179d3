"""The command line: arguments, output files, exit status, profile."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hipcc import device_file

from simulator.cli import main

SOURCE = """
GLOBAL void saxpy(float* y, const float* x, float a, int n, u64 offset) {
  int t = BID * 64 + TID;
  if (t < n) y[t] = a * x[t] + (float)offset;                              // THE HOT LINE
}
GLOBAL void twice(float* x) { x[TID] *= 2; }
GLOBAL void bad(float* y) { y[TID + 1] = 1; }
"""


@pytest.fixture(scope="module")
def file():
    return str(device_file(SOURCE))


@pytest.fixture
def x(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100, dtype=np.float32))
    return path


def test_run_writes_outputs(file, x, tmp_path):
    y = tmp_path / "y.npy"
    assert main(["run", file, "saxpy", "--grid", "2", "--block", "64", f"out:{y}:4,25:float32",
                 f"in:{x}", "f32:1.5", "i32:100", "i64:2"]) == 0  # fmt: skip
    got = np.load(y)
    assert got.shape == (4, 25)
    np.testing.assert_array_equal(got.reshape(-1), 1.5 * np.arange(100) + 2)


def test_outputs_are_poisoned_first(file, x, tmp_path):
    y = tmp_path / "y.npy"
    main(["run", file, "saxpy", "--grid", "1", "--block", "64", f"out:{y}:100:float32", f"in:{x}",
          "f32:1", "i32:10", "i64:0"])  # fmt: skip
    assert (np.load(y).view(np.uint8)[40:] == 0xD1).all()


def test_inout_is_written_back(file, x):
    assert main(["run", file, "twice", "--grid", "1,1,1", "--block", "64,1", f"inout:{x}"]) == 0
    got = np.load(x)
    np.testing.assert_array_equal(got[:64], 2 * np.arange(64))
    np.testing.assert_array_equal(got[64:], np.arange(64, 100))


def test_findings_make_the_status_1(file, tmp_path, capsys):
    y = tmp_path / "y.npy"
    command = ["run", file, "bad", "--grid", "1", "--block", "64", f"out:{y}:64:float32", "--json"]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["kind"] == "out-of-bounds"
    assert report["counters"]["instructions"] > 0 and report["time"]["total"] > 0


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["nothing", "--grid", "1", "--block", "64"], "there is no kernel nothing"),
        (["twice", "--grid", "1", "--block", "64"], "takes 1 arguments, got 0"),
        (["twice", "--grid", "1", "--block", "64", "x:1"], "no kind 'x'"),
        (["twice", "--grid", "1", "--block", "2048", "i64:0"], "at most 1024 threads"),
        (["twice", "--grid", "1", "--block", "64", "--lds", "70000", "i64:0"], "64 KiB of LDS"),
    ],
)
def test_errors_say_what_to_do(file, capsys, arguments, words):
    assert main(["run", file, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_profile_lists_hot_lines(file, x, tmp_path):
    y = tmp_path / "y.npy"
    command = [
        sys.executable,
        "-m",
        "simulator",
        "profile",
        file,
        "saxpy",
        "--grid",
        "2",
        "--block",
        "64",
        f"out:{y}:100:float32",
        f"in:{x}",
        "f32:1",
        "i32:100",
        "i64:0",
    ]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "modelled time" in done.stdout and "THE HOT LINE" in done.stdout


def test_kernels_are_listed(file, capsys):
    assert main(["kernels", file]) == 0
    assert "saxpy(" in capsys.readouterr().out


def test_profile_shows_where_the_cycles_went(file, x, capsys):
    command = ["profile", file, "twice", "--grid", "1", "--block", "64", f"inout:{x}"]
    assert main([*command, "--cycles"]) == 0
    shown = capsys.readouterr().out
    assert "cycle model:" in shown and "L2 hits" in shown and "global_load_dword" in shown
    assert main([*command, "--cycles", "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)["cycles"]
    assert raw["waves"] == 1 and raw["seconds"] > 0
    assert main(command) == 0
    assert "cycle model:" not in capsys.readouterr().out
