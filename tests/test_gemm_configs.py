"""Every tile and schedule of the AMD gemm on the simulator, and what a config may be."""

import math

import pytest
import simulated
import torch
from compare import Guarded, assert_product_close, bits, strided
from test_skinny_gemm import padded_fp8, random_scale

CPU = torch.device("cpu")
TILES = [(256, 256), (256, 128), (128, 128), (128, 64), (64, 128), (64, 64)]
# As text, without the tile: each way to divide the work.
SCHEDULES = {
    "data_parallel": "split_k=1 workgroups=0 whole_rounds=0",
    "split_k": "split_k=3 workgroups=0 whole_rounds=0",
    "stream_k": "split_k=0 workgroups=5 whole_rounds=0",
    "hybrid": "split_k=0 workgroups=3 whole_rounds=1",
}


pytestmark = pytest.mark.usefixtures("on_the_simulator")


@pytest.fixture(scope="module")
def ops():
    simulated.functional()
    return simulated.ops


def text(tile, schedule, group_m=2, xcds=2):
    m, n = tile
    return f"tiled block_m={m} block_n={n} {SCHEDULES[schedule]} group_m={group_m} xcds={xcds}"


class Problem:
    def __init__(self, m, n, k, scales="row", dtype=simulated.NATIVE, w_dtype=None):
        w_dtype = dtype if w_dtype is None else w_dtype

        def operand(rows, dtype):
            fp8 = dtype.itemsize == 1
            return padded_fp8(rows, k, dtype, CPU) if fp8 else strided(rows, k, dtype, CPU)

        self.a, self.w = operand(m, dtype), operand(n, w_dtype)
        self.scale_a = random_scale(scales, m, k, CPU, 1) if dtype.itemsize == 1 else None
        self.scale_w = random_scale(scales, n, k, CPU, 128) if w_dtype.itemsize == 1 else None
        self.bias = torch.randn(n)

    def run(self, ops, config=None, out_dtype=torch.float32, seed=None):
        out = Guarded(self.a.shape[0], self.w.shape[0], out_dtype, CPU)
        call = (out.view, self.a, self.w, self.scale_a, self.scale_w, self.bias)
        if config is None:
            ops.gemm(*call, seed=seed)
        else:
            ops.gemm(*call, config, seed=seed)
        out.assert_guards_intact()
        return out.view.clone()

    def check(self, package, actual):
        dequantize = package.reference.dequantize
        operands = dequantize(self.a, self.scale_a, 1), dequantize(self.w, self.scale_w, 128)
        exact = operands[0] @ operands[1].t() + self.bias.double()
        assert_product_close(actual, exact, operands)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_tiles_and_schedules(package, ops, tile, schedule):
    """Ragged in M, N and K, with the line that K cuts in one worker's part."""
    scales = "row" if tile == (256, 256) else "block"
    m, n = 2 * tile[0] - 5, 3 * tile[1] - 23
    problem = Problem(m, n, 1000, scales)
    problem.check(package, problem.run(ops, text(tile, schedule)))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_rows_of_16_bit_outputs(package, ops, tile):
    """They go through LDS; both edges cut a tile."""
    problem = Problem(tile[0] + 5, 2 * tile[1] - 24, 200)
    for out_dtype in (torch.float16, torch.bfloat16):
        actual = problem.run(ops, text(tile, "data_parallel"), out_dtype)
        problem.check(package, actual)


@pytest.mark.parametrize("k", [1, 15, 64, 128, 129, 257])
def test_small_k(package, ops, k):
    problem = Problem(70, 66, k)
    for tile in ((64, 64), (128, 128)):
        problem.check(package, problem.run(ops, text(tile, "data_parallel", xcds=1)))


def test_no_k(ops):
    problem = Problem(70, 66, 0, "none")
    assert torch.equal(problem.run(ops), problem.bias.expand(70, 66))


@pytest.mark.parametrize("w_dtype", ["same", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_operands(package, ops, dtype, w_dtype):
    w_dtype = dtype if w_dtype == "same" else simulated.NATIVE
    for tile, schedule in (((256, 256), "data_parallel"), ((128, 64), "stream_k")):
        problem = Problem(260, 200, 333, "row", dtype, w_dtype)
        problem.check(package, problem.run(ops, text(tile, schedule)))


def test_weight_only_with_block_scales(package, ops):
    """A block of scales covers two lines of 16-bit operands."""
    problem = Problem(130, 200, 700, "block", torch.bfloat16, simulated.NATIVE)
    problem.check(package, problem.run(ops, text((64, 128), "split_k")))


def test_bits_without_a_division_of_k_are_the_same_for_all_tiles_and_rows(ops):
    """Every output is summed in the order of k by one wave, whichever the tile and M."""
    few, many = Problem(65, 200, 900, "block"), Problem(200, 200, 900, "block")
    many.a[:65], many.w, many.scale_w, many.bias = few.a, few.w, few.scale_w, few.bias
    many.scale_a[:65] = few.scale_a
    expected = bits(few.run(ops, text((64, 64), "data_parallel")))
    for tile in TILES[1:]:
        assert torch.equal(bits(few.run(ops, text(tile, "data_parallel"))), expected), tile
        assert torch.equal(bits(many.run(ops, text(tile, "data_parallel")))[:65], expected), tile


@pytest.mark.parametrize("schedule", ["split_k", "stream_k", "hybrid"])
def test_bits_do_not_depend_on_the_order_of_workgroups(ops, schedule):
    problem = Problem(190, 200, 1500, "block")
    config = text((64, 64), schedule)
    expected = bits(problem.run(ops, config, seed=1))
    for seed in (2, 3, 4):
        assert torch.equal(bits(problem.run(ops, config, seed=seed)), expected)


def test_every_candidate_serves(package, ops):
    problem = Problem(150, 190, 520, "block")
    out = torch.empty(150, 190)
    operands = (out, problem.a, problem.w, problem.scale_a, problem.scale_w)
    candidates = ops.gemm_configs(*operands, False).splitlines()
    assert len(candidates) == len(set(candidates)) > 10
    for config in candidates:
        problem.check(package, problem.run(ops, config))


@pytest.mark.parametrize(
    "config",
    [
        "tiled",
        "tiled block_m=96 block_n=128 split_k=1 workgroups=0 whole_rounds=0 group_m=2 xcds=2",
        "tiled block_m=64 block_n=64 split_k=9 workgroups=0 whole_rounds=0 group_m=2 xcds=2",
        "tiled block_m=64 block_n=64 split_k=0 workgroups=0 whole_rounds=0 group_m=2 xcds=2",
        "tiled block_m=64 block_n=64 split_k=0 workgroups=4 whole_rounds=9 group_m=2 xcds=2",
        "tiled block_m=64 block_n=64 split_k=1 workgroups=0 whole_rounds=0 group_m=0 xcds=2",
        "tiled block_m=64 block_n=64 split_k=1 workgroups=0 whole_rounds=0 group_m=2 xcds=99",
    ],
)
def test_configs_that_cannot_be(ops, config):
    with pytest.raises(RuntimeError, match="gemm config"):
        Problem(70, 66, 1000).run(ops, config)


def test_block_scales_are_refused_where_no_tile_has_them(ops):
    with pytest.raises(RuntimeError, match="256 x 256"):
        Problem(70, 66, 1000, "block").run(ops, text((256, 256), "data_parallel"))


def test_the_other_dialect_takes_the_plain_kernel(package, ops):
    other = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
    problem = Problem(70, 66, 300, "block", other[simulated.NATIVE])
    out = torch.empty(70, 66)
    operands = (out, problem.a, problem.w, problem.scale_a, problem.scale_w)
    assert ops.gemm_configs(*operands, False).startswith("plain")
    problem.check(package, problem.run(ops))


# Two layers of DeepSeek-V3 under TP8 and two of Llama-3.1-8B; block scales and scales of rows.
REAL = {"gate_up": (4608, 7168, "block"), "q_b": (3072, 1536, "block"),
        "llama_qkv": (6144, 4096, "row"), "llama_down": (4096, 14336, "row")}  # fmt: skip


@pytest.mark.parametrize("layer", REAL)
def test_scaled_layers(package, ops, layer):
    """What the choice takes for the layer, on a sixteenth of it: same tile, schedule and checks."""
    n, k, scales = REAL[layer]
    problem = Problem(96, n // 8, math.ceil(k / 2 / 128) * 128, scales)
    problem.check(package, problem.run(ops, out_dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("m", [96, 512, 2048])
@pytest.mark.parametrize("layer", REAL)
def test_real_layers(package, ops, layer, m):
    n, k, scales = REAL[layer]
    problem = Problem(m, n, k, scales)
    problem.check(package, problem.run(ops, out_dtype=torch.bfloat16))
