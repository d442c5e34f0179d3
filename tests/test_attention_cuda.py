"""NVIDIA's kernels of attention by their configs, on a GPU: tiles and divisions of the work that
the choice takes for larger sequences than test_attention.py has."""

import sys

import pytest
import torch
from test_attention import Case, PaddedCase

pytestmark = pytest.mark.usefixtures("gpu")
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture
def run(best_package, gpu, monkeypatch):
    """``run(config, case arguments)``: out and lse are as the definition has them."""
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("prefill needs sm_90")
    module = sys.modules[best_package.flash_attn_func.__module__]
    native = module._attention

    def run(config, *args, **options):
        monkeypatch.setattr(module, "_attention", lambda *a: native(*a[:-1], config))
        backend = type("Cuda", (), {"name": "cuda", "ops": best_package, "device": gpu})
        case = Case(backend, *args, **options)
        first = case.run()
        case.check(*first)
        assert all(map(torch.equal, first, case.run()))

    return run


def prefill(rows, outer=1, design="prefill"):
    return f"{design} rows={rows} cluster=1 outer={outer}"


@pytest.mark.parametrize("rows, outer", [(64, 1), (128, 1), (64, 3), (128, 4)])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size, size_v", [
    (64, 64), (80, 80), (96, 96), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256),
])  # fmt: skip
def test_every_tile(run, size, size_v, dtype, kv_dtype, rows, outer):
    """Rows that fill several blocks and a part of one, keys that end inside of a tile."""
    run(
        prefill(rows, outer), [391, 130, 200, 0], rows=67, heads=(6, 2), size=size, size_v=size_v,
        dtype=dtype, kv_dtype=kv_dtype, causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("outer", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size, size_v", [(64, 64), (40, 64)])
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)])
def test_three_consumers(run, size, size_v, heads, dtype, outer):
    run(
        prefill(192, outer), [391, 130, 200, 0], rows=267, heads=heads, size=size, size_v=size_v,
        dtype=dtype, causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype, page", [(None, None), (None, 16), (E4M3, None)])
@pytest.mark.parametrize("rows, size", [
    (64, 128), (128, 128), (128, 192), (128, 256), (192, 64),
])  # fmt: skip
def test_more_items_than_multiprocessors(run, rows, size, kv_dtype, page):
    """Blocks take items until none is left; run() asks twice, for the word that counts them is
    to be as before."""
    if rows == 192 and (kv_dtype or page):
        pytest.skip("FP8 and pages have at most 128 rows")
    run(
        prefill(rows), [300, 131, 7, 0] * 8, rows=131, heads=(16, 8), size=size, causal=True,
        kv_dtype=kv_dtype, page=page,
    )  # fmt: skip


@pytest.mark.parametrize("group", [1, 4, 5, 7, 12, 96])
@pytest.mark.parametrize("rows, size, outer", [
    (64, 80, 1), (128, 128, 1), (128, 192, 1), (192, 64, 1), (128, 128, 2),
])  # fmt: skip
def test_ragged_rows(best_package, gpu, monkeypatch, rows, size, outer, group):
    """Groups of which whole queries make an item, and others; the last item of a sequence is not
    full, and what lies behind it, before the first and between heads stays as it was."""
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("prefill needs sm_90")
    module = sys.modules[best_package.flash_attn_varlen_func.__module__]
    native, reference = module._attention, best_package.reference
    monkeypatch.setattr(module, "_attention", lambda *a: native(*a[:-1], prefill(rows, outer)))
    lengths = [*torch.randint(1, 260, (24,)).tolist(), 0, 128, 64, 1]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=gpu).cumsum(0, dtype=torch.int32)
    q = torch.randn(sum(lengths), 4 * group, size, device=gpu, dtype=BF16)
    k, v = (torch.randn(sum(lengths), 4, size, device=gpu, dtype=BF16) for _ in "kv")
    around = torch.full((len(q) + 6, 4 * group, size + 8), float("nan"), device=gpu, dtype=BF16)
    out = around[3:-3, :, :size]
    best_package.flash_attn_varlen_func(q, k, v, ends, ends, 260, 260, causal=True, out=out)
    assert around[:3].isnan().all() and around[-3:].isnan().all()
    assert around[..., size:].isnan().all()
    for length, end in zip(lengths, ends[1:].tolist(), strict=True):
        rows_of = slice(end - length, end)
        wide = (t[None, rows_of].double() for t in (q, k, v))
        expected, _ = reference.flash_attn_func(*wide, causal=True)
        torch.testing.assert_close(out[rows_of].double(), expected[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows, size", [(64, 128), (128, 128), (192, 64)])
def test_rows_of_others_have_no_say(best_package, gpu, monkeypatch, rows, size):
    """The bits of a sequence are the same with loud neighbours, and with NaN in rows of q that no
    sequence has. Both share a warp with its last rows, which see several tiles of keys."""
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("prefill needs sm_90")
    module = sys.modules[best_package.flash_attn_varlen_func.__module__]
    native = module._attention
    monkeypatch.setattr(module, "_attention", lambda *a: native(*a[:-1], prefill(rows)))
    lengths = [301, 37, 390]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=gpu).cumsum(0, dtype=torch.int32)
    q = torch.randn(sum(lengths) + 50, 8, size, device=gpu, dtype=BF16)
    k, v = (torch.randn(sum(lengths), 2, size, device=gpu, dtype=BF16) for _ in "kv")
    loud = q.clone()
    loud[301:338] *= 1000
    loud[sum(lengths) :] = float("nan")
    outs = [
        best_package.flash_attn_varlen_func(rows_of, k, v, ends, ends, 390, 390)
        for rows_of in (q, loud)
    ]
    for own in (slice(301), slice(338, sum(lengths))):
        assert torch.equal(outs[0][own], outs[1][own])


@pytest.mark.parametrize("page", [1, 16, 48, 256])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("rows, outer", [(64, 2), (128, 1)])
def test_pages(run, page, kv_dtype, rows, outer):
    run(prefill(rows, outer), [700, 33], rows=33, size=128, page=page, kv_dtype=kv_dtype,
        causal=True)  # fmt: skip


@pytest.mark.parametrize("kv_dtype, page", [
    (E4M3, None), (E4M3, 1), (E4M3, 16), (None, 1), (None, 16), (None, 48),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows, outer, size, size_v", [
    (64, 1, 128, 128), (128, 3, 80, 80), (128, 1, 192, 128), (128, 1, 256, 256), (192, 1, 64, 64),
    (192, 2, 48, 64),
])  # fmt: skip
def test_gathered_keys(run, rows, outer, size, size_v, dtype, kv_dtype, page):
    """Keys that nobody sees are NaN, page numbers past the last lead nowhere."""
    for options in ({"causal": True}, {"window_size": (150, 20)}):
        run(
            prefill(rows, outer, "gathered"), [391, 130, 700, 0], rows=150, heads=(6, 2),
            size=size, size_v=size_v, dtype=dtype, kv_dtype=kv_dtype, page=page, **options,
        )  # fmt: skip


def test_ragged_keys_are_gathered(best_package, gpu, monkeypatch):
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("prefill needs sm_90")
    module = sys.modules[best_package.flash_attn_varlen_func.__module__]
    native, lengths = module._attention, [300, 0, 129, 64]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=gpu).cumsum(0, dtype=torch.int32)
    q = torch.randn(sum(lengths), 8, 128, device=gpu, dtype=BF16)
    k, v = (torch.randn(sum(lengths), 2, 128, device=gpu).to(E4M3) for _ in "kv")

    def run(*keys):
        return best_package.flash_attn_varlen_func(q, *keys, ends, ends, 300, 300, causal=True)

    monkeypatch.setattr(
        module, "_attention", lambda *a: native(*a[:-1], prefill(128, 1, "gathered"))
    )
    out = run(k, v)
    monkeypatch.setattr(module, "_attention", lambda *a: native(*a[:-1], prefill(128)))
    assert torch.equal(out, run(k.to(BF16), v.to(BF16)))


def test_gathered_keys_are_those_that_the_kernel_before_writes(best_package, gpu, monkeypatch):
    """In a graph each kernel begins while the one before ends, and steps share their scratch."""
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("prefill needs sm_90")
    module = sys.modules[best_package.flash_attn_func.__module__]
    native = module._attention
    monkeypatch.setattr(
        module, "_attention", lambda *a: native(*a[:-1], prefill(128, 1, "gathered"))
    )
    k, v = cache_of(gpu, kv_dtype=E4M3)
    q = torch.randn(2, 600, 8, 128, device=gpu, dtype=BF16)
    outs = [torch.empty_like(q) for _ in range(3)]

    def steps():
        for out in outs:
            k.copy_((k.float() * 0.9 + 0.01).to(E4M3))
            v.copy_((v.float() * -0.9).to(E4M3))
            best_package.flash_attn_func(q, k, v, causal=True, out=out)

    steps()
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), [k.clone(), v.clone()]
    with torch.cuda.graph(graph):
        steps()
    graph.replay()
    torch.cuda.synchronize()
    replayed = [out.clone() for out in outs]
    k.copy_(before[0])
    v.copy_(before[1])
    for out in outs:
        out.fill_(float("nan"))
    steps()
    assert all(map(torch.equal, replayed, outs))


@pytest.mark.parametrize("kv_dtype, page", [(None, None), (None, 16), (E4M3, None), (E4M3, 16)])
@pytest.mark.parametrize("rows", [1, 20, 130])
def test_padding_and_scratch_hold_anything(best_package, gpu, monkeypatch, rows, kv_dtype, page):
    """By every config; of more queries than keys, the first see nothing, not even the padding."""
    module = sys.modules[best_package.flash_attn_func.__module__]
    native, configs = module._attention, []

    def attention(*operands):
        configs[:] = configs or module._attention_configs(*operands[:-1]).splitlines()
        # What the allocator gives out next, whatever is asked for.
        old = [torch.full((1 << power,), torch.nan, device=gpu) for power in range(7, 23)]
        del old
        native(*operands[:-1], configs[at])

    monkeypatch.setattr(module, "_attention", attention)
    backend = type("Cuda", (), {"name": "cuda", "ops": best_package, "device": gpu})
    case = PaddedCase(backend, rows, kv_dtype=kv_dtype, page=page)
    at = 0
    while at < max(len(configs), 1):
        case.check(*case.run())
        at += 1


@pytest.mark.parametrize("page", [1, 4, 8, 16, 24, 48, 256])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("config, size, size_v", [
    ("cluster=1 outer=1", 128, 128), ("cluster=4 outer=2", 128, 128), ("cluster=1 outer=1", 64, 64),
    ("cluster=2 outer=1", 96, 96), ("cluster=1 outer=1", 192, 128), ("cluster=2 outer=1", 256, 256),
    ("cluster=2 outer=1", 512, 512),
])  # fmt: skip
def test_few_queries_in_pages(run, config, size, size_v, page, kv_dtype):
    """So many keys that a warp looks pages up more than once; windows that begin inside of one."""
    lengths = [5003, 2100, 77, 0] if page % 16 == 0 else [503, 210, 77, 0]
    for options in ({}, {"window_size": (lengths[1], 0)}):
        run(
            f"decode rows=8 {config}", lengths, rows=2, heads=(8, 2), size=size, size_v=size_v,
            page=page, kv_dtype=kv_dtype, **options,
        )  # fmt: skip


@pytest.mark.parametrize("options", [
    {"window_size": (50, 0)}, {"window_size": (70, 3)}, {"softcap": 5.0, "causal": True},
    {"s_aux": torch.randn(8), "window_size": (20, 0)}, {"softmax_scale": 1e-9},
    {"softmax_scale": -0.3, "causal": True}, {"softcap": 5.0, "softmax_scale": -0.3},
    # Maxima that grow from tile to tile, within what P's range holds and beyond.
    {"softmax_scale": 2.0}, {"softmax_scale": 30.0, "causal": True}, {"softmax_scale": -30.0},
])  # fmt: skip
@pytest.mark.parametrize("rows, outer", [(64, 4), (128, 1), (192, 1)])
def test_windows_caps_sinks_and_scales(run, options, rows, outer):
    run(prefill(rows, outer), [500, 177], rows=150, size=64, **options)


@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("heads", [(8, 8), (32, 4), (20, 1)])
def test_few_queries(run, queries, heads):
    run(prefill(64), [900, 20], rows=queries, heads=heads, size=128, causal=True)


@pytest.mark.parametrize("outer", [2, 31, 33, 64])
@pytest.mark.parametrize("design, size", [
    ("decode rows=8 cluster=1", 64), ("decode rows=8 cluster=1", 128),
    ("decode rows=8 cluster=1", 256), ("decode rows=8 cluster=1", 512),
    ("prefill rows=64 cluster=1", 128),
])  # fmt: skip
def test_any_number_of_parts(run, design, size, outer):
    """So many keys that each part has some, and sequences whose last parts have none."""
    run(f"{design} outer={outer}", [20000, 700, 3, 0], rows=1, heads=(8, 1), size=size)


@pytest.fixture
def decode(best_package, gpu, monkeypatch):
    """``decode(config, q, k, v, ...)`` with decode's kernel, which must be there."""
    if torch.cuda.get_device_capability(gpu)[0] < 9:
        pytest.skip("clusters need sm_90")
    module = sys.modules[best_package.flash_attn_func.__module__]
    native = module._attention

    def decode(config, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(module, "_attention", lambda *a: native(*a[:-1], f"decode {config}"))
            return best_package.flash_attn_with_kvcache(*args, **options)

    return decode


def cache_of(gpu, batch=2, keys=3000, kv_dtype=BF16):
    return [torch.randn(batch, keys, 2, 128, device=gpu).to(kv_dtype) for _ in "kv"]


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("config", [
    "rows=8 cluster=1 outer=1", "rows=8 cluster=4 outer=1", "rows=8 cluster=1 outer=8",
    "rows=8 cluster=2 outer=5", "rows=8 cluster=8 outer=2", "rows=8 cluster=1 outer=33",
])  # fmt: skip
def test_graphs_read_what_the_kernel_before_writes(decode, gpu, config, kv_dtype):
    """Lengths, queries and keys change right before each step, which begins while they do. Parts
    that meet in memory must not be taken for those of the replay before."""
    k, v = cache_of(gpu, kv_dtype=kv_dtype)
    q = torch.randn(2, 1, 8, 128, device=gpu, dtype=BF16)
    lengths = torch.tensor([700, 2990], dtype=torch.int32, device=gpu)
    noise, at = torch.randn_like(q), torch.zeros(1, dtype=torch.int64, device=gpu)
    out, values = torch.empty_like(q), v.view(torch.uint8)

    def step():
        q.neg_().add_(noise)
        values.index_copy_(1, at, values[:, 1:2].clone())
        at.add_(5)
        lengths.add_(1)
        out.copy_(decode(config, q, k, v, cache_seqlens=lengths))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, decode(config, q, k, v, cache_seqlens=lengths))


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("offset", [2, 4, 6])
def test_queries_that_begin_at_multiples_of_four_bytes(decode, gpu, offset, kv_dtype):
    k, v = cache_of(gpu, kv_dtype=kv_dtype)
    wide = torch.randn(2, 1, 8, 128 + 8, device=gpu, dtype=BF16)
    q = wide[..., offset : offset + 128]
    config = "rows=8 cluster=2 outer=2"
    assert torch.equal(decode(config, q, k, v), decode(config, q.contiguous(), k, v))


@pytest.mark.parametrize("size, config, words", [
    (64, prefill(32), "64, 128 or 192 rows"),
    (128, prefill(192), "192 rows of heads of up to 64"),
    (64, prefill(64).replace("cluster=1", "cluster=2"), "no clusters"),
    (64, prefill(64, 65), "outer must be 1 to 64"),
    (512, prefill(64), "no tile for heads of that size"),
    (68, prefill(64), "whole 16 bytes"),
    (64, prefill(64, 1, "gathered"), "float8_e4m3fn, or in pages"),
])  # fmt: skip
def test_configs_that_cannot_serve_say_why(run, size, config, words):
    with pytest.raises(RuntimeError, match=words):
        run(config, [5], size=size)
