"""Tensors of more than 2^31 elements: offsets of 32 bits would wrap."""

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
    q, scale = backend.ops.rms_norm_fp8(rows, weight)
    for part in (slice(0, LAST), slice(-LAST, None)):
        expected = package.reference.rms_norm_fp8(rows[part], weight, fp8_dtype=q.dtype)
        assert_quantized_close((q[part], scale[part]), expected)
    assert not (q[LAST:-LAST].view(torch.uint8) & 0x7F).any()  # zeros of either sign


def test_activation(backend, package, rows):
    q, scale = backend.ops.swiglu_fp8(rows)
    for part in (slice(0, LAST), slice(-LAST, None)):
        expected = package.reference.swiglu_fp8(rows[part], fp8_dtype=q.dtype)
        assert_quantized_close((q[part], scale[part]), expected)
    assert not (q[LAST:-LAST].view(torch.uint8) & 0x7F).any()  # zeros of either sign


def test_product(backend):
    dtype, device = backend.fp8_dtype, backend.device
    w = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8, device=device).view(dtype)
    for part in (w[:LAST], w[-LAST:]):
        part.copy_(torch.randn(LAST, COLUMNS).to(dtype))
    a = torch.randn(2, COLUMNS, device=device).to(dtype)
    out = backend.ops.skinny_gemm(a, w)
    for part in (slice(0, LAST), slice(-LAST, None)):
        operands = a.double(), w[part].double()
        assert_product_close(out[:, part], operands[0] @ operands[1].t(), operands)
    assert not out[:, LAST:-LAST].any()
