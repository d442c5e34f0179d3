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
    90: "decode gathered plain prefill resident streamed streamed_wgmma tiled warpgroup",
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
        "16/8 of 256: decode cluster=2 outer=8",
    ]  # fmt: skip


def test_long_prompts_take_the_most_rows(played):
    """Three consumers for heads of 64. Heads of 512, of which prefill has no tile, take decode, of
    any number of blocks of rows: the plain kernel would take a row a warp."""
    prompts = [line.removeprefix("prompt of heads of ") for line in played if "prompt" in line]
    assert prompts == [
        "64: prefill rows=192", "128: prefill rows=128", "512: decode rows=8"
    ]  # fmt: skip


def test_fp8_prompts_are_gathered_where_there_is_room(played):
    """Not for a few queries, and not more than 256 MiB, whatever the choice was made for."""
    assert [line for line in played if "queries in FP8" in line] == [
        "2048 queries in FP8 of 128: gathered rows=128, prefill rows=128",
        "2048 queries in FP8 of 64: gathered rows=192, prefill rows=128",
        "2048 queries in FP8 of 128: prefill rows=128, prefill rows=128",
        "4 queries in FP8 of 128: decode rows=16, decode rows=16",
    ]


def test_blocks_have_multiprocessors_of_their_own_where_there_are_as_many(played):
    """Not one of two blocks while another has none; more blocks, and fewer than half, as they come.
    Clusters of four and more would not find room."""
    room = [line.removeprefix("room ") for line in played if line.startswith("room ")]
    assert room == [
        "64 of 1: 1", "128 of 2: 0", "128 of 1: 0", "256 of 4: 1", "128 of 4: 1", "72 of 1: 0",
        "136 of 1: 1",
    ]  # fmt: skip


def test_experts_take_tiles_for_uneven_routing(played):
    """Eight rows while slots are no more than experts: beyond, a few experts that get all tokens
    have several tiles of them, each of which reads the weights again (moe_journal.md)."""
    found = [line.removeprefix("experts ") for line in played if line.startswith("experts ")]
    assert found == [
        f"{tokens} of {experts}: streamed_wgmma {rows}"
        for experts, by_tokens in ((128, (8, 8, 16, 16, 16)), (256, (8, 8, 8, 16, 16)))
        for tokens, rows in zip((8, 16, 32, 64, 128), by_tokens, strict=True)
    ]


def chosen_configs(tmp_path, calls):
    """For calls as the benchmark has them, and whether on an H100."""
    program, source = tmp_path / "choices", ROOT / "tests/launches/cuda_attention_choices.cpp"
    subprocess.run(["g++", "-std=c++17", f"-I{ROOT}", source, "-o", program], check=True)
    asked = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    done = subprocess.run([program], input=asked, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("card", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_attention_takes_configs_that_were_measured_to_be_quick(tmp_path, card):
    """By the times of all that are near the quickest, of calls that somebody listed, and of some by
    chance (benchmarks/attention.py --parts configs,drawn,queries)."""
    file = ROOT / "benchmarks/results/attention_configs.json"
    measured = json.loads(file.read_text())[card]["calls"]
    chosen = chosen_configs(tmp_path, [(*cell["call"], int("H100" in card)) for cell in measured])
    lost = {}
    for cell, config in zip(measured, chosen, strict=True):
        quickest = min(cell["us"].values())
        lost[tuple(cell["call"])] = cell["us"].get(config, 1.6 * quickest) / quickest - 1
    assert len(lost) > 230
    assert all(share < 0.2 for share in lost.values()), lost
    assert sum(lost.values()) < 0.011 * len(lost), lost


def test_prompts_are_not_served_by_decode(tmp_path):
    """More rows than its tiles have would read the keys once for each block of them. Heads of 512
    have no other kernel."""
    shapes = ((8, 8, 64), (32, 32, 64), (64, 8, 64), (32, 8, 128), (16, 16, 192), (16, 8, 256))
    calls = [
        (batch, rows, keys, heads, kv_heads, size, size, page, element, card)
        for heads, kv_heads, size in (*shapes, (8, 1, 512))
        for rows, keys in ((48, 48), (64, 4096), (512, 4096), (2048, 16384))
        for batch in (1, 32)
        for page in (0, 16)
        for element in (1, 2)
        for card in (0, 1)
    ]
    for call, config in zip(calls, chosen_configs(tmp_path, calls), strict=True):
        assert config.startswith("decode") == (call[5] == 512), (call, config)


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
