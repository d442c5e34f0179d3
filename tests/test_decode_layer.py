"""decode_layer, what lies between two attentions as one kernel: the bits of the launches that it
stands for, whatever the order in which its workgroups run, launch after launch."""

import pytest
import torch
from compare import Guarded, assert_close, bits

simulated = pytest.importorskip("simulated")
from simulated_layer import Attention, random_layer  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

CPU = torch.device("cpu")
# The order in which decode_layer adds up.
IN_ORDER = ("register_pipeline block_n=16 waves=8 split_k=1 workgroups=0 xcds=1 producers=0 "
            "sparse=0")  # fmt: skip


def one_by_one(layer, x, residual):
    """out and qkv by the ops."""
    kernels = simulated.functional()
    options = {"weight_offset": layer.weight_offset}

    def product(a, scale_a, weight):
        out = torch.empty(1, len(weight.w), dtype=x.dtype)
        scale = weight.scale[:, None] if weight.scale.numel() > 1 else weight.scale
        simulated.ops.gemm(out, a, weight.w, scale_a, scale, None, IN_ORDER)
        return out

    x, h = x[None], residual.clone()[None]
    if layer.o is not None:
        x = product(*kernels.quantize_fp8(x), layer.o)
    a = kernels.rmsnorm_fp8(x, layer.norm, layer.eps, h, **options)
    out = h + product(*kernels.swiglu_fp8(product(*a, layer.gate_up)), layer.down)
    if layer.qkv is None:
        return out[0], None
    a = kernels.rmsnorm_fp8(out, layer.next_norm, layer.eps, **options)
    return out[0], product(*a, layer.qkv)[0]


# Tiles for some workgroups only, more than one for some, K that eight waves do not divide evenly.
# Hidden sizes whose norm the op takes with as many threads: its sum has the same order.
@pytest.mark.parametrize("hidden, intermediate, dtype, options", [
    (2048, 2560, torch.bfloat16, {}),
    (4096, 1152, torch.float16, {"scale_a_row": False, "attended": 1024}),
    (3456, 1024, torch.bfloat16, {"qkv": 1040}),
    (2048, 1024, torch.bfloat16, {"attended": 2176, "qkv": 3072}),
])  # fmt: skip
def test_bits_of_the_ops(hidden, intermediate, dtype, options):
    layer = random_layer(hidden, intermediate, dtype, **options)
    x = torch.randn(options.get("attended", hidden)).to(dtype)
    residual = torch.randn(hidden).to(dtype)
    out = Guarded(1, hidden, dtype, CPU)
    qkv = Guarded(1, options.get("qkv", 1), dtype, CPU)
    layer.launch(x, residual, out.view[0], layer.state(), qkv.view[0])
    out.assert_guards_intact()
    qkv.assert_guards_intact()
    expected = one_by_one(layer, x, residual)
    assert torch.equal(bits(out.view[0]), bits(expected[0]))
    if layer.qkv is not None:
        assert torch.equal(bits(qkv.view[0]), bits(expected[1]))


@pytest.mark.parametrize("heads, kv_heads, position, dtype", [
    (8, 2, 0, torch.bfloat16), (16, 2, 3, torch.float16), (8, 8, 700, torch.bfloat16),
])  # fmt: skip
def test_attention_of_the_token(heads, kv_heads, position, dtype):
    """No key but its own, fewer keys than waves, many; groups of 1, 4 and 8 heads. As the ops up to
    their roundings."""
    kernels = simulated.functional()
    layer = random_layer(1024, 1024, dtype, attended=128 * heads, qkv=1024)
    caches = torch.randn(2, position + 3, kv_heads, 128).to(dtype)
    caches[:, position:] = float("nan")
    angles = torch.randn(64).repeat(2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    place = torch.tensor([position], dtype=torch.int32)
    layer.attention = Attention(*caches.clone(), cos, sin, place, heads)
    x, residual = torch.randn((heads + 2 * kv_heads) * 128).to(dtype), torch.randn(1024).to(dtype)
    out, qkv = torch.empty(2, 1024).to(dtype)
    layer.launch(x, residual, out, layer.state(), qkv)

    q, k, v = x.view(1, 1, -1, 128).split((heads, kv_heads, kv_heads), 2)
    k_cache, v_cache = caches.clone()[:, None]
    q = kernels.rope_and_cache(
        q, k, v, cos[None], sin[None], k_cache=k_cache, v_cache=v_cache, cache_positions=place
    )
    attended = kernels.flash_attn_func(q, k_cache[:, : position + 1], v_cache[:, : position + 1])
    for ours, its in ((layer.attention.k_cache, k_cache[0]), (layer.attention.v_cache, v_cache[0])):
        assert_close(ours[position], its[position])
        others = torch.arange(len(its)) != position
        assert torch.equal(bits(ours[others]), bits(its[others]))
    layer.attention = None
    expected = one_by_one(layer, attended.reshape(-1), residual)
    torch.testing.assert_close(out, expected[0], rtol=3e-2, atol=6e-2)
    torch.testing.assert_close(qkv, expected[1], rtol=3e-2, atol=1e-1)


@pytest.mark.parametrize("hidden, intermediate", [(5120, 1024), (1024, 16512)])
def test_long_rows_and_an_offset(hidden, intermediate):
    """Where the norm's sum has another order than the op's: a few codes differ by a step. Of down
    more tiles than compute units; of y more than the helpers load at once."""
    layer = random_layer(hidden, intermediate, torch.bfloat16, weight_offset=1.0)
    x, residual = torch.randn(2, hidden).bfloat16()
    expected, _ = one_by_one(layer, x, residual)
    layer.launch(x, residual, residual, layer.state())
    torch.testing.assert_close(residual, expected, rtol=2e-2, atol=2e-2)


def test_launch_after_launch_in_any_order():
    """One state for all, as a graph that is replayed has, and the residual in place."""
    layer = random_layer(1024, 1024, torch.bfloat16, attended=1024, qkv=1024)
    state = layer.state()
    x, residual = torch.randn(2, 1024).bfloat16()
    expected = one_by_one(layer, x, residual)
    found = []
    for seed in range(3):
        h, qkv = residual.clone(), torch.empty_like(x)
        layer.launch(x, h, h, state, qkv, seed=seed)
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
    layer = random_layer(hidden, intermediate, torch.bfloat16, **options)
    x = torch.randn(max(hidden, intermediate)).bfloat16()
    out = torch.full((hidden,), 7).bfloat16()
    with pytest.raises(RuntimeError, match=says):
        layer.launch(x, x.clone(), out, layer.state(), torch.empty_like(x))
    assert (out == 7).all()
