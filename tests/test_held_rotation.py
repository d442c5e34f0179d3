"""A rotation that waits for its attention: the bits of the two, one after the other, on every
backend of --device. NVIDIA's kernel of attention does both; others run them in their order."""

import math
import sys

import pytest
import torch
from compare import bits
from test_attention import FP8
from test_kvcache_append import Case

# The simulator knows the buffers of one op at a time, and nothing waits on AMD.
pytestmark = pytest.mark.not_on("reference", "simulator")


def kvcache(ops):
    """The module of a package that joins."""
    attention = sys.modules[ops.flash_attn_with_kvcache.__module__]
    return sys.modules[attention.rotated_by_attention.__module__]


@pytest.fixture
def joining(backend, monkeypatch):
    """Says whether rotations wait from now on, on the CPU too."""
    module = kvcache(backend.ops)
    return lambda joins: monkeypatch.setattr(module, "_may_join", lambda q: joins)


def same(found, expected):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


SHAPES = {
    "Llama": {"heads": (8, 2), "size": 128, "rotary": 128},
    "seven of a group": {"heads": (7, 1), "size": 64, "rotary": 64},
    "wide": {"heads": (4, 2), "size": 256, "rotary": 64, "rotary_interleaved": True},
    "padded": {"heads": (4, 2), "size": 80, "size_v": 64, "rotary": 32},
    "96": {"heads": (6, 2), "size": 96, "rotary": 96, "rotary_interleaved": True},
    "large": {"heads": (32, 1), "size": 128, "rotary": 128},  # of no kernel that joins
    "odd": {"heads": (4, 2), "size": 72, "rotary": 24},  # likewise
}
SIGHTS = {
    "rows": {},
    "pages, window, sinks": {"page": 16, "window_size": (20, 0)},
    "odd pages, padding": {"page": 7, "causal": True, "softcap": 20.0},
}


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("kv_dtype", [None, FP8[0]], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_appended(backend, joining, shape, kv_dtype, sight):
    options = {"rotary_interleaved": False, **SHAPES[shape], **SIGHTS[sight]}
    if "sinks" in sight:
        options["s_aux"] = torch.randn(options["heads"][0])
    if "padding" in sight:
        options["cache_leftpad"] = torch.tensor([3, 0, 100, 0], dtype=torch.int32)
    case = Case(
        backend, [5, 0, 170, 63], rows=1, kv_dtype=kv_dtype,
        dtype=torch.float16 if shape == "96" else torch.bfloat16, **options,
    )  # fmt: skip
    joining(False)
    expected = [*case.run(), *(b.clone() for b in case.buffers)]
    for buffer, before in zip(case.buffers, case.before, strict=True):
        buffer.copy_(before)
    joining(True)
    assert same([*case.run(), *case.buffers], expected)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8[0]], ids=str)
def test_as_models_call(backend, joining, kv_dtype, norms):
    """q, k and v of one product, turned where they are by angles of each token; places for all
    sequences, of which one has none."""
    ops, device = backend.ops, backend.device
    heads, kv_heads, size, rows, batch = 8, 2, 128, 90, 40
    qkv = torch.randn(batch, 1, heads + 2 * kv_heads, size).bfloat16().to(device)
    angles = torch.rand(batch, 1, size // 2, device=device) * 2 * math.pi
    tables = [torch.cat([t, t], -1).bfloat16() for t in (angles.cos(), angles.sin())]
    # Heads before rows, as transformers has them.
    caches = [
        torch.randn(batch, kv_heads, rows, size).to(kv_dtype).to(device).transpose(1, 2)
        for _ in range(2)
    ]
    ends = torch.randint(1, rows, (batch,), dtype=torch.int32, device=device)
    places = ends.long()[:, None] - 1
    places[3] = -1
    options = {}
    if norms:
        weights = (torch.rand(size, device=device).bfloat16() for _ in range(2))
        options = dict(zip(("q_weight", "k_weight"), weights, strict=True))
    scales = [torch.rand(kv_heads, device=device) + 0.5 for _ in range(2)]
    if kv_dtype not in FP8:
        scales = [None, None]

    def run(joins):
        joining(joins)
        given, written = qkv.clone(), [c.clone(memory_format=torch.preserve_format) for c in caches]
        q, k, v = given.split((heads, kv_heads, kv_heads), 2)
        with kvcache(ops).rotated_by_attention(q):
            ops.rope_and_cache(
                q, k, v, *tables, k_cache=written[0], v_cache=written[1], cache_positions=places,
                k_scale=scales[0], v_scale=scales[1], out=q, **options,
            )  # fmt: skip
            out = ops.flash_attn_with_kvcache(
                q, *written, cache_seqlens=ends, window_size=(-1, 0), k_descale=scales[0],
                v_descale=scales[1],
            )  # fmt: skip
        return q, [out, *written]

    turned, expected = run(False)
    q, found = run(True)
    assert same(found, expected)
    # One kernel leaves the queries alone.
    assert torch.equal(q, qkv[:, :, :heads] if backend.name == "cuda" else turned)
    assert not torch.equal(turned, qkv[:, :, :heads])


def test_another_attention_comes_behind_it(backend, joining):
    """Of other queries, and after an error: nothing is lost, nothing comes too late."""
    ops, device = backend.ops, backend.device
    q = torch.randn(1, 1, 4, 64).bfloat16().to(device)
    other, k, v = (torch.randn(1, 5, n, 64).bfloat16().to(device) for n in (4, 2, 2))
    cos, sin = (torch.rand(1, 1, 32, device=device) for _ in range(2))
    turned = ops.rope_and_cache(q, cos=cos, sin=sin)
    expected = ops.flash_attn_func(other, k, v)
    joining(True)
    with kvcache(ops).rotated_by_attention(q):
        found = ops.rope_and_cache(q, cos=cos, sin=sin)
        assert torch.equal(ops.flash_attn_func(other, k, v), expected)
    assert torch.equal(found, turned)
    with pytest.raises(ZeroDivisionError), kvcache(ops).rotated_by_attention(q):
        raise ZeroDivisionError
    assert torch.equal(ops.rope_and_cache(q, cos=cos, sin=sin), turned)
