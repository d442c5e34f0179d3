"""decode_layers on the simulator: the bits of the launches that it stands for, but for its
attention, whatever the order in which its workgroups run, launch after launch."""

import dataclasses

import pytest
import torch
from compare import Guarded, assert_near, bits

simulated = pytest.importorskip("simulated")
from simulated_layers import Attention, random_stack  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

CPU = torch.device("cpu")
# The order in which decode_layers adds up.
IN_ORDER = ("register_pipeline block_n=16 waves=8 split_k=1 workgroups=0 xcds=1 producers=0 "
            "sparse=0")  # fmt: skip


def one_by_one(stack, x, residual):
    """out and qkv by the ops."""
    kernels = simulated.functional()
    options = {"weight_offset": stack.weight_offset}

    def product(a, scale_a, weight, bias=None):
        out = torch.empty(1, len(weight.w), dtype=x.dtype)
        scale = weight.scale[:, None] if weight.scale.numel() > 1 else weight.scale
        simulated.ops.gemm(out, a, weight.w, scale_a, scale, bias, IN_ORDER)
        return out

    x, out = x[None], residual.clone()[None]
    for layer in stack.layers:
        h = out
        if stack.attention is not None:
            x = attended(stack, layer, x)
        if layer.o is not None:
            x = product(*kernels.quantize_fp8(x), layer.o)
        a = kernels.rmsnorm_fp8(x, layer.norm, stack.eps, h, **options)
        out = h + product(*kernels.swiglu_fp8(product(*a, layer.gate_up)), layer.down)
        if layer.qkv is None:
            return out[0], None
        a = kernels.rmsnorm_fp8(out, layer.next_norm, stack.eps, **options)
        x = product(*a, layer.qkv, layer.qkv_bias)
    return out[0], x[0]


def attended(stack, layer, qkv):
    """And the new row in the layer's caches."""
    kernels, attention = simulated.functional(), stack.attention
    heads, kv_heads = attention.heads, layer.k_cache.shape[1]
    q, k, v = qkv.view(1, 1, -1, 128).split((heads, kv_heads, kv_heads), 2)
    k_cache, v_cache = layer.k_cache[None], layer.v_cache[None]
    q = kernels.rope_and_cache(
        q, k, v, attention.cos[None], attention.sin[None], k_cache=k_cache, v_cache=v_cache,
        cache_positions=attention.position, k_scale=layer.k_scale, v_scale=layer.v_scale,
        q_weight=layer.q_norm, k_weight=layer.k_norm, eps=stack.eps,
        weight_offset=stack.weight_offset,
    )  # fmt: skip
    rows = int(attention.position) + 1
    out = kernels.flash_attn_func(
        q, k_cache[:, :rows], v_cache[:, :rows], k_descale=layer.k_scale, v_descale=layer.v_scale
    )
    return out.reshape(1, -1)


def give_attention(stack, heads, kv_heads, position, dtype, scales=None, norms=False):
    """Caches that have no number where nothing may be read. scales: of FP8 caches, how many; norms:
    of heads."""
    angles = torch.randn(64).repeat(2)
    place = torch.tensor([position], dtype=torch.int32)
    stack.attention = Attention(angles.cos().to(dtype), angles.sin().to(dtype), place, heads)
    for layer in stack.layers:
        caches = torch.randn(2, position + 3, kv_heads, 128)
        caches[:, position:] = float("nan")
        layer.k_cache, layer.v_cache = caches.to(dtype if scales is None else simulated.NATIVE)
        if norms:
            layer.q_norm, layer.k_norm = torch.randn(2, 128).to(dtype)
        if scales:
            layer.k_scale, layer.v_scale = torch.rand(2, scales) + torch.tensor([[0.5], [1.5]])


def with_own_caches(stack):
    layers = [
        dataclasses.replace(layer, k_cache=layer.k_cache.clone(), v_cache=layer.v_cache.clone())
        for layer in stack.layers
    ]
    return dataclasses.replace(stack, layers=layers)


# Tiles for some workgroups only, more than one for some, with a bias too, K that eight waves do not
# divide evenly. Hidden sizes whose norm the op takes with as many threads: its sum has the same
# order.
@pytest.mark.parametrize("hidden, intermediate, dtype, options", [
    pytest.param(2048, 2560, torch.bfloat16, {}, marks=pytest.mark.slow),
    (4096, 1152, torch.float16, {"scale_a_row": False, "attended": 1024}),
    (3456, 1024, torch.bfloat16, {"qkv": 1040}),
    pytest.param(
        2048, 1024, torch.bfloat16, {"attended": 2176, "qkv": 5120, "bias": True},
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_bits_of_the_ops(hidden, intermediate, dtype, options):
    options, has_bias = dict(options), "bias" in options
    options.pop("bias", None)
    stack = random_stack(hidden, intermediate, dtype, **options)
    if has_bias:
        stack.layers[0].qkv_bias = torch.randn(options["qkv"]).to(dtype)
    x = torch.randn(options.get("attended", hidden)).to(dtype)
    residual = torch.randn(hidden).to(dtype)
    out = Guarded(1, hidden, dtype, CPU)
    qkv = Guarded(1, options.get("qkv", 1), dtype, CPU)
    stack.launch(x, residual, out.view[0], stack.state(), qkv.view[0])
    out.assert_guards_intact()
    qkv.assert_guards_intact()
    expected = one_by_one(stack, x, residual)
    assert torch.equal(bits(out.view[0]), bits(expected[0]))
    if expected[1] is not None:
        assert torch.equal(bits(qkv.view[0]), bits(expected[1]))


# No key but its own, fewer keys than waves, many; groups of 1, 4 and 8 heads. In a stack, whose
# second layer takes what the first one's last product left, with qkv and the residual in place.
# Caches in FP8 have no scales, one, or one a KV head. Heads have norms, and qkv a bias, or not.
@pytest.mark.parametrize("heads, kv_heads, position, layers, dtype, scales, norms", [
    (8, 2, 0, 1, torch.bfloat16, None, False), (16, 2, 3, 1, torch.float16, None, False),
    pytest.param(8, 8, 700, 1, torch.bfloat16, None, True, marks=pytest.mark.slow),
    pytest.param(8, 2, 70, 2, torch.bfloat16, None, True, marks=pytest.mark.slow),
    (8, 2, 70, 2, torch.bfloat16, 2, False), (16, 2, 90, 1, torch.float16, 1, True),
    (8, 2, 0, 1, torch.bfloat16, 0, False),
])  # fmt: skip
def test_attention_of_the_token(heads, kv_heads, position, layers, dtype, scales, norms):
    """As the ops up to their roundings."""
    columns = (heads + 2 * kv_heads) * 128
    stack = random_stack(1024, 1024, dtype, attended=128 * heads, qkv=columns, layers=layers)
    give_attention(stack, heads, kv_heads, position, dtype, scales, norms)
    if norms:
        stack.weight_offset = 1.0
        for layer in stack.layers:
            layer.qkv_bias = torch.randn(columns).to(dtype)
    if layers > 1:
        stack.layers[-1].qkv = stack.layers[-1].next_norm = None  # a model's last
    qkv, residual = torch.randn(columns).to(dtype), torch.randn(1024).to(dtype)
    ops = with_own_caches(stack)
    expected = one_by_one(ops, qkv, residual)
    stack.launch(qkv, residual, residual, stack.state(), qkv)
    for ours, its in zip(stack.layers, ops.layers, strict=True):
        for name in ("k_cache", "v_cache"):
            found, right = getattr(ours, name), getattr(its, name)
            assert_near(found[position], right[position])
            others = torch.arange(len(right)) != position
            assert torch.equal(bits(found[others]), bits(right[others]))
    assert_near(residual, expected[0])
    if layers == 1:
        assert_near(qkv, expected[1])


@pytest.mark.parametrize(
    "hidden, intermediate", [(5120, 1024), pytest.param(1024, 16512, marks=pytest.mark.slow)]
)
def test_long_rows_and_an_offset(hidden, intermediate):
    """Where the norm's sum has another order than the op's: a few codes differ by a step. Of down
    more tiles than compute units; of y more than the helpers load at once."""
    stack = random_stack(hidden, intermediate, torch.bfloat16, weight_offset=1.0)
    x, residual = torch.randn(2, hidden).bfloat16()
    expected, _ = one_by_one(stack, x, residual)
    stack.launch(x, residual, residual, stack.state())
    torch.testing.assert_close(residual, expected, rtol=2e-2, atol=2e-2)


def test_launch_after_launch_in_any_order():
    """One state for all, as a graph that is replayed has, and the residual in place; the last one
    by a graph."""
    stack = random_stack(1024, 1024, torch.bfloat16, attended=1024, qkv=1024)
    state = stack.state()
    x, residual = torch.randn(2, 1024).bfloat16()
    expected = one_by_one(stack, x, residual)
    found = []
    for seed in range(3):
        h, qkv = residual.clone(), torch.empty_like(x)
        stack.launch(x, h, h, state, qkv, seed=seed, recorded=seed == 2)
        torch.testing.assert_close(h, expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(qkv, expected[1], rtol=5e-2, atol=5e-2)
        found.append(torch.cat([bits(h), bits(qkv)]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("hidden, intermediate, options, says", [
    (1000, 1024, {}, "hidden must be a multiple of 128, from 1024 to 8192"),
    (1024, 1000, {}, "intermediate must be a multiple of 128, from 1024 on"),
    (1024, 65536, {}, "exceeds what LDS holds"),
    (1024, 1024, {"attended": 960}, "attended must have a multiple of 128 columns"),
    (1024, 1024, {"qkv": 1000}, "w_qkv must have a multiple of 16 rows"),
])  # fmt: skip
def test_refusals(hidden, intermediate, options, says):
    stack = random_stack(hidden, intermediate, torch.bfloat16, **options)
    x = torch.randn(max(hidden, intermediate)).bfloat16()
    out = torch.full((hidden,), 7).bfloat16()
    with pytest.raises(RuntimeError, match=says):
        stack.launch(x, x.clone(), out, stack.state(), torch.empty_like(x))
    assert (out == 7).all()
