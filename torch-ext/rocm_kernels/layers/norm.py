"""RMSNorm, and a norm whose result goes into a linear."""

from typing import Optional

import torch
from torch import nn

from ..functional import rms_norm, rms_norm_fp8
from ..models.norms import eps_of
from .linear import is_weight_only, linear, product, quantization


class RMSNorm(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, eps_of(self))


def norm_linear(
    x: torch.Tensor, residual: Optional[torch.Tensor], norm: nn.Module, fp8: nn.Module
) -> torch.Tensor:
    """``fp8(norm(x + residual))``; the sum is left in ``residual``."""
    if is_weight_only(fp8):
        return linear(rms_norm(x, norm.weight, eps_of(norm), residual), fp8)
    q, scale = rms_norm_fp8(x, norm.weight, eps_of(norm), residual, **quantization(fp8))
    return product(q, scale, fp8, x.dtype)
