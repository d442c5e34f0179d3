"""Properties that hold for any input, searched for counterexamples with hypothesis."""

import pytest
import torch
from compare import assert_close, assert_product_close, assert_quantized_close, bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("on_device")

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
fp8_dtypes = st.sampled_from([torch.float8_e4m3fn, torch.float8_e4m3fnuz])
rows = st.integers(0, 9)
columns = st.integers(1, 700)
exponents = st.integers(-12, 12)


@pytest.fixture
def package(best_package):
    return best_package


def random(rows, columns, dtype, exponent, stride=0):
    wide = torch.randn(rows, columns + stride) * 2.0**exponent
    return wide.to(dtype)[:, stride:]


@SETTINGS
@given(rows, columns, dtypes, exponents, st.integers(0, 5), st.booleans(), st.booleans())
def test_rmsnorm_equals_the_reference(
    package, rows, columns, dtype, exponent, stride, with_residual, grouped
):
    x = random(rows, columns, dtype, exponent, stride)
    weight = torch.randn(columns).to(dtype)
    residuals = [x.flip(0).clone() if with_residual else None for _ in range(2)]
    arguments = {"group_size": 128 if grouped else None}
    actual = package.rmsnorm_fp8(x, weight, 1e-6, residuals[0], **arguments)
    expected = package.reference.rmsnorm_fp8(x, weight, 1e-6, residuals[1], **arguments)
    assert_quantized_close(actual, expected)
    if with_residual:
        assert torch.equal(residuals[0], residuals[1])


@SETTINGS
@given(rows, columns, dtypes, exponents, st.sampled_from(["silu", "gelu", "gelu_tanh"]))
def test_swiglu_equals_the_reference(package, rows, columns, dtype, exponent, activation):
    # A row of GELU's cancelling tail alone has no digits left: its gates stay above about -4.
    x = random(rows, 2 * columns, dtype, min(exponent, 4 if activation == "silu" else 0))
    actual = package.swiglu_fp8(x, activation=activation)
    assert_quantized_close(actual, package.reference.swiglu_fp8(x, activation=activation))


@SETTINGS
@given(rows, columns, dtypes, fp8_dtypes, exponents, st.booleans())
def test_quantizing_loses_at_most_half_a_step(
    package, rows, columns, dtype, fp8_dtype, exponent, grouped
):
    x = random(rows, columns, dtype, exponent)
    q, scale = package.quantize_fp8(x, fp8_dtype=fp8_dtype, group_size=128 if grouped else None)
    if grouped:
        scale = scale.repeat_interleave(128, -1)[:, :columns]
    # Half a unit in the last of 3 mantissa bits, or half of the smallest subnormal; and the product
    # with the scale's rounded reciprocal, which may push a value past the middle.
    smallest = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e4m3fnuz: 2.0**-10}[fp8_dtype]
    allowed = torch.maximum(x.float().abs() * 2.0**-4, scale * smallest / 2) * (1 + 1e-5)
    assert ((q.float() * scale - x.float()).abs() <= allowed).all()


@SETTINGS
@given(columns, fp8_dtypes, exponents)
def test_quantizing_twice_changes_nothing(package, columns, fp8_dtype, exponent):
    x = random(3, columns, torch.float32, exponent)
    scale = torch.tensor([2.0**-3])
    q, _ = package.quantize_fp8(x, scale=scale, fp8_dtype=fp8_dtype)
    again, _ = package.quantize_fp8(q.float() * scale, scale=scale, fp8_dtype=fp8_dtype)
    assert torch.equal(bits(again), bits(q))


@SETTINGS
@given(st.integers(1, 64), st.integers(1, 90), st.integers(1, 400), fp8_dtypes)
def test_products_keep_the_error_bound(package, device, m, n, k, fp8_dtype):
    native = package.native_fp8_dtype(device)
    fp8_dtype = fp8_dtype if device.type == "cpu" else native  # matrix units have one dialect
    a, w = (torch.randn(size, k).to(fp8_dtype) for size in (m, n))
    scale_a, scale_w = torch.rand(m, 1) + 0.1, torch.rand(n, 1) + 0.1
    operands = (
        package.reference.dequantize(a, scale_a, 1),
        package.reference.dequantize(w, scale_w, 128),
    )
    out = package.skinny_gemm(a, w, scale_a, scale_w)
    assert_product_close(out, operands[0] @ operands[1].t(), operands)


@SETTINGS
@given(rows, columns, dtypes)
def test_out_arguments_give_the_same(package, rows, columns, dtype):
    x, weight = random(rows, columns, dtype, 0), torch.randn(columns).to(dtype)
    out = torch.empty_like(x)
    assert package.rmsnorm(x, weight, out=out) is out
    assert_close(out, package.rmsnorm(x, weight))
    q, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(rows, 1)
    result = package.rmsnorm_fp8(x, weight, out=(q, scale))
    assert result[0] is q and result[1] is scale
    expected = package.rmsnorm_fp8(x, weight)
    assert torch.equal(bits(q), bits(expected[0])) and torch.equal(scale, expected[1])
