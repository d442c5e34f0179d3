"""Weights that a kernel may read before the one in front of it is done (functional/product.py,
settled): the bits are the same. That a recorded step says so of its own: test_decode_step.py."""

import pytest
import torch


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_settled_weights_change_no_bit(best_package, device, rows):
    """A chain in which each kernel reads what the one before has left. On a GPU it reads its
    weights earlier: those of a product, their scales, its bias, and a norm's."""
    torch.manual_seed(rows)
    width, fp8 = 2048, best_package.native_fp8_dtype(device)
    x = torch.randn(rows, width, device=device).bfloat16()
    layers = [
        (
            torch.randn(width, device=device).bfloat16(),
            torch.randn(width, width, device=device).to(fp8),
            torch.rand(width, 1, device=device) / width,
            torch.randn(width, device=device).bfloat16(),
        )
        for _ in range(3)
    ]

    def chain():
        h = x
        for norm, w, scale, bias in layers:
            q, scales = best_package.rmsnorm_fp8(h, norm, fp8_dtype=fp8)
            h = best_package.gemm(q, w, scales, scale, bias=bias)
        return h

    expected = chain()
    assert expected.float().std() > 0.1
    for _ in range(20 if device.type == "cuda" else 1):
        with best_package.functional.product.settled([t for layer in layers for t in layer]):
            assert torch.equal(chain(), expected)
