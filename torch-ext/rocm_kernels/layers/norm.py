"""RMSNorm, and a norm whose result goes into a linear."""

from typing import Optional

import torch
from torch import nn

from ..functional import rms_norm, rms_norm_fp8
from ..functional.norm import add_residual_
from ..models.linear import Quantized
from ..models.norms import eps_of, weight_of
from .linear import is_weight_only, quantization
from .training import for_inference


class RMSNorm(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return norm_rows(hidden_states, None, self)


def norm_rows(
    x: torch.Tensor, residual: Optional[torch.Tensor], norm: Optional[nn.Module]
) -> torch.Tensor:
    """``norm(x + residual)``, or the sum itself without a norm; it is left in ``residual``."""
    if norm is not None:
        return rms_norm(x, _weight_for(x, norm), eps_of(norm), residual)
    if residual is None:
        return x
    add_residual_(residual, x)
    return residual


def norm_linear(
    x: torch.Tensor, residual: Optional[torch.Tensor], norm: Optional[nn.Module], fp8: nn.Module
) -> torch.Tensor:
    """``fp8(norm_rows(x, residual, norm))``; the sum is left in ``residual``."""
    if norm is None or is_weight_only(fp8):
        return fp8(norm_rows(x, residual, norm))
    weight = _weight_for(x, norm)
    q, scale = rms_norm_fp8(x, weight, eps_of(norm), residual, **quantization(fp8))
    return fp8(Quantized(q, scale, x.dtype))


def _weight_for(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """The norm's weight, in float32 where Mamba's residual is that beside a 16-bit weight."""
    weight = weight_of(norm)
    return weight if weight.dtype in (x.dtype, torch.float32) else weight.float()
