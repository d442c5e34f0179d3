"""gemm, the product for any number of rows, on every backend of --device; test_gemm_cpu.py has what
is the CPU kernel's alone."""

import pytest
import torch
from compare import Guarded, assert_product_close, strided
from test_skinny_gemm import padded_fp8, random_scale

SCALES = ["none", "tensor", "row", "block"]


def check(backend, package, a, w, scale_a=None, scale_w=None, bias=None, out_dtype=torch.float32):
    """Through poisoned outputs with guards around them, against float64."""
    out = Guarded(a.shape[0], w.shape[0], out_dtype, backend.device)
    if backend.name == "reference":
        product = backend.ops.skinny_gemm(a, w, scale_a, scale_w, bias=bias, out_dtype=out_dtype)
        out.view.copy_(product)
    else:
        backend.ops.functional.ops.gemm(out.view, a, w, scale_a, scale_w, bias)
    out.assert_guards_intact()
    dequantize = package.reference.dequantize
    operands = dequantize(a, scale_a, 1), dequantize(w, scale_w, 128)
    exact = operands[0] @ operands[1].t() + (0 if bias is None else bias.double())
    assert_product_close(out.view, exact, operands)


# On both sides of a slice of 64, and of the kernels' own blocks of rows.
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 128, 129, 200])
def test_rows(backend, package, rows):
    fp8, device = backend.fp8_dtype, backend.device
    a, w = padded_fp8(rows, 333, fp8, device), padded_fp8(70, 333, fp8, device)
    scale_a, scale_w = torch.rand(rows, 1, device=device), torch.rand(70, 1, device=device)
    check(backend, package, a, w, scale_a, scale_w, torch.randn(70, device=device))


@pytest.mark.parametrize("scale_w", SCALES)
@pytest.mark.parametrize("scale_a", SCALES)
def test_scales(backend, package, scale_a, scale_w):
    rows, n, k, device = 129, 200, 656, backend.device
    a, w = (padded_fp8(count, k, backend.fp8_dtype, device) for count in (rows, n))
    scales = (
        random_scale(scale_a, rows, k, device, 1),
        random_scale(scale_w, n, k, device, 128),
    )
    check(backend, package, a, w, *scales, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [65, 96, 300])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
def test_edges_of_rows_that_are_vectors(backend, package, out_dtype, rows):
    """16 bytes at a time up to the last row and column, and none beyond; with a large K workgroups
    share a sum."""
    for n, k in ((168, 256), (24, 4096)):
        a, w = (padded_fp8(count, k, backend.fp8_dtype, backend.device) for count in (rows, n))
        scale_a, scale_w = (torch.rand(c, 1, device=backend.device) for c in (rows, n))
        check(backend, package, a, w, scale_a, scale_w, out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_operands(backend, package, dtype):
    a, w = (strided(count, 257, dtype, backend.device) for count in (130, 48))
    check(backend, package, a, w, out_dtype=dtype)


@pytest.mark.parametrize("scale_w", SCALES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_only(backend, package, dtype, scale_w):
    a = strided(67, 400, dtype, backend.device)
    w = padded_fp8(130, 400, backend.fp8_dtype, backend.device)
    check(backend, package, a, w, None, random_scale(scale_w, 130, 400, backend.device, 128))


def test_empty(backend):
    if backend.name == "reference":
        return  # allocates its outputs
    gemm, device, fp8 = backend.ops.functional.ops.gemm, backend.device, backend.fp8_dtype
    a, w = torch.empty(70, 0, device=device).to(fp8), torch.empty(5, 0, device=device).to(fp8)
    out = torch.full((70, 5), -1.0, device=device)
    gemm(out, a, w, None, None, None)
    assert out.eq(0).all()
    gemm(out[:0], a[:0], w, None, None, None)
    gemm(out[:, :0], a, w[:0], None, None, None)
