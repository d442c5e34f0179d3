"""Kernel layers of linears with FP8 weights, and the functions by which other layers run such a
linear.

The functions take modules with the attributes of ``FP8Linear``.
"""

from typing import Any, Dict, Optional, Union

import torch
from torch import nn

from ..functional import SCALE_BLOCK, fp8_linear, quantize_fp8
from ..functional.fp8 import quantize_fp8_within
from ..functional.product import weight_only_linear
from ..models import linear as models
from ..models.hooks import is_offloaded
from ..models.linear import Projected, Quantized, finished, inner_bias, scale_fmt_of
from .training import for_inference


class FP8Linear(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result
        return linear(input, self)


class FP8LinearPart(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result[..., self.start : self.stop]
        if is_offloaded(self.fused):  # it alone brings its weight
            return self.fused(input)[..., self.start : self.stop]
        return linear(input, self)


class FbgemmFp8Linear(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_fp8_within(x, self.input_scale_ub, fp8_dtype=self.weight.dtype)
        return fp8_linear(
            q, self.weight, self.weight_scale, scale_x=scale, bias=self.bias, out_dtype=x.dtype
        )


def is_fp8(module: nn.Module) -> bool:
    return hasattr(module, "weight_scale_inv")


def is_weight_only(fp8: nn.Module) -> bool:
    return fp8.activation_scheme == "none"


def needs_whole_rows(fp8: nn.Module) -> bool:
    """Whether an FP8 linear has a share of K, and its input gets the scales of whole rows."""
    sums = getattr(fp8, "sums", None)  # another's linear has none
    return sums is not None and sums.whole_row_scales and fp8.activation_scheme == "dynamic"


def quantization(fp8: nn.Module) -> Dict[str, Any]:
    """How an FP8 linear wants its input quantised, as keyword arguments of the quantising ops."""
    static, scale_w = fp8.activation_scale, fp8.weight_scale_inv
    blocks = static is None and scale_w.dim() == 2 and scale_w.shape[1] > 1
    return {
        "scale": static,
        "group_size": SCALE_BLOCK if blocks else None,
        "scale_ub": getattr(fp8, "scale_ub", None),
        "scale_fmt": scale_fmt_of(fp8) if static is None else None,
        "fp8_dtype": fp8.weight.dtype,
    }


def is_plain(fp8: nn.Module) -> bool:
    """Whether an FP8 linear quantises its input with a scale for each row, by its values alone."""
    options = quantization(fp8)
    del options["fp8_dtype"]
    none = all(option is None for option in options.values())
    return none and not is_weight_only(fp8) and not needs_whole_rows(fp8)


def product(x: Quantized, fp8: nn.Module) -> torch.Tensor:
    """An FP8 linear on an input that is quantised already."""
    out = fp8_linear(
        x.q, fp8.weight, fp8.weight_scale_inv, scale_x=x.scale, bias=_bias(fp8), out_dtype=x.dtype
    )
    return _finished(out, fp8)


def apply(fp8: nn.Module, x: Quantized) -> torch.Tensor:
    """An FP8 linear as a module, with what is hooked to it, if it is one of ours: another's own
    forward takes no :class:`Quantized`."""
    ours = isinstance(fp8, (models.FP8Linear, models.FP8LinearPart))
    return fp8(x) if ours else product(x, fp8)


def linear(
    x: Union[torch.Tensor, Quantized], fp8: nn.Module, out_dtype: Optional[torch.dtype] = None
) -> torch.Tensor:
    """An FP8 linear on a 16-bit or float32 input, or a quantised one. ``out_dtype``: None is x's,
    and another for one that :func:`is_plain` alone."""
    if isinstance(x, Quantized):
        return product(x, fp8)
    if x.dim() != 2:
        out = linear(x.reshape(-1, x.shape[-1]), fp8)
        return out.view(*x.shape[:-1], out.shape[-1])
    if is_weight_only(fp8):
        return _finished(weight_only_linear(x, fp8.weight, fp8.weight_scale_inv, _bias(fp8)), fp8)
    if is_plain(fp8):
        weight, scale = fp8.weight, fp8.weight_scale_inv
        return _finished(fp8_linear(x, weight, scale, bias=_bias(fp8), out_dtype=out_dtype), fp8)
    quantize = fp8.sums.quantize if needs_whole_rows(fp8) else quantize_fp8
    q, scale = quantize(x, **quantization(fp8))
    return product(Quantized(q, scale, x.dtype), fp8)


def _bias(fp8: nn.Module) -> Any:
    return inner_bias(fp8) if _has_group(fp8) else fp8.bias


def _finished(out: torch.Tensor, fp8: nn.Module) -> torch.Tensor:
    return finished(out, fp8) if _has_group(fp8) else out


def _has_group(fp8: nn.Module) -> bool:
    return getattr(fp8, "process_group", None) is not None  # transformers' FP8Linear has none
