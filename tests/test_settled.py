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
