"""The CPU kernels' paths for lesser processors than this one: the same cases on each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CASES = [
    f"test_{name}.py" for name in ("rms_norm_fp8", "swiglu_fp8", "skinny_gemm", "gemm_cpu", "moe")
]


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_case_on_a_lesser_instruction_set(isa: str) -> None:
    """Asking for more than the processor has leaves the choice as it was: never a crash."""
    # The choice is made once a process.
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--device=cpu", "-q", "-x", *CASES],
        cwd=TESTS,
        env={**os.environ, "ROCM_KERNELS_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout


def test_an_unknown_instruction_set_is_refused() -> None:
    code = (
        "import kernels, torch\n"
        "package = kernels.get_kernel('org/rocm-kernels', version=1, backend='cpu')\n"
        "package.rms_norm(torch.ones(512, 512), torch.ones(512))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ROCM_KERNELS_CPU_ISA": "avx-2"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "ROCM_KERNELS_CPU_ISA must be portable, avx2 or avx512" in result.stderr
    assert "got avx-2" in result.stderr
