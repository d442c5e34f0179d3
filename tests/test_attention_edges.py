"""Attention at the edges of what callers give it, on every backend of --device: numbers that are
none, rows of no sequence, no sequences at all, pages and scales that name no place."""

import math
import sys

import pytest
import torch

pytestmark = pytest.mark.not_on("reference")

HEADS, KV_HEADS, KEYS, SIZE = 4, 2, 100, 64
CACHE_SIZE = 8


def inputs(backend, rows, fp8=False):
    q = torch.randn(1, rows, HEADS, SIZE).bfloat16()
    k, v = torch.randn(2, 1, KEYS, KV_HEADS, SIZE).to(backend.fp8_dtype if fp8 else q.dtype)
    return q, k, v


@pytest.fixture
def each_config(backend, monkeypatch):
    """``each_config(q, k, v, **told)``: goes through the configs of a call, by which the functions
    run meanwhile; on the simulator, which is slow, through one of each design."""
    module = sys.modules[backend.ops.flash_attn_func.__module__]
    native = module._attention

    def configs(q, k, v, **told):
        listed = backend.ops.attention_configs(q, k, v, **told)
        if backend.name == "simulator":
            listed = {config.split()[0]: config for config in listed}.values()
        for config in listed:
            monkeypatch.setattr(module, "_attention", lambda *a, c=config: native(*a[:-1], c))
            yield config
        monkeypatch.setattr(module, "_attention", native)

    return configs


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("where", ["q", "k", "s_aux", "softmax_scale"])
def test_nan_is_told(backend, each_config, fp8, rows, softcap, where):
    """By out and by lse, of the rows and heads that it concerns, and of no other."""
    q, k, v = inputs(backend, rows, fp8)
    options, concerned = {}, torch.zeros(rows, HEADS, dtype=torch.bool)
    if where == "q":
        q[0, -1, 1, 5], concerned[-1, 1] = math.nan, True
    elif where == "k":
        k.view(torch.uint8 if fp8 else k.dtype)[0, 7, 0, 5] = (
            torch.tensor(math.nan).to(k.dtype).view(torch.uint8) if fp8 else math.nan
        )
        concerned[:, : HEADS // KV_HEADS] = True
    elif where == "s_aux":
        options["s_aux"] = torch.zeros(HEADS)
        options["s_aux"][2], concerned[:, 2] = math.nan, True
    else:
        options["softmax_scale"], concerned[:] = math.nan, True
    q, k, v = (t.to(backend.device) for t in (q, k, v))
    if "s_aux" in options:
        options["s_aux"] = options["s_aux"].to(backend.device)
    options.update(softcap=softcap, return_lse=True)
    for config in each_config(q, k, v):
        out, lse = backend.ops.flash_attn_func(q, k, v, **options)
        assert torch.equal(out.isnan().any(-1)[0].cpu(), concerned), config
        assert torch.equal(lse.isnan()[0].T.cpu(), concerned), config
        assert out.isfinite().all(-1)[0].cpu()[~concerned].all(), config


@pytest.mark.parametrize("largest", [2.0**126, 2.0**127, 3e38])
def test_the_greatest_queries_beside_fp8_keys(backend, each_config, largest):
    """Are finite: keys of 0 make scores of 0."""
    q, k, v = inputs(backend, 1, fp8=True)
    q[..., 0] = largest
    k.view(torch.uint8).zero_()
    operands = [t.to(backend.device) for t in (q, k, v)]
    expected = v.float().mean(1).repeat_interleave(HEADS // KV_HEADS, 1)
    for config in each_config(*operands):
        out = backend.ops.flash_attn_func(*operands)
        assert (out.float().cpu()[:, 0] - expected).abs().max() < 0.01, config


@pytest.mark.parametrize("rows, keys", [(2, 40), (80, 300)])
def test_rows_of_no_sequence_stay(backend, each_config, rows, keys):
    """Before the first sequence and behind the last."""
    first, last = 3, 5
    q = torch.randn(first + rows + last, HEADS, SIZE).bfloat16().to(backend.device)
    k, v = torch.randn(2, keys, KV_HEADS, SIZE).bfloat16().to(backend.device)
    cu = torch.tensor([first, first + rows], dtype=torch.int32, device=backend.device)
    cu_k = torch.tensor([0, keys], dtype=torch.int32, device=backend.device)
    alone = backend.ops.flash_attn_func(q[None, first : first + rows], k[None], v[None])[0]
    told = {"cu_seqlens_q": cu, "cu_seqlens_k": cu_k, "max_seqlen_q": rows, "max_seqlen_k": keys}
    for config in each_config(q, k, v, **told):
        out = torch.full_like(q, 7.0)
        backend.ops.flash_attn_varlen_func(q, k, v, out=out, **told)
        assert (out[:first] == 7).all() and (out[first + rows :] == 7).all(), config
        off = (out[first : first + rows] - alone).float().norm() / alone.float().norm()
        assert off < 0.02, config


@pytest.mark.parametrize("ends", [[0], [0, 0, 0]])
def test_rows_of_no_sequence_at_all(backend, ends):
    q = torch.randn(8, HEADS, SIZE).bfloat16().to(backend.device)
    k, v = torch.randn(2, 8, KV_HEADS, SIZE).bfloat16().to(backend.device)
    cu = torch.tensor(ends, dtype=torch.int32, device=backend.device)
    out = torch.full_like(q, 7.0)
    backend.ops.flash_attn_varlen_func(q, k, v, cu, cu, 0, 0, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", ["16 bits", "float32", "FP8"])
def test_no_sequences(backend, paged, kind):
    """New keys go to the cache by an op, or, FP8 that is FP8 already, by copies."""
    dtype = {"16 bits": torch.bfloat16, "float32": torch.float32, "FP8": backend.fp8_dtype}[kind]
    of_queries = torch.bfloat16 if kind == "FP8" else dtype

    def none(*shape, dtype=dtype):
        return torch.zeros(0, *shape, device=backend.device).to(dtype)

    lengths = torch.zeros(0, dtype=torch.int32, device=backend.device)
    table = torch.zeros(0, 8, dtype=torch.int32, device=backend.device)[:, ::2]
    cache = torch.zeros(4, CACHE_SIZE, KV_HEADS, SIZE, device=backend.device).to(dtype)
    cache = cache if paged else cache[:0]
    cos, sin = torch.rand(2, 40, SIZE // 2).to(backend.device)
    for rotation in ({}, {"rotary_cos": cos, "rotary_sin": sin})[: 1 if kind == "FP8" else 2]:
        out = backend.ops.flash_attn_with_kvcache(
            none(1, HEADS, SIZE, dtype=of_queries), cache, cache.clone(), none(1, KV_HEADS, SIZE),
            none(1, KV_HEADS, SIZE), cache_seqlens=lengths,
            block_table=table if paged else None, **rotation,
        )  # fmt: skip
        assert out.shape == (0, 1, HEADS, SIZE)


def test_new_rows_of_no_page_are_written_nowhere(backend):
    """By copies as well: of FP8 that is FP8 already. No query is there to refuse the table."""
    fp8, pages, device = backend.fp8_dtype, 4, backend.device
    caches = torch.randn(2, pages, CACHE_SIZE, KV_HEADS, SIZE).to(fp8).to(device)
    before = caches.clone()
    new = torch.randn(3, 2, KV_HEADS, SIZE).to(fp8).to(device)
    table = torch.tensor([[0, -1], [-1, 2], [1, pages]], dtype=torch.int32, device=device)
    q = torch.empty(3, 0, HEADS, SIZE, dtype=torch.bfloat16, device=device)
    lengths = torch.tensor([CACHE_SIZE - 1, CACHE_SIZE - 1, CACHE_SIZE], device=device)

    def append(table, cache_seqlens):
        backend.ops.flash_attn_with_kvcache(
            q, *caches, new, new, cache_seqlens=cache_seqlens, block_table=table
        )

    append(table, lengths)
    expected = before.view(torch.uint8).clone()
    expected[:, 0, CACHE_SIZE - 1] = new[0, 0].view(torch.uint8)
    expected[:, 2, 0] = new[1, 1].view(torch.uint8)
    assert torch.equal(caches.view(torch.uint8), expected)
    append(torch.full_like(table, -1), lengths)
    assert torch.equal(caches.view(torch.uint8), expected)
    if backend.name == "simulator":  # whose ops are Python, which torch.compile cannot follow
        return
    compiled = torch.compile(append, fullgraph=True, backend="aot_eager")
    compiled(table, torch.tensor([-2, 2 * CACHE_SIZE, -9], device=device))
    assert torch.equal(caches.view(torch.uint8), expected)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2), (2, 1), (2, 2)])
def test_scales_have_the_same_shapes_everywhere(backend, shape):
    """Two sequences and two KV heads: what a shape means shows."""
    scale = (2.0 ** torch.randint(-2, 3, shape)).to(backend.device)
    q = torch.randn(2, 1, HEADS, SIZE).bfloat16().to(backend.device)
    k, v = torch.randn(2, 2, 1, KV_HEADS, SIZE).bfloat16().to(backend.device)

    def empty():
        return torch.zeros(2, CACHE_SIZE, KV_HEADS, SIZE).to(backend.fp8_dtype).to(backend.device)

    ours, theirs = [empty(), empty()], [empty(), empty()]
    backend.ops.rope_and_cache(
        q.clone(), k, v, k_cache=ours[0], v_cache=ours[1], cache_seqlens=0, k_scale=scale,
        v_scale=scale, k_out=torch.empty_like(k),
    )  # fmt: skip
    backend.ops.flash_attn_with_kvcache(
        q, *theirs, k, v, cache_seqlens=0, k_descale=scale, v_descale=scale
    )
    per_head = scale.cpu().expand(2, 2)[:, None, :, None]
    expected = (k.float().cpu() / per_head).to(backend.fp8_dtype)
    for cache in (ours[0], theirs[0]):
        assert torch.equal(cache[:, :1].cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(ours[1].view(torch.uint8), theirs[1].view(torch.uint8))


@pytest.mark.parametrize("name, wrong", [
    ("s_aux", torch.zeros(3)), ("softmax_scale", 0.0), ("softmax_scale", torch.ones(1)),
    ("causal", 3), ("softcap", -1.0), ("out", torch.zeros(2, 1, HEADS, 32).bfloat16()),
    ("cache_leftpad", torch.zeros(3, dtype=torch.int32)), ("cache_leftpad", torch.zeros(2)),
    ("q", torch.zeros(2, 1, 3, SIZE).bfloat16()), ("q", torch.zeros(2, 1, HEADS, SIZE).half()),
    ("q", torch.zeros(2, 1, HEADS, 32).bfloat16()), ("block_table", torch.zeros(2, 1)),
    ("page_table", torch.zeros(2, 1, dtype=torch.int32)),
])  # fmt: skip
def test_what_attention_refuses_appends_nothing(package, name, wrong):
    call = {
        "q": torch.randn(2, 1, HEADS, SIZE).bfloat16(), "cache_seqlens": 3,
        "block_table": torch.tensor([[0], [1]], dtype=torch.int32),
        **{n: torch.randn(2, 1, KV_HEADS, SIZE).bfloat16() for n in ("k", "v")},
    }  # fmt: skip
    caches = torch.zeros(2, 2, CACHE_SIZE, KV_HEADS, SIZE).bfloat16()
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        package.flash_attn_with_kvcache(
            k_cache=caches[0], v_cache=caches[1], **{**call, name: wrong}
        )
    assert not caches.any()
    package.flash_attn_with_kvcache(k_cache=caches[0], v_cache=caches[1], **call)
    assert caches.any()


@pytest.mark.parametrize("shapes", [[(64,), (1, 4, 2, 64)], [(1, 1, 4, 64), (64,)]])
def test_operands_of_too_few_dimensions(package, shapes):
    q, k = (torch.zeros(shape).bfloat16() for shape in shapes)
    with pytest.raises(ValueError, match="q, k and v must have 3 or 4 dimensions, got q"):
        package.flash_attn_func(q, k, k)
