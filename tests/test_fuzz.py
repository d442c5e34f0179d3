"""A short run of each fuzzer in tests/fuzz/, from the committed corpus; `make fuzz` runs longer."""

import subprocess
import sys

import pytest
from project import ROOT

FUZZ = ROOT / "tests" / "fuzz"


def test_ops_survive_odd_calls():
    """The installed build, without sanitizers: right or refused, never anything else."""
    command = [sys.executable, str(FUZZ / "fuzz_ops.py"), "--seconds", "5"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fuzzer", ["launchers-address", "launchers-thread", "ops"])
def test_fuzzer_with_sanitizers(fuzzer):
    command = [sys.executable, str(FUZZ / "run.py"), "--seconds", "15", "--fuzzers", fuzzer]
    result = subprocess.run(command, capture_output=True, text=True)
    if "no clang with libFuzzer" in result.stdout:
        pytest.skip("libclang-rt-22-dev is not installed")
    assert result.returncode == 0, result.stdout + result.stderr
