"""Which way fp8_linear goes where the backend leaves many rows to torch's own product."""

import pytest
import torch


@pytest.fixture
def library(package, monkeypatch):
    """The CPU's package, told that the library is quicker; what was asked of that."""
    asked = []

    def scaled_mm(a, w, scale_a, scale_w, bias, out_dtype):
        asked.append(out_dtype)
        product = (a.float() @ w.float()) * scale_a * scale_w
        if bias is not None:  # as torch demands it
            assert out_dtype != torch.float32 and bias.dtype == out_dtype and bias.is_contiguous()
            product = product + bias.float()
        # As torch does: with scales by row it has kernels of bfloat16 results alone.
        assert scale_a.numel() == 1 or out_dtype == torch.bfloat16
        return product.to(out_dtype)

    monkeypatch.setattr(package.functional.product, "_known_linear_limits", lambda *_: (0, 0))
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return asked


def operands(package, per_row):
    x, w = torch.randn(40, 256), torch.randn(48, 256)
    q, scale = package.reference.quantize_fp8(x, scale=None if per_row else torch.tensor([0.01]))
    w, scale_w = package.reference.quantize_fp8(w)
    return q, scale.reshape(-1, 1), w, scale_w if per_row else scale_w.mean().reshape(1)


@pytest.mark.parametrize("per_row", [True, False], ids=["by row", "by tensor"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, torch.float32, torch.float16, torch.bfloat16])
def test_results_are_rounded_once(package, library, out_dtype, per_row, bias):
    """With their bias, of whatever dtype and however large."""
    q, scale, w, scale_w = operands(package, per_row)
    bias = None if bias is None else (100 * torch.randn(48, 2)).to(bias)[:, 0]
    out = package.fp8_linear(q, w, scale_w, scale_x=scale, bias=bias, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    path = package.fp8_linear_path(40, w, scale_w, scale, out_dtype=out_dtype)
    by_library = out_dtype == torch.bfloat16 or (not per_row and out_dtype == torch.float16)
    assert path == ("scaled_mm" if by_library else "gemm")
    # A bias of another dtype is added in float32, of which the library's sums have too few bits.
    alike = bias is None or bias.dtype == out_dtype
    assert library == ([out_dtype] if by_library and alike else [])
    exact = package.reference.gemm(q, w, scale, scale_w, bias=bias, out_dtype=torch.float64)
    error = (out.double() - exact).abs() - torch.finfo(out_dtype).eps / 2 * exact.abs()
    assert (error <= 1e-6 * (exact.abs().max())).all()


def test_what_a_path_is_told_without_a_dtype(package, library):
    _, scale, w, scale_w = operands(package, True)
    assert package.fp8_linear_path(40, w, scale_w, scale) == "scaled_mm"
    assert package.fp8_linear_path(40, w, scale_w, weight_only=True) == "scaled_mm"
    weight_only = {"weight_only": True, "out_dtype": torch.float16}
    assert package.fp8_linear_path(40, w, scale_w, **weight_only) == "scaled_mm"
