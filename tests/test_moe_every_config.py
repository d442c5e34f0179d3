"""Whatever config fused_moe can run on this machine's best backend, in every order of tiles.

test_moe.py has the cases of the config that is chosen, test_moe_configs.py AMD's.
"""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from compare import Guarded, assert_product_close
from test_moe import (
    FP8,
    MX,
    ROUTINGS,
    WEIGHTS,
    Experts,
    allowed_error,
    random_experts,
    random_routing,
)


def configs_of(package, x, experts, weights, ids, **options):
    """What fused_moe can run for these operands, each beside a call that runs it."""
    ops = package.functional.ops
    scales = [experts.scales.get(f"{what}_{name}") for what in ("scale", "bias")
              for name in ("gate_up", "down")]  # fmt: skip
    rest = (options.get("activation", "silu"), math.inf, options.get("interleaved", False),
            options.get("quantize_input", True), options.get("scale_fmt") == "ue8m0")  # fmt: skip
    operands = (x, *experts.weights, weights, ids, *scales, *rest)
    listed = ops.fused_moe_configs(torch.empty_like(x), *operands).splitlines()
    return listed, lambda out, config: ops.fused_moe(out, *operands, config)


def in_every_order(config):
    """A config with tiles, in each order of them."""
    if " order=" not in config or config.startswith("plain"):
        return [config]
    orders = ("row group_m=1", "column group_m=1", "grouped group_m=2")
    if config.startswith("warpgroup"):
        orders += ("expert group_m=1",)
    return [re.sub(r"order=\w+ group_m=\d+", f"order={order}", config) for order in orders]


@pytest.mark.parametrize("tokens", [2, 24, 300])
@pytest.mark.parametrize(
    "kind",
    [
        *WEIGHTS,
        "interleaved and biased",
        "interleaved and biased, blocks",
        "powers of two, rows",
        "powers of two, blocks",
        "16-bit inputs, blocks",
        "16-bit inputs, rows",
        "16-bit inputs, float16",
    ],
)
def test_every_config_in_every_order(best_package, device, kind, tokens):
    """Sizes that no tile divides, rows aligned so that all designs can serve, experts with many
    rows, few and none. A tile that no block takes shows in the poisoned output."""
    options, layout = {}, kind
    if kind.startswith("interleaved and biased"):
        options = {"activation": "swigluoai", "interleaved": True}
        layout = "fp8-block" if kind.endswith("blocks") else MX
    if kind.startswith("powers of two"):
        layout = "fp8-block" if kind.endswith("blocks") else "fp8-row"
        options = {"scale_fmt": "ue8m0"}
    if kind.startswith("16-bit inputs"):
        layout = "fp8-block" if kind.endswith("blocks") else "fp8-row"
        options = {"quantize_input": False}
    maker = SimpleNamespace(device=device, fp8_dtype=best_package.native_fp8_dtype(device))
    dtype = torch.float16 if kind in ("float16", "16-bit inputs, float16") else torch.bfloat16
    experts = Experts(layout, 9, 352, 192, dtype, maker, biases=bool(options.get("interleaved")))
    experts.weights = [w.contiguous() for w in experts.weights]
    x = torch.randn(tokens, 352, device=device).to(dtype)
    weights, ids = random_routing(tokens, 7, 3, maker)
    ids[: tokens // 3] = torch.tensor([1, -1, 9], dtype=torch.int32, device=device)
    exact = best_package.reference.fused_moe(
        x, *experts.weights, weights, ids, **experts.scales, **options, out_dtype=torch.float32
    ).double()
    narrow = layout.startswith(FP8) and options.get("quantize_input", True)
    listed, run = configs_of(best_package, x, experts, weights, ids, **options)
    for config in (text for one in listed for text in in_every_order(one)):
        out, again = (Guarded(tokens, 352, torch.float32, device) for _ in range(2))
        run(out.view, config)
        out.assert_guards_intact()
        run(again.view, config)
        assert torch.equal(out.view, again.view), f"{config}: not the same bits"
        error = out.view.double() - exact
        allowed = allowed_error(narrow, tokens, device)
        assert error.norm() <= allowed * exact.norm(), (config, error.norm() / exact.norm())
        by_row = error.norm(dim=1) - 0.1 * exact.norm(dim=1)
        assert (by_row <= 1e-4 * exact.norm()).all(), (config, by_row)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind.startswith(FP8)])
def test_rows_of_x_anywhere(best_package, gpu, kind, tokens):
    """x whose rows do not begin at vectors gives the bits of one whose rows do, by each config that
    serves both. More slots of an expert than a tile has, ids of no expert."""
    maker = SimpleNamespace(device=gpu, fp8_dtype=best_package.native_fp8_dtype(gpu))
    experts = Experts(kind, 3, 1040, 320, torch.bfloat16, maker)
    experts.weights = [w.contiguous() for w in experts.weights]
    anywhere = torch.randn(tokens, 1043, device=gpu).bfloat16()[:, 1:1041]
    weights, ids = random_routing(tokens, 3, 4, maker)
    ids[-1, :2] = torch.tensor([-1, 3], dtype=torch.int32, device=gpu)
    found = []
    for x in anywhere, anywhere.clone(memory_format=torch.contiguous_format):
        listed, run = configs_of(best_package, x, experts, weights, ids)
        found.append({})
        for config in listed:
            out = torch.full((tokens, 1040), math.nan, device=gpu)
            run(out, config)
            assert out.isfinite().all(), config
            found[-1][config] = out
    odd, aligned = found
    assert set(odd) <= set(aligned)
    for config, out in odd.items():
        assert torch.equal(out, aligned[config]), config
    if torch.version.cuda and torch.cuda.get_device_capability()[0] >= 9:
        assert {config.split()[0] for config in set(aligned) - set(odd)} == {"resident"}


@pytest.mark.parametrize("kind", ["bfloat16", "fp8-block"])
def test_rows_of_x_that_are_one(best_package, gpu, kind):
    """An expanded row has a stride of 0: what gathers tokens must take it as it is."""
    maker = SimpleNamespace(device=gpu, fp8_dtype=best_package.native_fp8_dtype(gpu))
    experts = Experts(kind, 5, 320, 192, torch.bfloat16, maker)
    experts.weights = [w.contiguous() for w in experts.weights]
    x = torch.randn(1, 320, device=gpu).bfloat16().expand(200, 320)
    weights, ids = random_routing(200, 5, 2, maker)
    listed, run = configs_of(best_package, x, experts, weights, ids)
    _, run_copied = configs_of(best_package, x.contiguous(), experts, weights, ids)
    for config in listed:
        out, expected = (Guarded(200, 320, torch.float32, gpu) for _ in range(2))
        run(out.view, config)
        run_copied(expected.view, config)
        assert out.view.isfinite().all() and torch.equal(out.view, expected.view), config


@pytest.mark.parametrize("kind", ["fp8-row", "fp8-block"])
def test_long_rows_and_many_units(best_package, gpu, kind):
    """K that goes through every pipeline's stages several times, in more units than blocks."""
    maker = SimpleNamespace(device=gpu, fp8_dtype=best_package.native_fp8_dtype(gpu))
    experts = Experts(kind, 8, 4096, 2048, torch.bfloat16, maker)
    experts.weights = [w.contiguous() for w in experts.weights]
    x = torch.randn(24, 4096, device=gpu).bfloat16()
    weights, ids = random_routing(24, 8, 2, maker)
    exact = best_package.reference.fused_moe(
        x, *experts.weights, weights, ids, **experts.scales, out_dtype=torch.float32
    ).double()
    listed, run = configs_of(best_package, x, experts, weights, ids)
    for config in listed:
        out, again = (Guarded(24, 4096, torch.float32, gpu) for _ in range(2))
        run(out.view, config)
        out.assert_guards_intact()
        run(again.view, config)
        assert torch.equal(out.view, again.view), f"{config}: not the same bits"
        error = (out.view.double() - exact).norm() / exact.norm()
        assert error <= allowed_error(True, 24, gpu), (config, error)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_config_with_any_routing(best_package, device, routing):
    maker = SimpleNamespace(device=device, fp8_dtype=best_package.native_fp8_dtype(device))
    experts = Experts("fp8-block", 8, 256, 128, torch.bfloat16, maker)
    x = torch.randn(150, 256, device=device).bfloat16()
    ids = ROUTINGS[routing](150, 4).to(torch.int32).to(device)
    weights = torch.rand(150, 4, device=device)
    exact = best_package.reference.fused_moe(
        x, *experts.weights, weights, ids, **experts.scales, out_dtype=torch.float32
    )
    listed, run = configs_of(best_package, x, experts, weights, ids)
    for config in listed:
        out = Guarded(150, 256, torch.float32, device)
        run(out.view, config)
        out.assert_guards_intact()
        assert (out.view - exact).norm() <= allowed_error(True, 150, device) * exact.norm(), config


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "fp8-row", "fp8-block"])
def test_every_config_of_grouped_gemm(best_package, device, kind):
    """Experts with many rows, few, one and none, and rows beyond the last."""
    maker = SimpleNamespace(device=device, fp8_dtype=best_package.native_fp8_dtype(device))
    ops, reference = best_package.functional.ops, best_package.reference
    w, scale = random_experts(kind, 5, 200, 288, maker)
    w, ends = w.contiguous(), [270, 270, 271, 300, 333]
    a = torch.randn(340, 288, device=device).to(w.dtype)
    scale_a = None
    if kind.startswith(FP8):
        scale_a = 0.5 + torch.rand(340, 3 if kind == "fp8-block" else 1, device=device)
    out_dtype = torch.float16 if kind == "float16" else torch.bfloat16
    operands = (a, w, torch.tensor(ends, dtype=torch.int32, device=device), scale_a, scale)
    listed = ops.grouped_gemm_configs(torch.empty(340, 200, dtype=out_dtype, device=device),
                                      *operands).splitlines()  # fmt: skip
    rows = reference.dequantize(a, scale_a, 1)
    for config in (text for one in listed for text in in_every_order(one)):
        out = Guarded(340, 200, out_dtype, device)
        poisoned = out.view.contiguous().view(torch.uint8)
        ops.grouped_gemm(out.view, *operands, config)
        out.assert_guards_intact()
        begin = 0
        for expert, end in enumerate(ends):
            scale_w = None if scale is None else scale[expert]
            one = rows[begin:end], reference.dequantize_expert(w[expert], scale_w)
            if begin < end:
                assert_product_close(out.view[begin:end], one[0] @ one[1].t(), one)
            begin = end
        beyond = out.view[begin:].contiguous().view(torch.uint8)
        assert torch.equal(beyond, poisoned[begin:]), config
