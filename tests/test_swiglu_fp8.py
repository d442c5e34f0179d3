"""swiglu, swiglu_fp8 and quantize_fp8 against the reference, on every backend of --device."""

import pytest
import torch
from compare import Guarded, assert_close, assert_quantized_close, bits, strided
from test_rmsnorm_fp8 import FLOATS, MODES, SHAPES, mode_arguments, scales_a_row

ACTIVATIONS = ["silu", "gelu", "gelu_tanh"]
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


@pytest.fixture
def reference(package):
    return package.reference


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unquantized(backend, reference, shape, dtype, activation):
    rows, columns = shape
    x = strided(rows, 2 * columns, dtype, backend.device) * 3
    actual = backend.ops.swiglu(x, activation=activation)
    expected = reference.swiglu(x, activation=activation)
    # GELU's 1 + erf(gate) cancels for negative gates: what is left is as precise as the gate.
    gate, up = x.float().chunk(2, -1)
    atol = 0 if activation == "silu" else 6e-7 * (gate * up).abs()
    assert_close(actual, expected, rtol=4e-6, atol=atol)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantized(backend, reference, shape, dtype, mode, fp8_dtype):
    gate, up = (strided(*shape, dtype, backend.device) * 3 for _ in range(2))
    arguments = {**mode_arguments(mode, backend.device), "fp8_dtype": fp8_dtype}
    expected = reference.swiglu_fp8(gate, up, **arguments)
    assert_quantized_close(backend.ops.swiglu_fp8(gate, up, **arguments), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_halves_equal_two_tensors(backend, activation):
    gate, up = (torch.randn(5, 771, device=backend.device).half() for _ in range(2))
    halves = torch.cat([gate, up], -1)
    one, _ = backend.ops.swiglu_fp8(halves, activation=activation)
    two, _ = backend.ops.swiglu_fp8(gate, up, activation=activation)
    assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize(backend, reference, dtype, mode, fp8_dtype):
    for shape in SHAPES:
        x = strided(*shape, dtype, backend.device)
        arguments = {**mode_arguments(mode, backend.device), "fp8_dtype": fp8_dtype}
        actual = backend.ops.quantize_fp8(x, **arguments)
        expected = reference.quantize_fp8(x, **arguments)
        # No arithmetic precedes the scale, so nothing may differ.
        assert torch.equal(actual[1], expected[1])
        assert torch.equal(bits(actual[0]), bits(expected[0]))


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
def test_every_16_bit_value_quantizes_as_torch_rounds(backend, fp8_dtype):
    largest = torch.finfo(fp8_dtype).max
    one = torch.ones(1, device=backend.device)
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values.to(backend.device).view(64, 1024)
        q, _ = backend.ops.quantize_fp8(values, scale=one, fp8_dtype=fp8_dtype)
        expected = values.float().clamp(-largest, largest).to(fp8_dtype)
        assert torch.equal(q.float().isnan(), values.isnan())
        kept = ~values.isnan()
        assert torch.equal(bits(q)[kept], bits(expected)[kept])


@pytest.mark.not_on("reference")  # it allocates its outputs
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("columns", [1, 31, 128, 513, 4096])
def test_writes_only_its_outputs(backend, columns, mode):
    rows, device = 3, backend.device
    x = strided(rows, 2 * columns, torch.bfloat16, device)
    before = x.clone()
    out = Guarded(rows, columns, backend.fp8_dtype, device)
    arguments = mode_arguments(mode, device)
    width = scales_a_row(mode, columns)
    scales = torch.full((rows + 2, width), 7.0, device=device)
    destination = (out.view, scales[1:-1]) if width else out.view
    backend.ops.swiglu_fp8(x, **arguments, out=destination)
    out.assert_guards_intact()
    assert (scales[0] == 7).all() and (scales[-1] == 7).all()
    assert torch.equal(x, before)
    expected, _ = backend.ops.swiglu_fp8(x, **arguments)
    assert torch.equal(bits(out.view), bits(expected))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_finite_and_zero_rows(backend, reference, activation):
    inf, nan = float("inf"), float("nan")
    gate, up = (torch.randn(7, 300, device=backend.device) for _ in range(2))
    gate[1] = 0
    gate[2, 17], up[3, 18] = nan, nan
    gate[4, 200], up[5, 201] = inf, -inf
    gate[6, 3] = -inf
    for dtype in FLOATS:
        args = gate.to(dtype), up.to(dtype)
        for arguments in ({}, {"group_size": 128}, {"scale": torch.ones(1, device=backend.device)}):
            arguments = {**arguments, "activation": activation, "fp8_dtype": backend.fp8_dtype}
            actual = backend.ops.swiglu_fp8(*args, **arguments)
            assert_quantized_close(actual, reference.swiglu_fp8(*args, **arguments))


@pytest.mark.parametrize("mode", MODES)
def test_rows_longer_than_what_is_kept(backend, reference, mode):
    """The CPU keeps 16,384 columns until it knows a row's scale, and computes the rest twice."""
    gate, up = (torch.randn(2, 18469, device=backend.device).bfloat16() for _ in range(2))
    arguments = {**mode_arguments(mode, backend.device), "fp8_dtype": backend.fp8_dtype}
    expected = reference.swiglu_fp8(gate, up, **arguments)
    assert_quantized_close(backend.ops.swiglu_fp8(gate, up, **arguments), expected)


def test_a_row_does_not_depend_on_the_others(backend):
    x = torch.randn(64, 2 * 1030, device=backend.device).bfloat16()
    whole, _ = backend.ops.swiglu_fp8(x)
    for rows in (0, 1, 9):
        part, scale = backend.ops.swiglu_fp8(x[:rows])
        assert scale.shape == (rows, 1)
        assert torch.equal(bits(part), bits(whole[:rows]))


@pytest.mark.parametrize("columns", [8200, 14336, 18944, 28672])
def test_a_long_row_does_not_depend_on_how_many_there_are(backend, reference, columns):
    """A few have teams of 1024 threads, or clusters; of many, each has a block of an NVIDIA GPU."""
    x = torch.randn(300 if backend.name == "cuda" else 3, 2 * columns).bfloat16()
    x[1, 7] = float("nan")
    x = x.to(backend.device)
    whole = backend.ops.swiglu_fp8(x, fp8_dtype=backend.fp8_dtype)
    assert_quantized_close(whole, reference.swiglu_fp8(x, fp8_dtype=backend.fp8_dtype))
    few = backend.ops.swiglu_fp8(x[:2], fp8_dtype=backend.fp8_dtype)
    assert torch.equal(few[1], whole[1][:2]) and torch.equal(bits(few[0]), bits(whole[0][:2]))


def test_same_bits_every_run(backend):
    x = torch.randn(17, 2 * 8197, device=backend.device).half()
    first, _ = backend.ops.swiglu_fp8(x)
    for _ in range(2):
        assert torch.equal(bits(backend.ops.swiglu_fp8(x)[0]), bits(first))
