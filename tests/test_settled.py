"""Weights that a kernel may read before the one in front of it is done (settled of
functional/product.py), and what a product asks L2 for (models/ahead.py): the bits are the same.
That a recorded step says so of its own: test_decode_step.py."""

import pytest
import torch

H200 = (132, 60 << 20)  # multiprocessors, bytes of L2


def layers_of(package, device, width, count):
    fp8 = package.native_fp8_dtype(device)
    return [
        (
            torch.randn(width, device=device).bfloat16(),
            torch.randn(width, width, device=device).to(fp8),
            torch.rand(width, 1, device=device) / width,
            torch.randn(width, device=device).bfloat16(),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_settled_weights_change_no_bit(best_package, device, rows, monkeypatch):
    """A chain in which each kernel reads what the one before has left. On a GPU it reads its
    weights earlier: those of a product, their scales, its bias, and a norm's."""
    torch.manual_seed(rows)
    width, ahead = 2048, best_package.models.ahead
    fp8 = best_package.native_fp8_dtype(device)
    x = torch.randn(rows, width, device=device).bfloat16()
    layers = layers_of(best_package, device, width, 3)

    def chain():
        h = x
        for norm, w, scale, bias in layers:
            q, scales = best_package.rmsnorm_fp8(h, norm, fp8_dtype=fp8)
            h = best_package.gemm(q, w, scales, scale, bias=bias)
        return h

    expected = chain()
    assert expected.float().std() > 0.1
    monkeypatch.setattr(ahead, "_LEAST", 0)
    monkeypatch.setattr(ahead, "_ASKED", 4096)
    settled = best_package.functional.product.settled([t for layer in layers for t in layer])
    if device.type != "cuda":
        with settled:
            assert torch.equal(chain(), expected)
        return
    graph = torch.cuda.CUDAGraph()
    with settled, ahead.asking_ahead(device) as places, torch.cuda.graph(graph):
        out = chain()
    assert places is None or places[:3].count_nonzero() == 12
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("sequences, rows", [(1, 700), (1, 40), (3, 2000)])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_settled_keys_change_no_bit(best_package, device, kv_dtype, sequences, rows):
    """Steps as a graph: each writes a row and attends. On a GPU earlier rows are read earlier, and
    again where a length is another than it was."""
    torch.manual_seed(rows)
    heads, kv_heads, size = 8, 2, 128
    if kv_dtype != torch.bfloat16:
        kv_dtype = best_package.native_fp8_dtype(device)
    q, k, v = (
        torch.randn(sequences, 1, n, size, device=device).bfloat16()
        for n in (heads, kv_heads, kv_heads)
    )
    caches = [
        torch.randn(sequences, rows + 9, kv_heads, size, device=device).to(kv_dtype)
        for _ in range(2)
    ]
    places = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
    lengths = torch.zeros(sequences, dtype=torch.int32, device=device)

    def step():
        places.copy_(lengths[:, None])
        lengths.add_(1)
        best_package.rope_and_cache(
            q, k, v, k_cache=caches[0], v_cache=caches[1], cache_positions=places
        )
        return best_package.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)

    def steps(run):
        lengths.copy_(torch.arange(sequences) * 5 + rows - 20)
        return torch.stack([run().clone() for _ in range(8)])

    expected = steps(step)
    assert expected.float().std() > 0.01 and not torch.equal(expected[0], expected[1])
    settled = best_package.functional.product.settled(caches)
    if device.type != "cuda":
        with settled:
            assert torch.equal(steps(step), expected)
        return
    graph = torch.cuda.CUDAGraph()
    with settled, torch.cuda.graph(graph):
        out = step()
    assert torch.equal(steps(lambda: (graph.replay(), out)[1]), expected)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_lengths_of_the_kernel_before(best_package, device, kv_dtype):
    """Rotation writes them, as a value in a cache, while attention looks them up for the first
    time: on a GPU it waits for a product, attention does not. Before they may be anything."""
    torch.manual_seed(0)
    heads, kv_heads, size, rows, sequences = 8, 2, 128, 900, 2
    if kv_dtype != torch.float16:
        kv_dtype = best_package.native_fp8_dtype(device)
    q, one = (torch.randn(n, 1, heads, size, device=device).half() for n in (sequences, 1))
    shape = (sequences, rows + 100, kv_heads, size)
    caches = [torch.randn(shape, device=device).to(kv_dtype) for _ in range(2)]
    new, told = (torch.zeros(1, 1, 1, size // 2, device=device, dtype=torch.int32) for _ in "ab")
    new[..., :sequences] = torch.tensor([rows, rows - 321], device=device)
    key, place = one[:, :, :1].contiguous(), torch.zeros(1, 1, dtype=torch.int64, device=device)
    width = 4096 if device.type == "cuda" else 16
    large = torch.randn(width, width, device=device).half()
    lengths = told.view(-1)[:sequences]

    def step():
        best_package.gemm(large, large)
        best_package.rope_and_cache(
            one, key, new.view(torch.float16), k_cache=key.clone(),
            v_cache=told.view(torch.float16), cache_positions=place,
        )  # fmt: skip
        return best_package.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)

    expected = best_package.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=new.view(-1)[:sequences].clone()
    )
    assert expected.float().std() > 0.01
    with best_package.functional.product.settled(caches):
        for stale in (0, 1, 16, 17, rows - 37, rows, rows + 60, -5, -(2**31), 2**31 - 1):
            told.fill_(stale)
            assert torch.equal(step(), expected), stale
            assert torch.equal(told, new)


def product_of(package, rows, columns, **changes):
    given = {"data": 1 << 20, "row_stride": columns, "runs": 1, "before": 0, **changes}
    return package.models.ahead.Product(rows=rows, row_bytes=columns, **given)


@pytest.mark.parametrize("rows, columns", [(28672, 4096), (4096, 14336), (128256, 8192)])
def test_a_large_weight_is_asked_for(package, rows, columns):
    """The beginnings of equal shares of its rows, none of which leads out of it."""
    data, stride, pieces, size = package.models.ahead.wanted(
        product_of(package, rows, columns), *H200
    )
    assert data == 1 << 20 and 0 < size <= stride and size % 16 == stride % 16 == 0
    assert stride % columns == 0 and rows * columns >= pieces * stride > 0.9 * rows * columns


def test_of_two_runs_each_share_is_asked_for(package):
    """Multiprocessors have rows of gate and as many of up: pieces of half the size, twice as many,
    as many bytes of each multiprocessor."""
    one = package.models.ahead.wanted(product_of(package, 28672, 4096), *H200)
    two = package.models.ahead.wanted(product_of(package, 28672, 4096, runs=2), *H200)
    assert two[3] == one[3] // 2 and two[1] == 109 * 4096 and two[2] == 28672 // 109
    small = product_of(package, 8448, 4096, runs=2)  # as many bytes as make one run large enough
    assert package.models.ahead.wanted(small, *H200)[3] == one[3] // 2


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 6144},  # little more than the stages hold
        {"row_stride": 4112},  # gaps between rows
        {"before": 40 << 20},  # an attention to a long context, or experts
        {"data": (1 << 20) + 8},
    ],
)
def test_others_are_not(package, changes):
    weight = product_of(package, 28672, 4096)._replace(**changes)
    assert package.models.ahead.wanted(weight, *H200) == [0] * 4


def test_products_are_told_in_their_order(package):
    """Those of settled weights, with what an attention has read before."""
    (first, second, third), ops = layers_of(package, torch.device("cpu"), 64, 3), package._ops.ops
    a, cache = torch.randn(2, 64).bfloat16(), torch.randn(1, 24, 2, 64).bfloat16()
    with package.functional.product.settled([first[1], third[1]]):
        package.gemm(a, third[1], None, third[2])  # nobody has asked yet
        assert ops.ask_ahead(torch.zeros(8, 4).long()) == ""
        for _, w, scale, _ in (first, second, third):
            package.gemm(a, w, None, scale)
            package.flash_attn_func(torch.randn(1, 1, 4, 64).bfloat16(), cache, cache)
        told = ops.ask_ahead(None)
    kinds = [(w.data_ptr(), 64, 64, 64, 1) for w in (first[1], third[1])]
    passed = [0, 2 * 24 * 2 * 2 * 64 * 2]
    lines = [" ".join(map(str, (*kind, b))) for kind, b in zip(kinds, passed, strict=True)]
    assert told.splitlines() == lines
    assert ops.ask_ahead(None) == ""
