"""The sizes that models run, on every backend of --device: rows of 16384 and 4096 columns.

Stricter than assert_close: an FP8 element must be what the reference's float32 value rounds to, or
what a value within the precision of float32 arithmetic beside it rounds to.
"""

import itertools

import pytest
import torch
from compare import assert_close, bits, steps
from test_rmsnorm_fp8 import mode_arguments

SHAPES = [(1, 16384), (8, 16384), (32, 16384), (256, 16384), (2048, 4096)]
DTYPES = [torch.float16, torch.bfloat16]
MODES = ["static", "per_token", "per_group"]
PRECISION = 6e-6  # of the value before rounding: two sums, rsqrt or exp, products, the scale


def cases():
    """Every shape, dtype and mode; all but one dtype and mode of each shape are slow."""
    for n, shape in enumerate(SHAPES):
        for dtype, mode in itertools.product(DTYPES, MODES):
            quick = (dtype, mode) == (DTYPES[n % 2], MODES[n % 3])
            marks = () if quick else pytest.mark.slow
            name = f"{shape[0]}x{shape[1]}-{str(dtype)[6:]}-{mode}"
            yield pytest.param(shape, dtype, mode, marks=marks, id=name)


@pytest.fixture
def reference(package):
    return package.reference


def assert_rounds_from(actual, value, scale, arguments):
    """`actual` is the pair of FP8 values and scales for the float32 `value` and its `scale`."""
    q, actual_scale = actual
    torch.testing.assert_close(actual_scale, scale, rtol=PRECISION, atol=0)
    full = scale.repeat_interleave(arguments.get("group_size", value.shape[1]), -1)
    largest = torch.finfo(q.dtype).max
    scaled = (value / full[..., : value.shape[1]]).clamp(-largest, largest)
    nearby = [(scaled * (1 + side * PRECISION)).clamp(-largest, largest) for side in (-1, 1)]
    ends = torch.stack([steps(end.to(q.dtype)) for end in nearby])
    place = steps(q)
    wrong = (place < ends.amin(0)) | (place > ends.amax(0))
    assert not wrong.any(), f"{int(wrong.sum())} elements are not what their value rounds to"


@pytest.mark.parametrize(("shape", "dtype", "mode"), cases())
def test_rmsnorm_fp8(backend, reference, shape, dtype, mode):
    x, residual = (torch.randn(shape, device=backend.device).to(dtype) for _ in range(2))
    weight = (torch.randn(shape[1], device=backend.device) + 1).to(dtype)
    arguments = {**mode_arguments(mode, backend.device), "fp8_dtype": backend.fp8_dtype}
    h = residual + x
    _, scale = reference.rmsnorm_fp8(h, weight, 1e-6, **arguments)
    value = reference.rmsnorm(h.float(), weight.float(), 1e-6)
    updated = residual.clone()
    actual = backend.ops.rmsnorm_fp8(x, weight, 1e-6, updated, **arguments)
    assert torch.equal(updated, h)
    assert_rounds_from(actual, value, scale, arguments)
    # A row alone gives the bits that it gives among the others.
    alone, _ = backend.ops.rmsnorm_fp8(x[-1:], weight, 1e-6, residual[-1:].clone(), **arguments)
    assert torch.equal(bits(alone), bits(actual[0][-1:]))


@pytest.mark.parametrize(("shape", "dtype", "mode"), cases())
def test_swiglu_fp8(backend, reference, shape, dtype, mode):
    x = (torch.randn(shape, device=backend.device) * 3).to(dtype)
    arguments = {**mode_arguments(mode, backend.device), "fp8_dtype": backend.fp8_dtype}
    _, scale = reference.swiglu_fp8(x, **arguments)
    actual = backend.ops.swiglu_fp8(x, **arguments)
    assert_rounds_from(actual, reference.swiglu(x.float()), scale, arguments)
    alone, _ = backend.ops.swiglu_fp8(x[-1:], **arguments)
    assert torch.equal(bits(alone), bits(actual[0][-1:]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(256, 16384), (2048, 4096)])
def test_unquantized(backend, reference, shape):
    x = torch.randn(shape, device=backend.device).bfloat16()
    weight = torch.randn(shape[1], device=backend.device).bfloat16()
    assert_close(backend.ops.rmsnorm(x, weight), reference.rmsnorm(x, weight))
    assert_close(backend.ops.swiglu(x), reference.swiglu(x), rtol=4e-6)
