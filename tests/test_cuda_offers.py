"""What NVIDIA's choices of a config offer fits the shared memory of every generation of GPUs: by
the host's own compiler and without a GPU (tests/launches/offers.cpp)."""

import json
import re
import subprocess

import pytest
from project import ROOT

DESIGNS = {
    80: "decode plain tiled",
    86: "decode plain tiled",
    89: "decode plain tiled",
    90: "decode plain prefill resident streamed streamed_wgmma tiled warpgroup",
    100: "decode plain resident streamed tiled",
    120: "decode plain streamed tiled",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    program = tmp_path_factory.mktemp("offers") / "offers"
    source = ROOT / "tests/launches/offers.cpp"
    command = ["g++", "-std=c++17", "-O1", f"-I{ROOT}", source, "-o", program]
    subprocess.run(command, check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def test_every_offered_config_fits(played):
    assert played[-1].startswith("offers ") and played[-1].endswith(", misfits 0"), played[:20]
    assert int(played[-1].split()[1].rstrip(",")) > 100000


def test_every_gpu_is_offered_its_designs(played):
    """A check that is too strict would leave a GPU with less than it can run."""
    expected = [f"sm_{capability}: {names}" for capability, names in DESIGNS.items()]
    assert [line for line in played if line in expected] == expected, played[-8:]


def test_an_h100_has_blocks_of_few_rows(played):
    """Its SMs can take in more than their shares; an H200's cannot, and have one block each."""
    boxes = [line.removeprefix("boxes ") for line in played if line.startswith("boxes ")]
    assert boxes == [
        "h100 57344: block_n=109 k_chunks=2", "h200 57344: block_n=218 k_chunks=1",
        "h100 28672: block_n=109 k_chunks=2", "h200 28672: block_n=218 k_chunks=1",
        "h100 4096: block_n=32 k_chunks=4", "h200 4096: block_n=32 k_chunks=4",
    ]  # fmt: skip


def test_few_kv_heads_take_clusters(played):
    """Not 32 parts, which took two to four times as long on an H200 (attention_journal.md); and no
    eight clusters of 16, for which its SMs have no room at once."""
    heads = [line.removeprefix("heads ") for line in played if line.startswith("heads ")]
    assert heads == [
        "32/8 of 128: decode cluster=8 outer=1", "8/1 of 128: decode cluster=8 outer=8",
        "4/1 of 256: decode cluster=8 outer=8", "8/1 of 512: decode cluster=16 outer=4",
        "16/8 of 256: prefill cluster=1 outer=16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "limit, kind, times",
    [
        ("kQuickestByWgmma", "row", "rocm-kernels"),
        ("kQuickest16Bit", "weights", "rocm-kernels, bf16 x FP8"),
    ],
)
def test_few_rows_go_where_they_were_measured_to_be_quickest(limit, kind, times):
    """skinny_gemm never takes longer than gemm would: by every product that both families were
    timed of."""
    text = (ROOT / "skinny_gemm/cuda/time_model.h").read_text()
    most = re.search(rf"{limit} = (\w+);", text)[1]
    most = 64 if most == "kSkinnyGemmMaxRows" else int(most)
    few = {
        (case["m"], case["n"], case["k"]): case["times"][times]["median"]
        for case in json.loads((ROOT / "benchmarks/results/h200.json").read_text())["cases"]
        if case["op"] == "skinny_gemm"
    }
    cells = json.loads((ROOT / "benchmarks/results/h200_gemm.json").read_text())["cells"]
    compared = [
        (cell["m"] <= most, few[key] < cell["ours"])
        for cell in cells
        if cell["kind"] == kind
        and cell["config"].startswith("warpgroup ")
        and (key := (cell["m"], cell["n"], cell["k"])) in few
    ]
    assert len(compared) >= 6
    assert all(taken == quicker for taken, quicker in compared), compared
