"""The warps that widen weights for wgmma (gemm/cuda/widen.cuh), on the host.

A thread stands for each of the block's, and barriers have mbarrier's phases (tests/emulated): every
code of FP8 and MXFP4, scales at odd places, stages that come round in any order. On a GPU
test_gemm_every_config.py and test_moe_every_config.py have the same kernels whole.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from project import ROOT

NVCC = shutil.which("nvcc")


@pytest.mark.skipif(not (NVCC and shutil.which("g++")), reason="needs nvcc's headers and g++")
def test_every_element_is_widened_whoever_is_first(tmp_path):
    for folder in ("common", "gemm", "moe"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copytree(ROOT / "tests" / "emulated", tmp_path, dirs_exist_ok=True)
    told = subprocess.run([NVCC, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"],
                          capture_output=True, text=True, check=True).stderr  # fmt: skip
    toolkit = Path(re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)[1])
    command = ["g++", "-std=c++20", "-O1", "-pthread", f"-I{tmp_path}", f"-I{toolkit}/include"]
    subprocess.run([*command, tmp_path / "widen.cpp", "-o", tmp_path / "widen"], check=True)
    for _ in range(3):
        done = subprocess.run([tmp_path / "widen"], capture_output=True, text=True, timeout=120)
        assert done.stdout == "tiles 21, wrong 0\n", done.stdout + done.stderr
