"""topk on every backend of --device: which experts a token goes to, and with what weights."""

import math

import pytest
import torch

FP8, MX = "fp8", "mxfp4"


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, k",
    [
        ((0, 8), 2),
        ((1, 1), 1),
        ((3, 5, 60), 7),
        ((6, 128), 8),
        ((70, 512), 16),
        ((9, 40), 32),
        ((7, 513), 32),
        ((6, 2048), 32),
    ],
)
def test_topk_softmax(backend, package, shape, k, dtype, renormalize):
    logits = (3 * torch.randn(shape, device=backend.device)).to(dtype)
    weights, ids = backend.ops.topk_softmax(logits, k, renormalize=renormalize)
    expected = package.reference.topk_softmax(logits, k, renormalize=renormalize)
    assert ids.dtype == torch.int32 and torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=3e-6, atol=1e-30)


def test_ties_go_to_the_lower_id(backend):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]], device=backend.device)
    assert backend.ops.topk_softmax(logits, 5)[1].tolist() == [[1, 2, 4, 0, 3]]
    assert backend.ops.topk_sigmoid(logits, 5)[1].tolist() == [[1, 2, 4, 0, 3]]
    groups = torch.zeros(1, 16, device=backend.device)
    ids = backend.ops.topk_sigmoid(groups, 4, groups=8, groups_kept=2)[1]
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_any_logits_give_ids_of_experts(backend):
    nan, inf = math.nan, math.inf
    rows = [[nan] * 6, [-inf] * 6, [nan, 1, -inf, inf, nan, 2], [0, nan, 0, 0, 0, 0]]
    logits = torch.tensor(rows, device=backend.device)
    for weights, ids in (
        backend.ops.topk_softmax(logits, 4),
        backend.ops.topk_sigmoid(logits, 4),
        backend.ops.topk_sigmoid(logits, 4, groups=3, groups_kept=2),
    ):
        assert all(len(set(row)) == 4 and {*row} <= {*range(6)} for row in ids.tolist())
        assert weights[0].isnan().all()
    assert backend.ops.topk_softmax(logits, 3)[1].tolist()[2] == [3, 5, 1]
    assert backend.ops.topk_softmax(logits, 2)[0][3].isnan().all()


@pytest.mark.parametrize("renormalize, scale", [(True, 2.5), (False, 1.0)])
@pytest.mark.parametrize(
    "experts, k, groups, kept",
    [
        (256, 8, 8, 4),
        (64, 6, 1, 1),
        (24, 16, 3, 2),
        (8, 3, 8, 5),
        (2048, 32, 8, 3),
        (600, 20, 1, 1),
    ],
)
def test_topk_sigmoid(backend, package, experts, k, groups, kept, renormalize, scale):
    logits = torch.randn(33, experts, device=backend.device)
    bias = torch.randn(experts, device=backend.device) / 4
    options = {
        "bias": bias, "groups": groups, "groups_kept": kept, "renormalize": renormalize,
        "scale": scale,
    }  # fmt: skip
    weights, ids = backend.ops.topk_sigmoid(logits, k, **options)
    expected = package.reference.topk_sigmoid(logits, k, **options)
    # Sigmoids differ in their last bit, so choices this close may change places.
    choice = logits.sigmoid() + bias
    wrong = ids != expected[1]
    close = choice.gather(-1, ids.long()) - choice.gather(-1, expected[1].long())
    assert wrong.float().mean() < 0.01 and (close[wrong].abs() < 1e-6).all()
    torch.testing.assert_close(weights[~wrong], expected[0][~wrong], rtol=3e-6, atol=0)
