"""Parts of the kernels on the host: the warps that widen weights for wgmma
(blocks/product/cuda/widen.cuh), the scales of blocks (block_scales.cuh beside it), the orders of
experts' tiles (moe/gpu/order.h), attention's copies from pages (attention/cuda/pages.cuh), the
items that its blocks take (taken_items.cuh beside it), the warps that bring prompts' operands and
store outputs (prefill_producer.cuh) and their softmax (prefill_softmax.cuh), outputs that go to
other ranks (skinny_gemm/cuda/sent_outputs.cuh), the weights of whole layers
(decode_layers/cuda/weights.cuh).

A thread stands for each of the block's, and barriers have mbarrier's phases (tests/emulated): every
code of FP8 and MXFP4, scales at odd places, stages that come round in any order. On a GPU
test_gemm_every_config.py and test_moe_every_config.py have the same kernels whole.
"""

import shutil
import subprocess

import pytest
from project import ROOT, slow_but
from simulated import build

NVCC = shutil.which("nvcc")
PARTS = [
    ("widen", 21),
    ("block_scales", 36),
    ("orders", 2000),
    ("prefill_softmax", 30),
    ("sent", 60),
    ("taken", 200),
    # Many threads that wait for each other: up to a minute on two cores.
    ("key_copies", 88),
    ("prefill_roles", 60),
    ("layer_weights", 12),
]


@pytest.mark.skipif(not (NVCC and shutil.which("g++")), reason="needs nvcc's headers and g++")
@pytest.mark.parametrize("part, tiles", slow_but(PARTS[:-3], PARTS))
def test_every_value_is_right_whoever_is_first(tmp_path, pytestconfig, part, tiles):
    for folder in ("attention", "blocks", "common", "decode_layers", "gemm", "moe", "skinny_gemm"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copytree(ROOT / "tests" / "emulated", tmp_path, dirs_exist_ok=True)
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-fsanitize=address"]
    command += [f"-I{tmp_path}", f"-I{build.cuda_toolkit(NVCC)}/include"]
    subprocess.run([*command, tmp_path / f"{part}.cpp", "-o", tmp_path / part], check=True)
    for _ in range(
        3 if pytestconfig.getoption("--slow", default=False) else 1
    ):  # threads meet anew each time
        done = subprocess.run([tmp_path / part], capture_output=True, text=True, timeout=120)
        assert done.stdout == f"tiles {tiles}, wrong 0\n", done.stdout + done.stderr
