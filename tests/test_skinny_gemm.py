"""skinny_gemm, fp8_linear and to_native_fp8 against the reference, on every backend of --device."""

import pytest
import torch
from compare import Guarded, assert_product_close, bits, strided

ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64]
SHAPES = [(1, 1), (3, 5), (17, 127), (64, 512), (130, 1000), (257, 1536), (96, 4099)]
SCALES = ["none", "tensor", "row", "block"]
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def reference(package):
    return package.reference


def padded_fp8(rows, columns, fp8_dtype, device):
    wide = torch.randn(rows, columns + 11, device=device).mul(2).to(fp8_dtype)
    return wide[:, 3 : 3 + columns]


def random_scale(kind, rows, k, device, row_block):
    def uniform(*shape):
        return torch.rand(shape, device=device) * 0.05 + 0.01

    return {
        "none": lambda: None,
        "tensor": lambda: uniform(1),
        "row": lambda: uniform(rows, 1),
        "block": lambda: uniform(-(-rows // row_block), -(-k // 128)),
    }[kind]()


def dequantized(reference, a, w, scale_a, scale_w):
    return reference.dequantize(a, scale_a, 1), reference.dequantize(w, scale_w, 128)


def check(backend, reference, a, w, scale_a=None, scale_w=None, bias=None, out_dtype=None):
    actual = backend.ops.skinny_gemm(a, w, scale_a, scale_w, bias=bias, out_dtype=out_dtype)
    operands = dequantized(reference, a, w, scale_a, scale_w)
    exact = operands[0] @ operands[1].t() + (0 if bias is None else bias.double())
    assert_product_close(actual, exact, operands)
    return actual


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_and_shapes(backend, reference, rows, shape):
    n, k = shape
    a = padded_fp8(rows, k, backend.fp8_dtype, backend.device)
    w = padded_fp8(n, k, backend.fp8_dtype, backend.device)
    scale_a = random_scale("row", rows, k, backend.device, 1)
    scale_w = random_scale("row", n, k, backend.device, 128)
    check(backend, reference, a, w, scale_a, scale_w)


# A kernel of its own on CUDA alone, and the reference allocates its outputs.
@pytest.mark.not_on("reference", "simulator")
@pytest.mark.parametrize("out_dtype", HALVES)
@pytest.mark.parametrize("shape", [(2304, 1024), (5001, 640), (8192, 512), (17501, 128)])
@pytest.mark.parametrize("rows", [17, 40, 64])
def test_many_rows_and_large_weights(backend, reference, rows, shape, out_dtype):
    """Weights beyond 2 MB, which sm_90 takes with its warpgroup instructions beyond 16 rows."""
    n, k = shape
    a = torch.randn(rows, k + 16, device=backend.device).to(backend.fp8_dtype)[:, :k]
    w = torch.randn(n, k, device=backend.device).to(backend.fp8_dtype)
    scale_a = random_scale("row", rows, k, backend.device, 1)
    scale_w = random_scale("row", n, k, backend.device, 128)
    bias = torch.randn(n, device=backend.device)
    out = Guarded(rows, n, out_dtype, backend.device)
    backend.ops.skinny_gemm(a, w, scale_a, scale_w, bias=bias, out=out.view)
    out.assert_guards_intact()
    actual = check(backend, reference, a, w, scale_a, scale_w, bias, out_dtype)
    assert torch.equal(bits(actual), bits(out.view))


@pytest.mark.parametrize("scale_w", SCALES)
@pytest.mark.parametrize("scale_a", SCALES)
@pytest.mark.parametrize("rows", [1, 8, 19])
def test_scales(backend, reference, rows, scale_a, scale_w):
    n, k, device = 200, 640, backend.device
    a = padded_fp8(rows, k, backend.fp8_dtype, device)
    w = padded_fp8(n, k, backend.fp8_dtype, device)
    scale_a = random_scale(scale_a, rows, k, device, 1)
    scale_w = random_scale(scale_w, n, k, device, 128)
    check(backend, reference, a, w, scale_a, scale_w, out_dtype=torch.float32)


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_operands(backend, reference, dtype, rows):
    for n, k in [(1, 3), (65, 130), (128, 2049)]:
        a, w = strided(rows, k, dtype, backend.device), strided(n, k, dtype, backend.device)
        actual = check(backend, reference, a, w)
        assert actual.dtype == dtype


@pytest.mark.parametrize("scale_w", SCALES)
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("dtype", HALVES)
def test_weight_only(backend, reference, dtype, rows, scale_w):
    n, k = 130, 1025
    a = strided(rows, k, dtype, backend.device)
    w = padded_fp8(n, k, backend.fp8_dtype, backend.device)
    scale = random_scale(scale_w, n, k, backend.device, 128)
    check(backend, reference, a, w, None, scale)


@pytest.mark.parametrize("bias_float32", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, *HALVES])
def test_bias_and_output_dtype(backend, reference, out_dtype, bias_float32):
    n, k, device = 131, 384, backend.device
    bias = torch.randn(n, device=device).to(torch.float32 if bias_float32 else out_dtype)
    a = padded_fp8(6, k, backend.fp8_dtype, device)
    w = padded_fp8(n, k, backend.fp8_dtype, device)
    scales = (random_scale("tensor", 1, k, device, 1) for _ in range(2))
    assert check(backend, reference, a, w, *scales, bias, out_dtype).dtype == out_dtype


@pytest.mark.parametrize("fp8_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_every_fp8_value_multiplies_exactly(backend, reference, fp8_dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=backend.device).view(fp8_dtype)
    w = codes.view(256, 1).contiguous()
    a = torch.ones(1, 1, device=backend.device).to(fp8_dtype)
    on_amd = backend.name in ("rocm", "simulator")
    # Matrix instructions know one dialect; the plain design decodes both.
    if on_amd and fp8_dtype != backend.fp8_dtype:
        assert backend.ops.gemm_config(a, w).startswith("plain")
    out = backend.ops.skinny_gemm(a, w, out_dtype=torch.float32)[0]
    values = codes.float()
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out[~values.isnan()], values[~values.isnan()])


def test_nan_stays_in_its_row_and_channel(backend):
    a = torch.randn(5, 300, device=backend.device).to(backend.fp8_dtype)
    w = torch.randn(70, 300, device=backend.device).to(backend.fp8_dtype)
    nan = torch.tensor(float("nan"), device=backend.device).to(backend.fp8_dtype)
    a[3, 7], w[33, 299] = nan, nan
    out = backend.ops.skinny_gemm(a, w, out_dtype=torch.float32)
    expected = torch.zeros(5, 70, dtype=torch.bool, device=backend.device)
    expected[3], expected[:, 33] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.not_on("reference")  # it allocates its outputs
@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("shape", [(1, 64), (37, 200), (128, 4096)])
def test_writes_only_its_output(backend, rows, shape):
    n, k = shape
    a = padded_fp8(rows, k, backend.fp8_dtype, backend.device)
    w = padded_fp8(n, k, backend.fp8_dtype, backend.device)
    out = Guarded(rows, n, torch.bfloat16, backend.device)
    backend.ops.skinny_gemm(a, w, out=out.view)
    out.assert_guards_intact()
    assert torch.equal(out.view, backend.ops.skinny_gemm(a, w))


@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_same_bits_every_run(backend, rows):
    a = padded_fp8(rows, 8192, backend.fp8_dtype, backend.device)
    w = padded_fp8(100, 8192, backend.fp8_dtype, backend.device)
    first = backend.ops.skinny_gemm(a, w)
    for _ in range(3):
        assert torch.equal(bits(backend.ops.skinny_gemm(a, w)), bits(first))


@pytest.mark.parametrize("scales", ["none", "block"])
@pytest.mark.parametrize(
    "last, others", [(16, (1, 2, 5, 8, 9, 15)), (32, (17, 31)), (64, (33, 50))]
)
def test_a_row_does_not_depend_on_the_others_of_its_class(backend, last, others, scales):
    a = padded_fp8(last, 2048, backend.fp8_dtype, backend.device)
    w = padded_fp8(100, 2048, backend.fp8_dtype, backend.device)
    scale_a = random_scale(scales, last, 2048, backend.device, 1)
    scale_w = random_scale(scales, 100, 2048, backend.device, 128)
    whole = backend.ops.skinny_gemm(a, w, scale_a, scale_w)
    # AMX's tiles take two rows or more; one alone is summed in an order of its own.
    by_tiles = backend.name == "cpu" and backend.ops.gemm_config(a, w) == "amx"
    for rows in others[1:] if by_tiles and last == 16 else others:
        part = None if scale_a is None else scale_a[:rows]
        assert torch.equal(
            bits(backend.ops.skinny_gemm(a[:rows], w, part, scale_w)), bits(whole[:rows])
        )


@pytest.mark.not_on("reference")
@pytest.mark.parametrize("rows", [1, 16, 30, 64])
def test_gemm_of_few_rows_is_the_same(backend, rows):
    a = padded_fp8(rows, 2048, backend.fp8_dtype, backend.device)
    w = padded_fp8(100, 2048, backend.fp8_dtype, backend.device)
    assert torch.equal(bits(backend.ops.skinny_gemm(a, w)), bits(backend.ops.gemm(a, w)))


def test_empty(backend):
    a = torch.empty(0, 64, device=backend.device).to(backend.fp8_dtype)
    w = torch.randn(5, 64, device=backend.device).to(backend.fp8_dtype)
    assert backend.ops.skinny_gemm(a, w).shape == (0, 5)
    assert backend.ops.skinny_gemm(w[:, :0], w[:, :0]).eq(0).all()


@pytest.mark.parametrize("scale_w", ["tensor", "row", "block"])
@pytest.mark.parametrize("rows", [1, 3, 64, 65, 200])
def test_fp8_linear(backend, reference, rows, scale_w):
    n, k, device = 144, 256, backend.device
    x = torch.randn(2, rows, k, device=device).bfloat16()[1]
    w = torch.randn(n, k, device=device).to(backend.fp8_dtype)
    scale = random_scale(scale_w, n, k, device, 128)
    bias = torch.randn(n, device=device).bfloat16()
    actual = backend.ops.fp8_linear(x, w, scale, bias=bias)
    expected = reference.fp8_linear(x, w, scale, bias=bias)
    assert actual.dtype == torch.bfloat16
    # Quantising x may turn a tie the other way, which moves a sum by one FP8 step of one term.
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    static = torch.tensor([0.01], device=device)
    actual = backend.ops.fp8_linear(x, w, scale, scale_x=static, out_dtype=torch.float32)
    expected = reference.fp8_linear(x, w, scale, scale_x=static, out_dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


def test_fp8_linear_of_quantized_input(backend, reference):
    x = torch.randn(70, 256, device=backend.device).bfloat16()
    w = torch.randn(64, 256, device=backend.device).to(backend.fp8_dtype)
    scale_w = random_scale("row", 64, 256, backend.device, 128)
    q, scale = backend.ops.quantize_fp8(x, fp8_dtype=backend.fp8_dtype)
    actual = backend.ops.fp8_linear(q, w, scale_w, scale_x=scale)
    assert torch.equal(bits(actual), bits(backend.ops.fp8_linear(x, w, scale_w)))


def test_fp8_linear_path_can_be_asked(best_package, device):
    package = best_package
    w = torch.zeros(16, 16, device=device).to(package.native_fp8_dtype(device))
    scale = torch.ones(16, 1, device=device)
    nvidia = device.type == "cuda" and torch.version.hip is None
    assert package.fp8_linear_path(16, w, scale) == "gemm"
    one = torch.ones(1, device=device)
    assert package.fp8_linear_path(4096, w, one) == ("scaled_mm" if nvidia else "gemm")
    blocks = torch.ones(1, 2, device=device)
    assert package.fp8_linear_path(4096, w, blocks) == "gemm"
    # By wgmma gemm is quicker than the library with a scale a row, and with weights alone.
    older = nvidia and torch.cuda.get_device_capability(device) != (9, 0)
    expected = "scaled_mm" if older else "gemm"
    assert package.fp8_linear_path(4096, w, scale) == expected
    for scales in (scale, blocks):
        assert package.fp8_linear_path(4096, w, scales, weight_only=True) == expected


def test_dialect_conversion_is_exact(package, reference):
    codes = torch.arange(256, dtype=torch.uint8)
    scale = torch.tensor([0.5])
    w = codes.view(torch.float8_e4m3fn)
    fnuz, doubled = package.to_native_fp8(w, scale, fp8_dtype=torch.float8_e4m3fnuz)
    torch.testing.assert_close(
        fnuz.float() * doubled, w.float() * scale, rtol=0, atol=0, equal_nan=True
    )
    expected = reference.to_native_fp8(w, scale, fp8_dtype=torch.float8_e4m3fnuz)
    assert torch.equal(bits(fnuz), bits(expected[0])) and torch.equal(doubled, expected[1])

    back, halved = package.to_native_fp8(fnuz, doubled, fp8_dtype=torch.float8_e4m3fn)
    kept = codes != 0x80  # -0 has become 0
    torch.testing.assert_close(back.float()[kept], w.float()[kept], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(halved, scale)

    largest = torch.tensor([240.0, -240.0]).to(torch.float8_e4m3fnuz)
    back, halved = package.to_native_fp8(largest, scale, fp8_dtype=torch.float8_e4m3fn)
    assert (back.float() * halved).tolist() == [112.0, -112.0]
    same, same_scale = package.to_native_fp8(w, scale, fp8_dtype=w.dtype)
    assert same is w and same_scale is scale
