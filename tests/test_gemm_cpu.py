"""The CPU's own product for many rows, and fp8_linear on both sides of where it takes over."""

import pytest
import torch
from compare import Guarded, assert_product_close, bits, strided
from test_skinny_gemm import padded_fp8, random_scale

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
OUT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(package, a, w, scale_a=None, scale_w=None, bias=None, out_dtype=torch.float32):
    """Through poisoned outputs with guards around them, against float64."""
    out = Guarded(a.shape[0], w.shape[0], out_dtype, CPU)
    package.gemm(a, w, scale_a, scale_w, bias=bias, out=out.view)
    out.assert_guards_intact()
    dequantize = package.reference.dequantize
    operands = dequantize(a, scale_a, 1), dequantize(w, scale_w, 128)
    exact = operands[0] @ operands[1].t() + (0 if bias is None else bias.double())
    assert_product_close(out.view, exact, operands)
    return out.view


# Blocks of rows end at 256 or 512, tiles at 6, 12 or 16; groups of columns at 8, 16 or 32; panels
# at 256 of K, chunks at 64. Eight groups share a panel of a where a takes more than 1 MiB.
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 127), (64, 512), (130, 1000), (96, 4099)])
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 16, 17, 33, 65, 131, 257, 530])
def test_rows_and_shapes(package, rows, shape):
    n, k = shape
    a, w = padded_fp8(rows, k, FP8, CPU), padded_fp8(n, k, FP8, CPU)
    scale_a, scale_w = random_scale("row", rows, k, CPU, 1), random_scale("row", n, k, CPU, 128)
    check(package, a, w, scale_a, scale_w)


@pytest.mark.parametrize("scale_w", ["none", "tensor", "row", "block"])
@pytest.mark.parametrize("scale_a", ["none", "tensor", "row", "block"])
def test_scales(package, scale_a, scale_w):
    rows, n, k = 300, 200, 656
    a, w = padded_fp8(rows, k, FP8, CPU), padded_fp8(n, k, FP8, CPU)
    scales = random_scale(scale_a, rows, k, CPU, 1), random_scale(scale_w, n, k, CPU, 128)
    check(package, a, w, *scales)


@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_operands(package, dtype, rows):
    a, w = strided(rows, 1025, dtype, CPU), strided(131, 1025, dtype, CPU)
    check(package, a, w)
    check(package, a, w, out_dtype=dtype)


@pytest.mark.parametrize("fp8_dtype", [FP8, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("scale_w", ["none", "row", "block"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weight_only(package, dtype, scale_w, fp8_dtype):
    a, w = strided(77, 1025, dtype, CPU), padded_fp8(130, 1025, fp8_dtype, CPU)
    check(package, a, w, None, random_scale(scale_w, 130, 1025, CPU, 128))


@pytest.mark.parametrize("bias_float32", [False, True])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_bias_and_output_dtype(package, out_dtype, bias_float32):
    bias = torch.randn(131).to(torch.float32 if bias_float32 else out_dtype)
    a, w = padded_fp8(70, 384, FP8, CPU), padded_fp8(131, 384, FP8, CPU)
    scales = (random_scale("tensor", 1, 384, CPU, 1) for _ in range(2))
    check(package, a, w, *scales, bias, out_dtype)


@pytest.mark.parametrize("fp8_dtype", [FP8, torch.float8_e4m3fnuz])
def test_every_fp8_value_multiplies_exactly(package, fp8_dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(fp8_dtype)
    values, ones = codes.float(), torch.ones(256, 1).to(fp8_dtype)
    out = torch.full((256, 256), -1.0)
    for a, w, row in ((ones, codes.view(256, 1), 0), (codes.view(256, 1), ones, slice(None))):
        package.gemm(a, w, out=out)
        actual = out[0] if row == 0 else out[:, 0]
        assert torch.equal(actual.isnan(), values.isnan())
        assert torch.equal(actual[~values.isnan()], values[~values.isnan()])


def test_nan_stays_in_its_row_and_channel(package):
    a, w = torch.randn(90, 300).to(FP8), torch.randn(70, 300).to(FP8)
    a[83, 7], w[33, 299] = torch.tensor(float("nan")).to(FP8), torch.tensor(float("nan")).to(FP8)
    out = torch.empty(90, 70)
    package.gemm(a, w, out=out)
    expected = torch.zeros(90, 70, dtype=torch.bool)
    expected[83], expected[:, 33] = True, True
    assert torch.equal(out.isnan(), expected)


def test_bits_do_not_depend_on_rows_threads_or_the_run(package):
    """Of more rows than the kernel for few takes."""
    a, w = padded_fp8(300, 2000, FP8, CPU), padded_fp8(100, 2000, FP8, CPU)

    def product(rows):
        out = torch.empty(rows, 100)
        package.gemm(a[:rows], w, out=out)
        return bits(out)

    whole, threads = product(300), torch.get_num_threads()
    assert torch.equal(product(300), whole)
    for rows in (65, 256, 299):
        assert torch.equal(product(rows), whole[:rows])
    try:
        torch.set_num_threads(1)
        assert torch.equal(product(300), whole)
    finally:
        torch.set_num_threads(threads)


def test_products_beyond_the_caches(package):
    """Several groups of columns, the last one short, share panels of a; two blocks of rows."""
    rows, n, k = 1030, 32 * 19 + 7, 4160
    for scale in ("row", "block"):
        a, w = padded_fp8(rows, k, FP8, CPU), padded_fp8(n, k, FP8, CPU)
        check(package, a, w, *(random_scale(scale, r, k, CPU, b) for r, b in ((rows, 1), (n, 128))))


def test_tiles_are_configured_in_every_call(package):
    """oneDNN, which multiplies bfloat16 by AMX too, leaves a thread's tiles as it likes."""
    x, v = torch.randn(100, 512).bfloat16(), torch.randn(300, 512).bfloat16()
    theirs = torch.nn.functional.linear(x, v)
    for rows in (3, 16, 100):
        a, w = padded_fp8(rows, 512, FP8, CPU), padded_fp8(70, 512, FP8, CPU)
        check(package, a, w)
        assert torch.equal(torch.nn.functional.linear(x, v), theirs)
        check(package, a, w)


def test_empty(package):
    out = torch.full((70, 5), -1.0)
    package.gemm(torch.empty(70, 0).to(FP8), torch.empty(5, 0).to(FP8), out=out)
    assert out.eq(0).all()
    package.gemm(torch.empty(0, 8).to(FP8), torch.empty(5, 8).to(FP8), out=out[:0])


def test_wrong_arguments_are_named(package):
    a, w = torch.randn(70, 8).to(FP8), torch.randn(4, 9).to(FP8)
    with pytest.raises(RuntimeError, match=r"K of a, got \[4, 9\] for an a of \[70, 8\]"):
        package.gemm(a, w, out=torch.empty(70, 4))


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("scale_w", ["tensor", "row", "block"])
@pytest.mark.parametrize("k", [320, 2176])
@pytest.mark.parametrize("rows", [31, 32, 33, 64, 65, 200])
def test_fp8_linear_on_both_sides(package, rows, k, scale_w, out_dtype):
    n = 150
    x, w = torch.randn(rows, k).bfloat16(), padded_fp8(n, k, FP8, CPU)
    scale = random_scale(scale_w, n, k, CPU, 128)
    bias = torch.randn(n).to(out_dtype)
    actual = package.fp8_linear(x, w, scale, bias=bias, out_dtype=out_dtype)
    q, scale_x = package.quantize_fp8(x, group_size=128 if scale_w == "block" else None)
    dequantize = package.reference.dequantize
    operands = dequantize(q, scale_x, 1), dequantize(w, scale, 128)
    assert_product_close(actual, operands[0] @ operands[1].t() + bias.double(), operands)
