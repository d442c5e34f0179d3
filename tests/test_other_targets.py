"""The kernels' cases on the machine code for targets beside gfx942, in the simulator.

The device that the runtime's stand-in shows is one for a process, so each target has its own.
"""

import os
import re
import subprocess
import sys

import pytest
from project import ROOT

ROWS = ["test_rmsnorm_fp8.py", "test_swiglu_fp8.py"]
PRODUCTS = ["test_skinny_gemm.py", "test_gemm.py", "test_moe.py"]
CONFIGS = ["test_gemm_configs.py", "test_moe_configs.py"]  # of the tiles, which gfx90a has not


@pytest.mark.slow  # each compiles the package anew
@pytest.mark.parametrize(
    ("target", "files"),
    [
        ("gfx90a", ROWS + PRODUCTS),
        ("gfx950", ROWS + PRODUCTS + CONFIGS),
    ],
)
def test_cases(on_the_simulator, target, files):
    paths = [str(ROOT / "tests" / name) for name in files]
    command = [sys.executable, "-m", "pytest", "-v", "--device", "simulator", *paths]
    environment = {**os.environ, "SIMULATOR_TARGET": target}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    # The cases ran: a run that deselects a file would end well too.
    for name in files:
        ran = len(re.findall(rf"{name}::.* PASSED", done.stdout))
        assert ran > 30, f"{name}: {ran} cases ran"
