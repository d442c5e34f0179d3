"""rmsnorm and rmsnorm_fp8 against the reference, on every backend of --device."""

import pytest
import torch
from compare import Guarded, assert_close, assert_quantized_close, bits, strided

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (3, 3), (2, 575), (7, 576), (5, 769), (4, 1024), (3, 5137), (2, 16384)]
MODES = {
    "static": {"scale": 0.013},
    "per_token": {},
    "per_group": {"group_size": 128},
    "per_token_ub": {"scale_ub": 1.5},
    "per_token_ub_ue8m0": {"scale_ub": 1.5, "scale_fmt": "ue8m0"},
    "per_group_ue8m0": {"group_size": 128, "scale_fmt": "ue8m0"},
}


def mode_arguments(mode, device):
    arguments = dict(MODES[mode])
    if "scale" in arguments:
        arguments["scale"] = torch.tensor([arguments["scale"]], device=device)
    return arguments


def scales_a_row(mode, columns):
    """How many a call writes."""
    if mode == "static":
        return 0
    return -(-columns // 128) if "group_size" in MODES[mode] else 1


def make_inputs(rows, hidden, dtype, device, weight_dtype=None):
    x, residual = strided(rows, hidden, dtype, device), strided(rows, hidden, dtype, device)
    weight = (torch.randn(hidden, device=device) + 1).to(weight_dtype or dtype)
    return x, residual, weight


@pytest.fixture
def reference(package):
    return package.reference


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unquantized(backend, reference, shape, dtype, with_residual):
    x, residual, weight = make_inputs(*shape, dtype, backend.device)
    expected_residual, actual_residual = residual.clone(), residual.clone()
    expected = reference.rmsnorm(x, weight, 1e-5, expected_residual if with_residual else None)
    actual = backend.ops.rmsnorm(x, weight, 1e-5, actual_residual if with_residual else None)
    assert_close(actual, expected)
    assert torch.equal(actual_residual, expected_residual)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fp8_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantized(backend, reference, shape, dtype, mode, fp8_dtype):
    x, residual, weight = make_inputs(*shape, dtype, backend.device)
    arguments = {**mode_arguments(mode, backend.device), "fp8_dtype": fp8_dtype}
    expected_residual, actual_residual = residual.clone(), residual.clone()
    expected = reference.rmsnorm_fp8(x, weight, 1e-6, expected_residual, **arguments)
    actual = backend.ops.rmsnorm_fp8(x, weight, 1e-6, actual_residual, **arguments)
    assert_quantized_close(actual, expected)
    assert torch.equal(actual_residual, expected_residual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_weight(backend, reference, dtype):
    x, _, weight = make_inputs(4, 770, dtype, backend.device, weight_dtype=torch.float32)
    assert_close(backend.ops.rmsnorm(x, weight), reference.rmsnorm(x, weight))


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 576), (3, 769)])
def test_weight_offset(backend, reference, shape, dtype, weight_dtype, mode):
    """Weights of which 1 + weight in their own 16 bits would be another number."""
    x, _, _ = make_inputs(*shape, dtype, backend.device)
    weight = (torch.randn(shape[1], device=backend.device) / 64).to(weight_dtype or dtype)
    if mode is None:
        actual = backend.ops.rmsnorm(x, weight, 1e-5, weight_offset=1.0)
        h = x.double()
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        assert_close(actual, (normed * (1 + weight.double())).to(dtype))
        return
    arguments = {**mode_arguments(mode, backend.device), "fp8_dtype": backend.fp8_dtype}
    actual = backend.ops.rmsnorm_fp8(x, weight, 1e-5, weight_offset=1.0, **arguments)
    weight = weight.float() + 1
    expected = reference.rmsnorm_fp8(x, weight, 1e-5, **arguments)
    assert_quantized_close(actual, expected)


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 576), (3, 769), (2, 16384)])
def test_the_sum_goes_to_residual_out(backend, shape, dtype, quantizes):
    """The same bits as in place, and the residual is left as it was."""
    x, residual, weight = make_inputs(*shape, dtype, backend.device)
    in_place, before = residual.clone(), residual.clone()
    h = Guarded(*shape, dtype, backend.device)
    op = backend.ops.rmsnorm_fp8 if quantizes else backend.ops.rmsnorm
    expected = op(x, weight, 1e-5, in_place)
    actual = op(x, weight, 1e-5, residual, residual_out=h.view)
    assert torch.equal(residual, before)
    assert torch.equal(h.view, in_place)
    h.assert_guards_intact()
    if not quantizes:
        expected, actual = [expected], [actual]
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("shape", [(2, 5), (6, 4096)])
def test_leading_dimensions(backend, reference, shape):
    x = torch.randn(2, *shape, dtype=torch.bfloat16, device=backend.device)
    weight = torch.randn(shape[-1], dtype=torch.bfloat16, device=backend.device)
    q, scale = backend.ops.rmsnorm_fp8(x, weight)
    assert q.shape == x.shape and scale.shape == (2, shape[0], 1)
    assert_quantized_close((q, scale), reference.rmsnorm_fp8(x, weight, fp8_dtype=q.dtype))


@pytest.mark.not_on("reference")  # it allocates its outputs
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hidden", [1, 31, 128, 513, 4096])
def test_writes_only_its_outputs(backend, hidden, mode):
    rows, device = 3, backend.device
    x, _, weight = make_inputs(rows, hidden, torch.bfloat16, device)
    residual = Guarded(rows, hidden, torch.bfloat16, device)
    residual.view.copy_(strided(rows, hidden, torch.bfloat16, device))
    out = Guarded(rows, hidden, backend.fp8_dtype, device)
    arguments = mode_arguments(mode, device)
    columns = scales_a_row(mode, hidden)
    scales = torch.full((rows + 2, columns), 7.0, device=device)
    if columns:
        arguments["out"] = (out.view, scales[1:-1])
    else:
        arguments["out"] = out.view
    copy = residual.view.clone()
    x_before = x.clone()
    backend.ops.rmsnorm_fp8(x, weight, residual=residual.view, **arguments)
    out.assert_guards_intact()
    residual.assert_guards_intact()
    assert (scales[0] == 7).all() and (scales[-1] == 7).all()
    assert torch.equal(x, x_before)
    arguments.pop("out")
    expected = backend.ops.rmsnorm_fp8(x, weight, residual=copy, **arguments)
    assert torch.equal(bits(out.view), bits(expected[0]))


def test_not_finite_and_zero_rows(backend, reference):
    x = torch.randn(5, 600, device=backend.device)
    x[1] = 0
    x[2, 17] = float("nan")
    x[3, 400] = float("inf")
    x[4, 5] = -float("inf")
    weight = torch.randn(600, device=backend.device)
    for dtype in FLOATS:
        args = x.to(dtype), weight.to(dtype)
        assert_close(backend.ops.rmsnorm(*args), reference.rmsnorm(*args))
        for arguments in ({}, {"group_size": 128}, {"scale": torch.ones(1, device=backend.device)}):
            arguments["fp8_dtype"] = backend.fp8_dtype
            actual = backend.ops.rmsnorm_fp8(*args, **arguments)
            assert_quantized_close(actual, reference.rmsnorm_fp8(*args, **arguments))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_a_row_does_not_depend_on_the_others(backend, rows):
    x, residual, weight = make_inputs(64, 2050, torch.bfloat16, backend.device)
    whole, _ = backend.ops.rmsnorm_fp8(x, weight, residual=residual.clone())
    part, scale = backend.ops.rmsnorm_fp8(x[:rows], weight, residual=residual[:rows].clone())
    assert part.shape == (rows, 2050) and scale.shape == (rows, 1)
    assert torch.equal(bits(part), bits(whole[:rows]))


@pytest.mark.parametrize("hidden", [16384, 16389])
def test_same_bits_every_run(backend, hidden):
    x, residual, weight = make_inputs(17, hidden, torch.float16, backend.device)
    runs = [backend.ops.rmsnorm_fp8(x, weight, residual=residual.clone()) for _ in range(3)]
    for q, scale in runs[1:]:
        assert torch.equal(bits(q), bits(runs[0][0])) and torch.equal(scale, runs[0][1])


def test_empty_rows(backend):
    x = torch.empty(3, 0, device=backend.device)
    assert backend.ops.rmsnorm(x, x[0]).shape == (3, 0)
    q, scale = backend.ops.rmsnorm_fp8(x, x[0])
    assert q.shape == (3, 0) and (scale == torch.finfo(torch.float32).tiny).all()
