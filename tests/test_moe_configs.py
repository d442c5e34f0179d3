"""Every tile and order of tiles of the grouped products on the simulator, and what a config may
be. test_moe.py has the cases that all backends share."""

import math

import pytest
import simulated
import torch
from compare import Guarded, assert_product_close, bits
from test_moe import Experts, check_grouped, random_experts, random_routing

TILED = [(128, 256), (128, 128), (64, 128), (32, 128)]
TILES = [*TILED, (16, 16), (16, 32), (32, 32)]
MXFP4_TILES = [*TILED, (8, 16), (8, 32), (16, 32)]
ORDERS = {"row": "order=row group_m=1", "column": "order=column group_m=1",
          "grouped": "order=grouped group_m=2"}  # fmt: skip
KINDS = ["bfloat16", "float16", "fp8-tensor", "fp8-row", "fp8-block", "mxfp4"]


pytestmark = pytest.mark.usefixtures("on_the_simulator")


@pytest.fixture(scope="module")
def simulator():
    class Simulator:
        name, ops, device = "simulator", simulated.functional(), torch.device("cpu")
        fp8_dtype = simulated.NATIVE

    return Simulator


def text(tile, order="grouped", split_k=1, xcds=2):
    m, n = tile
    design = "streamed" if n <= 32 else "tiled"
    return f"{design} block_m={m} block_n={n} {ORDERS[order]} split_k={split_k} xcds={xcds}"


class Layer:
    """A layer's operands, and its result by a config through a poisoned output."""

    def __init__(self, simulator, kind, tokens, hidden, intermediate, experts=3, k=2, **options):
        dtype = torch.float16 if kind == "float16" else torch.bfloat16
        self.experts = Experts(kind, experts, hidden, intermediate, dtype, simulator)
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.weights, self.ids = random_routing(tokens, experts, k, simulator)
        self.options = {"activation": "silu", "limit": math.inf, "interleaved": False,
                        "quantize_input": True, "scale_fmt": None, **options}  # fmt: skip

    def operands(self):
        scales = (self.experts.scales.get(name) for name in
                  ("scale_gate_up", "scale_down", "bias_gate_up", "bias_down"))  # fmt: skip
        *options, scale_fmt = self.options.values()
        return (self.x, *self.experts.weights, self.weights, self.ids, *scales, *options,
                scale_fmt == "ue8m0")  # fmt: skip

    def run(self, config=None, seed=None):
        out = Guarded(*self.x.shape, torch.float32, torch.device("cpu"))
        if config is None:
            simulated.ops.fused_moe(out.view, *self.operands(), seed=seed)
        else:
            simulated.ops.fused_moe(out.view, *self.operands(), config, seed=seed)
        out.assert_guards_intact()
        return out.view.clone()

    def check(self, package, actual):
        options = {**self.options, "limit": None}
        exact = package.reference.fused_moe(
            self.x, *self.experts.weights, self.weights, self.ids, **self.experts.scales,
            **options, out_dtype=torch.float32,
        ).double()  # fmt: skip
        error = (actual.double() - exact).norm() / exact.norm()
        assert error <= 5e-3, error  # a few of h round the other way; a wrong scale shows at once
        by_row = (actual.double() - exact).norm(dim=1)
        assert (by_row <= 0.05 * exact.norm(dim=1) + 1e-5 * exact.norm()).all(), by_row


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_every_tile_is_covered_by_every_order(simulator, package, tile, order):
    """Outputs and workspaces are poisoned: a tile that no workgroup takes shows. Experts have some
    full tiles, a ragged one, and none; all sizes are ragged."""
    ends, n, k = [2 * tile[0] + 5, 2 * tile[0] + 5, 2 * tile[0] + 6], 2 * tile[1] + 70, 136
    rows = ends[-1]
    w, _ = random_experts("bfloat16", 3, n, k, simulator)
    a = torch.randn(rows, k).bfloat16()
    out = Guarded(rows, n, torch.float32, torch.device("cpu"))
    offsets = torch.tensor(ends, dtype=torch.int32)
    for xcds in (1, 8):
        out.view.fill_(math.nan)
        config = text(tile, order, xcds=xcds)
        simulated.ops.grouped_gemm(out.view, a, w, offsets, None, None, config)
        out.assert_guards_intact()
        begin = 0
        for expert, end in enumerate(ends):
            operands = a[begin:end].double(), w[expert].double()
            if begin < end:
                exact = operands[0] @ operands[1].t()
                assert_product_close(out.view[begin:end], exact, operands)
            begin = end


def tiles_of(kind):
    return MXFP4_TILES if kind == "mxfp4" else TILES


def tiles_and_kinds(kinds, streamed=None):
    """Each tile of each kind of weights; `streamed`: of that design alone, or of the others."""
    cases = [(tile, kind) for kind in kinds for tile in tiles_of(kind)
             if streamed is None or streamed == (tile not in TILED)]  # fmt: skip
    name = lambda given: given if isinstance(given, str) else f"{given[0]}x{given[1]}"  # noqa: E731
    return pytest.mark.parametrize(("tile", "kind"), cases, ids=name)


@tiles_and_kinds(KINDS)
def test_layers(simulator, package, tile, kind):
    """K is cut within a line, and the parts of K of the second product are ragged."""
    # MXFP4 streams lines of 256 elements.
    layer = Layer(simulator, kind, 90, 288 if kind == "mxfp4" else 160, 416)
    layer.check(package, layer.run(text(tile, split_k=2 if kind == "mxfp4" else 3)))


@pytest.mark.parametrize("order", ["row", "grouped"])
@tiles_and_kinds(KINDS, streamed=True)
def test_a_wave_finds_its_tile(simulator, package, tile, kind, order):
    """Up to 64 slots, so nothing is routed before. An expert has more rows than a tile, others one
    or none; ids come twice in a token, and some are no expert's."""
    layer = Layer(simulator, kind, 21, 288, 320, experts=7, k=3)
    layer.ids[:20, 0] = 4
    layer.ids[1, 1], layer.ids[2, 1:], layer.ids[3] = 4, -1, 7
    layer.ids[4, 2], layer.ids[5] = 1 << 30, torch.tensor([6, 6, 6])
    config = text(tile, order, split_k=2, xcds=1 if order == "row" else 2)
    layer.check(package, layer.run(config))


@pytest.mark.parametrize("tokens, k", [(300, 7), (1100, 9), (2048, 16), (2100, 16)])
def test_routing_of_many_slots(simulator, package, tokens, k):
    """3, 10 and 32 blocks place chunks of slots, of which each counts all; 33 chunks are routed by
    three launches. Some ids are no expert's, one expert has no slot."""
    layer = Layer(simulator, "fp8-row", tokens, 64, 32, experts=20, k=k)
    layer.ids[torch.rand(tokens, k) < 0.1] = 20
    layer.ids[layer.ids == 7] = -1
    first = layer.run()
    layer.check(package, first)
    assert torch.equal(bits(layer.run(seed=5)), bits(first))


@pytest.mark.parametrize("tokens", [32, 33])
def test_64_slots_and_more(simulator, package, tokens):
    """All lanes of a wave have a slot, and one slot more than that is routed."""
    layer = Layer(simulator, "fp8-row", tokens, 160, 288, experts=512, k=2)
    layer.check(package, layer.run(text((16, 16), "row", xcds=1)))


@pytest.mark.parametrize("kind", ["fp8-row", "fp8-block"])
@pytest.mark.parametrize(
    "tokens, hidden, intermediate", [(2, 8456, 64), (2, 64, 4384), (160, 64, 8352), (2500, 64, 96)]
)
def test_rows_to_fp8(simulator, package, kind, tokens, hidden, intermediate):
    """Of x and of h. Few long ones, which more threads or several workgroups have; many, of which a
    thread keeps a part and reads the rest again; short ones, which share a workgroup. Some are of
    no expert."""
    layer = Layer(simulator, kind, tokens, hidden, intermediate)
    layer.ids[tokens // 2 :, 1] = -1
    layer.check(package, layer.run())


@pytest.mark.parametrize("kind", ["bfloat16", "fp8-row", "fp8-block", "mxfp4"])
def test_interleaved_and_biased(simulator, package, kind):
    layer = Layer(simulator, kind, 40, 256, 288, activation="swigluoai", interleaved=True)
    for name, n in (("bias_gate_up", 576), ("bias_down", 256)):
        layer.experts.scales[name] = torch.randn(3, n)
    for tile in tiles_of(kind):
        layer.check(package, layer.run(text(tile)))


@pytest.mark.parametrize("kind", ["fp8-row", "fp8-block"])
def test_scales_that_are_powers_of_two(simulator, package, kind):
    """Of x, and of h: by a kernel of its own or by the end of each tile."""
    layer = Layer(simulator, kind, 40, 256, 288, scale_fmt="ue8m0")
    for tile in tiles_of(kind):
        layer.check(package, layer.run(text(tile)))


@pytest.mark.parametrize("kind", ["bfloat16", "fp8-block"])
def test_no_bit_depends_on_the_order_of_workgroups_or_tiles(simulator, kind):
    layer = Layer(simulator, kind, 70, 128, 256)
    expected = bits(layer.run(text((64, 128), "row", 2), seed=1))
    for seed, order in enumerate(ORDERS, 2):
        assert torch.equal(bits(layer.run(text((64, 128), order, 2), seed=seed)), expected)


def test_every_candidate_serves(simulator, package):
    layer = Layer(simulator, "fp8-block", 20, 256, 256)
    out = torch.empty(layer.x.shape)
    candidates = simulated.ops.fused_moe_configs(out, *layer.operands()).splitlines()
    assert len(candidates) == len(set(candidates)) > 4
    for config in candidates:
        layer.check(package, layer.run(config))


def test_grouped_gemm_of_other_scales(simulator, package):
    """Scales of a per row beside scales of w per block, and the reverse."""
    for scales in (("row", "block"), ("block", "row")):
        w, scale_w = random_experts(f"fp8-{scales[1]}", 2, 200, 300, simulator)
        a, scale_a = (t[0] for t in random_experts(f"fp8-{scales[0]}", 1, 50, 300, simulator))
        if scales[0] == "block":
            scale_a = torch.rand(50, 3)
        check_grouped(simulator, package, a, w, torch.tensor([20, 50], dtype=torch.int32),
                      scale_a, scale_w)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        "tiled",
        "tiled block_m=96 block_n=128 order=row group_m=1 split_k=1 xcds=1",
        "tiled block_m=64 block_n=128 order=diagonal group_m=1 split_k=1 xcds=1",
        "tiled block_m=64 block_n=128 order=row group_m=0 split_k=1 xcds=1",
        "tiled block_m=64 block_n=128 order=row group_m=1 split_k=9 xcds=1",
        "tiled block_m=64 block_n=128 order=row group_m=1 split_k=1 xcds=0",
        "streamed block_m=64 block_n=32 order=row group_m=1 split_k=1 xcds=1",
        "streamed block_m=8 block_n=16 order=row group_m=1 split_k=1 xcds=1",
        "plain block_m=64 block_n=128 order=row group_m=1 split_k=1 xcds=1",
    ],
)
def test_configs_that_cannot_be(simulator, config):
    with pytest.raises(RuntimeError, match="moe config"):
        Layer(simulator, "fp8-row", 5, 128, 128).run(config)


def test_the_other_dialect_takes_the_plain_design(simulator, package):
    other = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}

    class Foreign:
        device, fp8_dtype = simulator.device, other[simulated.NATIVE]

    layer = Layer(Foreign, "fp8-block", 9, 160, 96)
    out = torch.empty(layer.x.shape)
    assert simulated.ops.fused_moe_configs(out, *layer.operands()).startswith("plain")
    layer.check(package, layer.run())


# Of each model a layer's kind of weights: H, I, E, k, and its activation.
MODELS = {
    "Mixtral-8x7B": ("bfloat16", 4096, 14336, 8, 2, {}),
    "Qwen3-30B-A3B": ("fp8-row", 2048, 768, 128, 8, {}),
    "DeepSeek-V3 TP8": ("fp8-block", 7168, 256, 256, 8, {}),
    "GPT-OSS-20B": ("mxfp4", 2880, 2880, 32, 4, {"activation": "swigluoai", "interleaved": True}),
}


@pytest.mark.parametrize("tokens", [1, 48])
@pytest.mark.parametrize("model", MODELS)
def test_scaled_models(simulator, package, model, tokens):
    """An eighth of H, and of I and E where they are large."""
    kind, hidden, intermediate, experts, k, options = MODELS[model]
    hidden = math.ceil(hidden / 8 / 128) * 128
    intermediate = max(intermediate // 16 // 32 * 32, 128)
    layer = Layer(simulator, kind, tokens, hidden, intermediate, max(experts // 8, k), k, **options)
    layer.check(package, layer.run())


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "DeepSeek-V3 TP8"])
def test_real_models(simulator, package, model, tokens):
    """Whole layers, whose experts are an eighth: what matters is that all sizes are real."""
    kind, hidden, intermediate, experts, k, options = MODELS[model]
    layer = Layer(simulator, kind, tokens, hidden, intermediate, experts // 8, k, **options)
    layer.check(package, layer.run())
