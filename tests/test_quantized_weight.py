"""quantize_model_ quantises weights by the package's own op, with the bits of the definition."""

import importlib

import pytest
import torch
from tiny_models import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DIALECTS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
LAYOUTS = ("plain", "transposed", "rows apart", "one row repeated", "no rows", "no columns")


@pytest.fixture
def package(best_package):
    return best_package


def weight_of(layout, dtype, device):
    """With magnitudes from subnormal FP8 to beyond its range, a row of zeros, an infinity."""
    n, k = {"no rows": (0, 40), "no columns": (8, 0)}.get(layout, (70, 333))
    weight = torch.randn(n, k, device=device) * torch.logspace(-6, 2, n, device=device)[:, None]
    if weight.numel():
        weight[3], weight[5, 7] = 0, torch.inf
    weight = weight.to(dtype)
    if layout == "transposed":
        return weight.t().contiguous().t()
    if layout == "rows apart":
        wide = torch.full((n, k + 11), torch.nan, dtype=dtype, device=device)
        wide[:, 3:-8] = weight
        return wide[:, 3:-8]
    return weight[:1].expand(n, k) if layout == "one row repeated" else weight


def has_no_kernel(package, monkeypatch):
    """As if the build had none for any device: torch refuses the call itself."""
    ours = importlib.import_module(f"{package.__name__}.functional.fp8")
    library = torch.library.Library("rocm_kernels_without_kernels", "FRAGMENT")
    schema = str(ours._swiglu_fp8._schema).partition("::")[2]
    library.define(schema)
    without = torch.ops.rocm_kernels_without_kernels.swiglu_fp8.default
    monkeypatch.setattr(ours, "_swiglu_fp8", without)
    return library  # which defines the op for as long as it lives


def assert_same_bits(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.is_contiguous()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("by", ["op", "definition"])
@pytest.mark.parametrize("fp8_dtype", DIALECTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_has_the_bits_of_the_definition(
    package, device, monkeypatch, layout, dtype, fp8_dtype, by
):
    made = importlib.import_module(f"{package.__name__}.models.quantized_weight")
    weight = weight_of(layout, dtype, device).requires_grad_()
    given = torch.tensor([0.037], device=device)
    expected = package.reference.quantize_fp8(weight.detach(), fp8_dtype=fp8_dtype)
    by_given = package.reference.quantize_fp8(weight.detach(), scale=given, fp8_dtype=fp8_dtype)
    if by == "definition":
        library = has_no_kernel(package, monkeypatch)
        monkeypatch.setattr(made, "_ELEMENTS", 1000)  # three rows at a time
    assert_same_bits(made.quantize_weight(weight, fp8_dtype), expected)
    assert_same_bits(made.quantize_weight(weight, fp8_dtype, scale=given), by_given)
    if by == "definition":
        library._destroy()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", ["tensor", "rows", "blocks"])
@torch.no_grad()
def test_an_edited_weight_keeps_the_form_of_its_scales(package, device, form, dtype):
    edits = importlib.import_module(f"{package.__name__}.models.edits")
    (n, k), fp8_dtype = (150, 260), package.native_fp8_dtype(device)
    weight = (torch.randn(n, k, device=device) * 0.1).to(dtype)
    shape = {"tensor": (1,), "rows": (n, 1), "blocks": (2, 3)}[form]
    before = torch.zeros(n, k, device=device).to(fp8_dtype)
    linear = package.models.FP8Linear(before, torch.ones(shape, device=device))
    q, scale = edits.quantized_like(weight, linear)
    # From one call of the definition for each scale.
    size = {"tensor": (n, k), "rows": (1, k), "blocks": (128, 128)}[form]
    expected, scales = torch.empty_like(q), []
    for i in range(0, n, size[0]):
        for j in range(0, k, size[1]):
            part = weight[i : i + size[0], j : j + size[1]]
            values, one = package.reference.quantize_fp8(part.reshape(1, -1), fp8_dtype=fp8_dtype)
            expected[i : i + size[0], j : j + size[1]] = values.view(part.shape)
            scales.append(one)
    assert_same_bits((q, scale), (expected, torch.cat(scales).view(shape)))


class Float32Elements(TorchDispatchMode):
    """The size of the largest float32 tensor that any call of torch returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
                self.largest = max(self.largest, made.numel())
        return result


def test_a_16_bit_model_is_quantised_without_a_float32_copy(package, device):
    model = tiny_llama(torch.bfloat16).to(device)
    smallest = min(p.numel() for p in model.parameters() if p.dim() > 1)
    with Float32Elements() as seen:
        package.models.quantize_model_(model)
    # Scales, and what a layer is tried with.
    assert 0 < seen.largest < smallest


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_are_quantised_without_a_float32_copy(package, device, is_transposed):
    """Nor to find that they never were MXFP4, unless their first row might have been."""
    convert = importlib.import_module(f"{package.__name__}.models.convert_experts")
    weight = torch.randn(3, 40, 96, device=device).bfloat16()
    if is_transposed:
        weight = weight.mT.contiguous().mT
    with Float32Elements() as seen:
        assert convert.encode_mxfp4(weight) is None
        made = convert._quantized(weight, torch.float8_e4m3fn, None)
    assert 0 < seen.largest <= 3 * 40
    for expert, *pair in zip(weight, *made, strict=True):
        assert_same_bits(pair, package.reference.quantize_fp8(expert))
    weight[:, 0] = 0.5
    assert convert.encode_mxfp4(weight) is None
    weight[:, 1:] = -3
    assert convert.encode_mxfp4(weight) is not None
