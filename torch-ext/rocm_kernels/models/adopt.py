"""Linears of FP8 checkpoints, as transformers loads them: readied for their kernel layers."""

from typing import Optional

import torch
from torch import nn

from ..functional import FP8_DTYPES, SCALE_BLOCK, to_native_fp8
from .known import make_known

# Class of an FP8 linear in transformers -> its kernel layer, its scale's name.
_LINEARS = {
    "FP8Linear": ("FP8Linear", "weight_scale_inv"),
    "FbgemmFp8Linear": ("FbgemmFp8Linear", "weight_scale"),
}


def is_adoptable(module: nn.Module) -> bool:
    return type(module).__name__ in _LINEARS and _is_fp8_linear(module)


def adopt(module: nn.Module, fp8_dtype: Optional[torch.dtype]) -> Optional[str]:
    """Readies a checkpoint's FP8 linear for its kernel layer; returns why not, if it cannot."""
    layer_name, scale_name = _LINEARS[type(module).__name__]
    blocks = getattr(module, "block_size", None)
    if blocks is not None and tuple(blocks) != (SCALE_BLOCK, SCALE_BLOCK):
        return f"has scale blocks of {tuple(blocks)}, not {(SCALE_BLOCK, SCALE_BLOCK)}"
    weight, scale = to_native_fp8(
        module.weight.data, getattr(module, scale_name).data.float(), fp8_dtype=fp8_dtype
    )
    static = getattr(module, "activation_scale", None)
    if static is not None and weight.dtype != module.weight.dtype:
        _, static = to_native_fp8(module.weight.data[:0], static.data, fp8_dtype=weight.dtype)
        module.activation_scale = nn.Parameter(static, requires_grad=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    setattr(module, scale_name, nn.Parameter(scale, requires_grad=False))
    make_known(type(module), layer_name, _is_fp8_linear)
    return None


def _is_fp8_linear(module: nn.Module) -> bool:
    return module.weight.dtype in FP8_DTYPES
