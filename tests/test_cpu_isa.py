"""The CPU kernels' paths for lesser processors than this one: the same cases on each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import slow_but

TESTS = Path(__file__).resolve().parent
CASES = [
    f"test_{name}.py" for name in ("rmsnorm_fp8", "swiglu_fp8", "skinny_gemm", "gemm_cpu", "moe")
]


def config(isa: str, dtype: str = "float8_e4m3fn") -> str:
    """What multiplies in a process of its own, where nothing else has asked for AMX before."""
    code = (
        "import kernels, torch\n"
        "package = kernels.get_kernel('org/rocm-kernels', version=1, backend='cpu')\n"
        f"a, w = (torch.ones(40, 64).to(torch.{dtype}) for _ in range(2))\n"
        "out = torch.empty(40, 40)\n"
        "package.gemm(a, w, out=out)\n"
        "assert out.eq(64).all()\n"
        "print(package.gemm_config(a, w))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ROCM_KERNELS_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()[-1]


def test_tiles_multiply_where_linux_lends_them() -> None:
    """Asked of Linux itself: the processor's flags show AMX where the kernel knows it too."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    if "amx_bf16" not in flags or "avx512vbmi" not in flags:
        pytest.skip("this processor has no AMX with bfloat16")
    assert config("") == config("amx") == config("", "bfloat16") == "amx"
    # bfloat16 does not hold every float16 value.
    assert config("", "float16") == config("avx512") == "avx512"


@pytest.mark.parametrize("isa", slow_but(["avx2"], ["portable", "avx2", "avx512"]))
def test_every_case_on_a_lesser_instruction_set(isa: str) -> None:
    """Asking for more than the processor has leaves the choice as it was: never a crash."""
    sets = ["portable", "avx2", "avx512", "amx"]
    if (here := config("")) in sets and sets.index(here) <= sets.index(isa):
        pytest.skip(f"no more than {isa} here, so the cases themselves ran on it or on less")
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
        "package.rmsnorm(torch.ones(512, 512), torch.ones(512))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ROCM_KERNELS_CPU_ISA": "avx-2"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "ROCM_KERNELS_CPU_ISA must be portable, avx2, avx512 or amx" in result.stderr
    assert "got avx-2" in result.stderr
