"""Linears with FP8 weights, and what other layers do with them.

The functions take modules with the attributes of ``FP8Linear``.
"""

from typing import Any, Dict

import torch
from torch import nn

from ..functional import SCALE_BLOCK, fp8_linear, quantize_fp8
from ..functional.fp8 import quantize_fp8_within
from ..functional.product import weight_only_linear
from ..models.linear import Projected


class FP8Linear(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result
        return linear(input, self)


class FP8LinearPart(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result[..., self.start : self.stop]
        return linear(input, self)


class FbgemmFp8Linear(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_fp8_within(x, self.input_scale_ub, fp8_dtype=self.weight.dtype)
        return fp8_linear(
            q, self.weight, self.weight_scale, scale_x=scale, bias=self.bias, out_dtype=x.dtype
        )


def is_fp8(module: nn.Module) -> bool:
    return hasattr(module, "weight_scale_inv")


def is_weight_only(fp8: nn.Module) -> bool:
    return fp8.activation_scheme == "none"


def quantization(fp8: nn.Module) -> Dict[str, Any]:
    """How an FP8 linear wants its input quantised, as keyword arguments of the quantising ops."""
    static, scale_w = fp8.activation_scale, fp8.weight_scale_inv
    blocks = static is None and scale_w.dim() == 2 and scale_w.shape[1] > 1
    return {
        "scale": static,
        "group_size": SCALE_BLOCK if blocks else None,
        "fp8_dtype": fp8.weight.dtype,
    }


def product(
    q: torch.Tensor, scale: torch.Tensor, fp8: nn.Module, dtype: torch.dtype
) -> torch.Tensor:
    """An FP8 linear on an input that is quantised already."""
    return fp8_linear(
        q, fp8.weight, fp8.weight_scale_inv, scale_x=scale, bias=fp8.bias, out_dtype=dtype
    )


def linear(x: torch.Tensor, fp8: nn.Module) -> torch.Tensor:
    """An FP8 linear on a 16-bit or float32 input."""
    if x.dim() != 2:
        out = linear(x.reshape(-1, x.shape[-1]), fp8)
        return out.view(*x.shape[:-1], out.shape[-1])
    if x.stride(1) != 1:  # nn.Linear takes it, and Mamba hands on a transposed one
        x = x.contiguous()
    if is_weight_only(fp8):
        return weight_only_linear(x, fp8.weight, fp8.weight_scale_inv, fp8.bias)
    q, scale = quantize_fp8(x, **quantization(fp8))
    return product(q, scale, fp8, x.dtype)
