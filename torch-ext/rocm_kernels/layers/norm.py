"""RMSNorm, and a norm whose result goes into a linear."""

from typing import Optional

import torch
from torch import nn

from ..functional import rms_norm, rms_norm_fp8
from ..models.norms import eps_of, weight_of
from .linear import is_weight_only, linear, product, quantization


class RMSNorm(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return norm_rows(hidden_states, None, self)


def norm_rows(x: torch.Tensor, residual: Optional[torch.Tensor], norm: nn.Module) -> torch.Tensor:
    """``norm(x + residual)``; the sum is left in ``residual``."""
    return rms_norm(x, weight_of(norm), eps_of(norm), residual)


def norm_linear(
    x: torch.Tensor, residual: Optional[torch.Tensor], norm: nn.Module, fp8: nn.Module
) -> torch.Tensor:
    """``fp8(norm(x + residual))``; the sum is left in ``residual``."""
    if is_weight_only(fp8):
        return linear(norm_rows(x, residual, norm), fp8)
    q, scale = rms_norm_fp8(x, weight_of(norm), eps_of(norm), residual, **quantization(fp8))
    return product(q, scale, fp8, x.dtype)
