"""Tensors of more than 2^31 elements, where offsets of 32 bits would wrap, and many rows."""

import pytest
import torch
from compare import assert_product_close, assert_quantized_close

# The reference and the simulator would take hours.
pytestmark = [pytest.mark.slow, pytest.mark.not_on("reference", "simulator")]

COLUMNS = 16384
ROWS = 2**31 // COLUMNS + 3
LAST = 5  # rows on both ends that are compared


@pytest.fixture
def rows(backend):
    """Zeros but for the first and the last rows: 4.3 GB of bfloat16."""
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device=backend.device)
    for part in (x[:LAST], x[-LAST:]):
        part.copy_(torch.randn(LAST, COLUMNS))
    return x


def test_norm(backend, package, rows):
    weight = torch.randn(COLUMNS, device=rows.device).bfloat16()
    q, scale = backend.ops.rmsnorm_fp8(rows, weight)
    for part in (slice(0, LAST), slice(-LAST, None)):
        expected = package.reference.rmsnorm_fp8(rows[part], weight, fp8_dtype=q.dtype)
        assert_quantized_close((q[part], scale[part]), expected)
    assert not (q[LAST:-LAST].view(torch.uint8) & 0x7F).any()  # zeros of either sign


def test_activation(backend, package, rows):
    q, scale = backend.ops.swiglu_fp8(rows)
    for part in (slice(0, LAST), slice(-LAST, None)):
        expected = package.reference.swiglu_fp8(rows[part], fp8_dtype=q.dtype)
        assert_quantized_close((q[part], scale[part]), expected)
    assert not (q[LAST:-LAST].view(torch.uint8) & 0x7F).any()  # zeros of either sign


@pytest.fixture
def fp8_rows(backend):
    """As `rows`, in FP8."""
    dtype, device = backend.fp8_dtype, backend.device
    w = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8, device=device).view(dtype)
    for part in (w[:LAST], w[-LAST:]):
        part.copy_(torch.randn(LAST, COLUMNS).to(dtype))
    return w


@pytest.mark.parametrize("op", ["skinny_gemm", "gemm"])
def test_product_of_a_large_weight(backend, fp8_rows, op):
    a = torch.randn(2, COLUMNS, device=backend.device).to(fp8_rows.dtype)
    out = getattr(backend.ops, op)(a, fp8_rows)
    for part in (slice(0, LAST), slice(-LAST, None)):
        operands = a.double(), fp8_rows[part].double()
        assert_product_close(out[:, part], operands[0] @ operands[1].t(), operands)
    assert not out[:, LAST:-LAST].any()


def test_product_of_large_inputs(backend, fp8_rows):
    w = torch.randn(3, COLUMNS, device=backend.device).to(fp8_rows.dtype)
    out = backend.ops.gemm(fp8_rows, w)
    for part in (slice(0, LAST), slice(-LAST, None)):
        operands = fp8_rows[part].double(), w.double()
        assert_product_close(out[part], operands[0] @ operands[1].t(), operands)
    assert not out[LAST:-LAST].any()


@pytest.mark.parametrize("dtype", ["fp8", torch.bfloat16])
def test_more_than_a_million_rows(backend, dtype):
    dtype = backend.fp8_dtype if dtype == "fp8" else dtype
    a = torch.randn(2**20 + 3, 160, device=backend.device).to(dtype)
    w = torch.randn(24, 160, device=backend.device).to(dtype)
    scale_a, scale_w = None, None
    operands = [a.double(), w.double()]
    if dtype == backend.fp8_dtype:
        scale_a, scale_w = (torch.rand(len(x), 1, device=x.device) + 0.5 for x in (a, w))
        operands = [x * scale for x, scale in zip(operands, (scale_a, scale_w), strict=True)]
    out = backend.ops.gemm(a, w, scale_a, scale_w)
    assert_product_close(out, operands[0] @ operands[1].t(), operands)
