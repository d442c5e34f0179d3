"""Computed scales that are powers of two, ``scale_fmt="ue8m0"``, on every backend of --device."""

import itertools
import math

import pytest
import torch
from compare import assert_product_close, bits, strided
from hypothesis import given
from hypothesis import strategies as st
from test_moe import Experts, check, random_routing
from test_properties import SETTINGS, fp8_dtypes
from tiny_models import quantizing_inputs, tiny_llama, tokens
from transformers.integrations.finegrained_fp8 import FP8Linear

FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SMALLEST = 2.0**-126
UE8M0 = {"scale_fmt": "ue8m0"}


def assert_least(scale, amax, largest):
    """Each scale is the least power of two by which amax lies within FP8: in float64, exactly."""
    scale, amax = scale.double().cpu(), amax.double().cpu()
    assert (scale.frexp().mantissa == 0.5).all()
    assert (amax <= largest * scale).all(), "saturates"
    assert ((amax > largest * scale / 2) | (scale == SMALLEST)).all(), "not the least"


def next_power_of_two(scale):
    """By float64's logarithm, which is exact where it has to be."""
    return torch.exp2(scale.double().cpu().log2().ceil()).float()


QUANTIZING = {
    "quantize_fp8": lambda ops, x, **how: ops.quantize_fp8(x, **how),
    "swiglu_fp8": lambda ops, x, **how: ops.swiglu_fp8(x, x.flip(0), **how),
    "rmsnorm_fp8": lambda ops, x, **how: ops.rmsnorm_fp8(x, x[0] + 1, **how),
}


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", QUANTIZING)
def test_scales_are_rounded_up(backend, name, dtype, group_size, fp8_dtype):
    """Of rows that kernels hold and rows that they read again, whole vectors and parts of them."""
    how = {"group_size": group_size, "fp8_dtype": fp8_dtype}
    for rows, columns, bound in itertools.product((1, 5), (3, 128, 577, 4096, 36869), (None, 1.5)):
        x = strided(rows, columns, dtype, backend.device)
        x = x * 2.0 ** torch.arange(-2, 3, device=x.device)[:rows, None]
        x = x.to(dtype)
        quantize = QUANTIZING[name]
        _, plain = quantize(backend.ops, x, scale_ub=bound, **how)
        q, scale = quantize(backend.ops, x, scale_ub=bound, **how, **UE8M0)
        assert torch.equal(scale.cpu(), next_power_of_two(plain))
        assert q.dtype == fp8_dtype and not q.float().isnan().any()
        if name == "quantize_fp8":
            width = columns if group_size is None else group_size
            full = scale.repeat_interleave(width, -1)[:, :columns]
            largest = torch.finfo(fp8_dtype).max
            exact = (x.float() / full).clamp(-largest, largest).to(fp8_dtype)
            assert torch.equal(bits(q), bits(exact))


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_where_scales_double(backend, fp8_dtype):
    """Rows whose largest magnitude is what FP8 can hold at a power of two, and its neighbours."""
    largest = torch.finfo(fp8_dtype).max
    exact = largest * 2.0 ** torch.arange(-100, 101, 4, dtype=torch.float32)
    below, above = (exact.nextafter(torch.tensor(end)) for end in (0.0, math.inf))
    amax = torch.stack([below, exact, above], 1).flatten()
    x = torch.rand(amax.numel(), 200).sub(0.5) * amax[:, None]
    x[:, 7] = -amax
    q, scale = backend.ops.quantize_fp8(x.to(backend.device), fp8_dtype=fp8_dtype, **UE8M0)
    assert_least(scale[:, 0], amax, largest)
    # One value of the row says that nothing has saturated: it is rounded, like all others.
    assert torch.equal(scale[:, 0].cpu()[0::3], scale[:, 0].cpu()[1::3])
    assert torch.equal(scale[:, 0].cpu()[2::3], 2 * scale[:, 0].cpu()[1::3])
    assert torch.equal(q[1::3, 7].float().cpu(), torch.full_like(exact, -largest))


@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_rows_that_are_not_finite_and_tiny_ones(backend, package, fp8_dtype, group_size):
    x = torch.randn(7, 130, device=backend.device)
    x[1], x[2, 3], x[3, 4], x[4, 5] = 0, math.nan, math.inf, -math.inf
    x[5] = math.nan
    x[6] *= 1e-40
    how = {"fp8_dtype": fp8_dtype, "group_size": group_size, **UE8M0}
    q, scale = backend.ops.quantize_fp8(x, **how)
    assert torch.equal(q.float().isnan(), x.isnan())
    assert (scale[[1, 5, 6]] == SMALLEST).all()
    # Infinity counts as the largest float, so that the row's finite numbers are not lost.
    infinite = 2.0**120 if fp8_dtype == torch.float8_e4m3fn else 2.0**121
    assert (scale[3:5, 0] == infinite).all()
    _, without_nan = backend.ops.quantize_fp8(x[2:3].nan_to_num(0), **how)
    assert torch.equal(scale[2], without_nan[0])
    expected = package.reference.quantize_fp8(x.cpu(), **how)
    assert torch.equal(scale.cpu(), expected[1])
    kept = ~x.isnan().cpu()
    assert torch.equal(bits(q).cpu()[kept], bits(expected[0])[kept])


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_a_bound_comes_before_the_rounding(backend, fp8_dtype):
    largest = torch.finfo(fp8_dtype).max
    x = torch.tensor([[10.0, -900.0], [10.0, 4.0]], device=backend.device)
    q, scale = backend.ops.quantize_fp8(x, scale_ub=100.0, fp8_dtype=fp8_dtype, **UE8M0)
    assert_least(scale[:, 0], torch.tensor([100.0, 10.0]), largest)
    assert q[0, 1].float() == -largest  # beyond what the bound's scale reaches


def test_empty_rows(backend):
    q, scale = backend.ops.quantize_fp8(torch.empty(3, 0, device=backend.device), **UE8M0)
    assert q.shape == (3, 0) and (scale == SMALLEST).all()


def test_the_bits_are_those_of_others(backend):
    """DeepSeek's ``act_quant`` (DeepSeek-V3, inference/kernel.py) and vLLM's
    ``per_token_group_quant_fp8`` with ``use_ue8m0``: ``2 ** ceil(log2(amax / 448))`` of at least
    1e-4 and 1e-10, and a division."""
    x = torch.randn(64, 1024, device=backend.device) * torch.logspace(-3, 4, 64)[:, None].to(
        backend.device
    )
    x = x.bfloat16()
    groups = x.float().unflatten(-1, (-1, 128))
    for smallest_amax in (1e-4, 1e-10):
        amax = groups.abs().amax(-1).clamp(min=smallest_amax)
        scale = next_power_of_two(amax / torch.full_like(amax, 448)).to(x.device)
        q = (groups / scale[..., None]).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
        ours = backend.ops.quantize_fp8(x, group_size=128, fp8_dtype=torch.float8_e4m3fn, **UE8M0)
        assert torch.equal(ours[1], scale) and torch.equal(bits(ours[0]), bits(q))


@SETTINGS
@given(st.floats(0, 2.0**127, width=32), fp8_dtypes, st.sampled_from([None, 128]))
def test_any_magnitude(best_package, device, amax, fp8_dtype, group_size):
    x = torch.tensor([[-amax, amax / 3, amax / 1000]], device=device)
    how = {"group_size": group_size, "fp8_dtype": fp8_dtype, **UE8M0}
    q, scale = best_package.quantize_fp8(x, **how)
    assert_least(scale, x.abs().amax(-1, keepdim=True), torch.finfo(fp8_dtype).max)
    assert torch.equal(q.float().double() * scale.double(), rounded(x, scale, fp8_dtype))


def rounded(x, scale, fp8_dtype):
    return (x.double() / scale.double()).to(fp8_dtype).double() * scale.double()


# ---- What quantises inside


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("rows", [3, 100])
def test_fp8_linear(backend, package, granularity, rows):
    n, k, dtype = 256, 640, backend.fp8_dtype
    x = torch.randn(rows, k, device=backend.device).bfloat16()
    w = torch.randn(n, k, device=backend.device).to(dtype)
    shape = (n, 1) if granularity == "row" else (2, 5)
    scale_w = torch.rand(shape, device=backend.device) + 0.5
    out = backend.ops.fp8_linear(x, w, scale_w, out_dtype=torch.float32, **UE8M0)
    group_size = None if granularity == "row" else 128
    q, scale = package.reference.quantize_fp8(x, group_size=group_size, fp8_dtype=dtype, **UE8M0)
    operands = (package.reference.dequantize(q, scale, 1),
                package.reference.dequantize(w, scale_w, 128))  # fmt: skip
    assert_product_close(out, operands[0] @ operands[1].t(), operands)


@pytest.mark.parametrize("tokens", [1, 5, 60])
@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-row", "fp8-block"])
def test_fused_moe(backend, package, kind, tokens):
    """Also that it is another result than without: x and h are rounded at other places."""
    experts = Experts(kind, 4, 384, 256, torch.bfloat16, backend)
    x = strided(tokens, 384, torch.bfloat16, backend.device)
    weights, ids = random_routing(tokens, 4, 2, backend)
    check(backend, package, x, experts, weights, ids, **UE8M0)
    operands = (x, *experts.weights, weights, ids)
    plain = backend.ops.fused_moe(*operands, **experts.scales)
    assert not torch.equal(plain, backend.ops.fused_moe(*operands, **experts.scales, **UE8M0))


# ---- Scales of weights in UE8M0


def e8m0(*shape, device):
    exponents = torch.randint(120, 134, shape, dtype=torch.uint8, device=device)
    return exponents.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("shape", [(1,), (256, 1), (2, 3)], ids=["tensor", "row", "block"])
def test_scales_of_weights_may_have_its_dtype(backend, shape):
    dtype, device, ops = backend.fp8_dtype, backend.device, backend.ops
    a, w = (torch.randn(n, 384, device=device) for n in (4, 256))
    scale = e8m0(*shape, device=device)
    quantized = (a.to(dtype), w.to(dtype), torch.ones(1, device=device))
    for product in ops.gemm, ops.skinny_gemm:
        assert torch.equal(product(*quantized, scale), product(*quantized, scale.float()))
    given = (a.bfloat16(), w.to(dtype))
    assert torch.equal(ops.fp8_linear(*given, scale), ops.fp8_linear(*given, scale.float()))


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_scales_of_experts_may_have_its_dtype(backend, granularity):
    experts = Experts(f"fp8-{granularity}", 3, 256, 128, torch.bfloat16, backend)
    x = strided(5, 256, torch.bfloat16, backend.device)
    weights, ids = random_routing(5, 3, 2, backend)
    operands = (x, *experts.weights, weights, ids)
    scales = {n: e8m0(*s.shape, device=s.device) for n, s in experts.scales.items()}
    wide = {name: scale.float() for name, scale in scales.items()}
    assert torch.equal(
        backend.ops.fused_moe(*operands, **scales), backend.ops.fused_moe(*operands, **wide)
    )
    offsets = torch.tensor([1, 1, 5], dtype=torch.int32, device=x.device)
    grouped = (x, experts.weights[0], offsets, None)
    one = backend.ops.grouped_gemm(*grouped, scales["scale_gate_up"])
    assert torch.equal(one, backend.ops.grouped_gemm(*grouped, wide["scale_gate_up"]))


# ---- Errors


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


ONE = torch.ones(1)
GIVEN = "scale_fmt is for scales that are computed, got one that is given"
WORD = "scale_fmt must be None or 'ue8m0', got 'float'"
REFUSED = {
    "static": (lambda p: p.quantize_fp8(torch.ones(2, 8), scale=ONE, **UE8M0), GIVEN),
    "static norm": (lambda p: p.rmsnorm_fp8(torch.ones(2, 8), ONE, scale=ONE, **UE8M0), GIVEN),
    "static activation": (lambda p: p.swiglu_fp8(torch.ones(2, 8), scale=ONE, **UE8M0), GIVEN),
    "static linear": (
        lambda p: p.fp8_linear(torch.ones(2, 8), fp8(4, 8), ONE, scale_x=ONE, **UE8M0), GIVEN),
    "word": (lambda p: p.quantize_fp8(torch.ones(2, 8), scale_fmt="float"), WORD),
    "FP8 input": (
        lambda p: p.fp8_linear(fp8(2, 8), fp8(4, 8), ONE, **UE8M0),
        "scale_fmt is for an x to quantise, got one of torch.float8_e4m3fn"),
    "static layer": (
        lambda p: p.models.FP8Linear(fp8(4, 8), ONE, None, "static", activation_scale=ONE, **UE8M0),
        "scale_fmt is for scales that are computed, with activation_scheme 'dynamic', got 'ue8m0'"),
    "weight-only layer": (
        lambda p: p.models.FP8Linear(fp8(4, 8), ONE, None, "none", **UE8M0), "and 'none'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_computed_scales_is_refused(package, case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(package)


@pytest.mark.parametrize("quantize_input", [False, True])
def test_experts_whose_inputs_are_not_quantised_are_refused(package, quantize_input):
    w = [torch.randn(s).bfloat16() for s in ((2, 32, 64), (2, 64, 16))]
    w = w if quantize_input else [one.to(torch.float8_e4m3fn) for one in w]
    routing = torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    options = {"quantize_input": quantize_input, **UE8M0}
    with pytest.raises(RuntimeError, match="ue8m0 is for inputs that are quantised: FP8 weights"):
        package.fused_moe(torch.randn(3, 64).bfloat16(), *w, *routing, **options)


def test_the_ops_refuse_it_without_computed_scales(package):
    x, ops = torch.randn(2, 8), package.functional.ops
    message = "ue8m0 is for computed scales, got none to write"
    with pytest.raises(RuntimeError, match=message):
        ops.swiglu_fp8(torch.empty_like(x), None, x, None, None, "identity", 0, 0.0, True)
    with pytest.raises(RuntimeError, match=message):
        ops.rmsnorm_fp8(fp8(2, 8), None, x, None, x[0], ONE, 1e-6, 0, 0.0, True)


# ---- Layers


def test_linears_that_differ_are_not_joined(package):
    model = tiny_llama()
    quantize = package.models.quantize_model_
    quantize(model, activations="dynamic", fuse=False)
    first, second = model.model.layers
    for linear in (first.mlp.gate_proj, *linears_of(package, second)):
        linear.scale_fmt = "ue8m0"
    fused = quantize(model).fused
    assert "model.layers.0.mlp.gate_up_proj" not in fused and len(fused) == 3
    qkv = second.self_attn.qkv_proj
    assert qkv.scale_fmt == second.self_attn.q_proj.scale_fmt == "ue8m0"
    assert first.self_attn.qkv_proj.scale_fmt is None


def linears_of(package, module):
    return [m for m in module.modules() if isinstance(m, package.models.FP8Linear)]


@pytest.mark.parametrize("fuse", [True, False])
@torch.no_grad()
def test_a_kernelized_model_quantises_so(best_package, run_kernelized, device, fuse):
    """Norms, gated MLPs and linears: each input that is quantised has such scales."""
    model = tiny_llama()
    best_package.models.quantize_model_(model, activations="dynamic", fuse=False)
    for linear in linears_of(best_package, model):
        linear.scale_fmt = "ue8m0"
    if fuse:
        assert len(best_package.models.quantize_model_(model).fused) == 4
    ids = tokens(2, 9)
    exact = model(ids).logits
    expected = quantizing_inputs(best_package, model)(ids).logits
    run_kernelized(model)
    actual = model(ids.to(device)).logits.cpu()
    assert (actual - expected).abs().mean() < 0.1 * (expected - exact).abs().mean()


def test_transformers_own_linear_says_it_by_its_scales(package):
    """It keeps no scale_fmt; the weight's scales have the dtype."""
    linear = FP8Linear(256, 128, block_size=(128, 128), scale_fmt="ue8m0").requires_grad_(False)
    linear.weight.data = fp8(128, 256)
    linear.weight_scale_inv.data = e8m0(1, 2, device="cpu")
    x = torch.randn(3, 256)
    layer = package.layers.FP8Linear.forward.__get__(linear.eval())
    wide = linear.weight_scale_inv.float()
    assert torch.equal(layer(x), package.fp8_linear(x, linear.weight, wide, **UE8M0))
    assert not torch.equal(layer(x), package.fp8_linear(x, linear.weight, wide))
    model = torch.nn.ModuleDict({"linear": linear})
    package.models.quantize_model_(model)
    assert model["linear"].scale_fmt == "ue8m0" and "scale_fmt='ue8m0'" in repr(model)
    assert torch.equal(model["linear"].weight_scale_inv, wide)
