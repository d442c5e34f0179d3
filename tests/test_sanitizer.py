"""compute-sanitizer finds nothing in our kernels, and finds what is planted."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.version.cuda and torch.cuda.is_available()), reason="needs an NVIDIA GPU"
    ),
]
SCRIPT = Path(__file__).parent / "sanitized.py"


def sanitize(tool: str, *arguments: str) -> subprocess.CompletedProcess:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed (it is part of the CUDA toolkit)")
    # Kernels of this package alone: torch's are not ours to judge, and take most of the time.
    command = [program, f"--tool={tool}", "--kernel-regex=kns=rocm_kernels", "--error-exitcode=1"]
    command += [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("part", ["rows", "products", "gemm", "experts"])
def test_nothing_is_found(device, tool, part):
    # Racecheck reports what a warp's lanes write before a __syncwarp and one of them passes on by
    # an mbarrier, as warpgroup tiles do: scales of rows and of blocks, places of sums.
    without = ["--without", "warpgroup"] if tool == "racecheck" else []
    result = sanitize(tool, "--only", part, *without)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert "done" in result.stdout
    assert re.search(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", result.stdout)


def test_a_planted_mistake_is_found(device):
    result = sanitize("memcheck", "--planted")
    assert "Invalid __global__ read" in result.stdout, result.stdout[-3000:]
    assert result.returncode != 0
