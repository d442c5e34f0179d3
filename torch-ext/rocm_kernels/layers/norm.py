"""The kernel layer of RMSNorm, and the norm whose result is the input of a linear."""

from typing import Any, Callable, Optional, Tuple

import torch
from torch import nn

from ..functional import rmsnorm, rmsnorm_fp8
from ..functional.norm import add_residual
from ..functional.rows import empty_rows_like
from ..models.hooks import is_unseen
from ..models.linear import Quantized
from ..models.norms import eps_of, weight_offset_of
from .linear import is_weight_only, quantization
from .training import for_inference


class RMSNorm(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return norm_rows(hidden_states, self)


class RMSNormZeroCentered(nn.Module):
    """Multiplies by 1 + weight. Others call other norms so: only one that ``quantize_model_`` has
    asked what it computes is replaced."""

    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "kernel_norm"):
            return type(self).forward(self, hidden_states)
        return norm_rows(hidden_states, self)


def norm_rows(x: torch.Tensor, norm: Optional[nn.Module]) -> torch.Tensor:
    """``norm(x)``, or x itself without a norm."""
    if norm is None:
        return x
    return rmsnorm(x, _weight_for(x, norm), eps_of(norm), weight_offset=weight_offset_of(norm))


def norm_sum(
    x: torch.Tensor, residual: torch.Tensor, norm: Optional[nn.Module]
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``h = x + residual``, which is in neither's memory, and ``norm(h)``, or h without a norm."""
    if norm is None:
        h = add_residual(x, residual)
        return h, h
    h = empty_rows_like(x, x.dtype)
    normed = rmsnorm(
        x, _weight_for(x, norm), eps_of(norm), residual, residual_out=h,
        weight_offset=weight_offset_of(norm),
    )  # fmt: skip
    return h, normed


def norm_linear(x: torch.Tensor, norm: Optional[nn.Module], fp8: nn.Module) -> torch.Tensor:
    """``fp8(norm_rows(x, norm))``."""
    if quantizes_apart(norm, fp8):
        return fp8(norm_rows(x, norm))
    q, scale = rmsnorm_fp8(
        x, _weight_for(x, norm), eps_of(norm), weight_offset=weight_offset_of(norm),
        **quantization(fp8),
    )  # fmt: skip
    return fp8(Quantized(q, scale, x.dtype))


def norm_sum_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Optional[nn.Module],
    fp8: nn.Module,
    sums: Optional[Any] = None,
    project: Optional[Callable[[Quantized], torch.Tensor]] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """h as :func:`norm_sum`, and ``fp8(norm(h))``.

    Args:
        project: called in place of fp8 with the quantised norm: :func:`quantizes_apart` is False.
        sums: of tensor parallelism (models/sums.py), if ``residual`` is this process's part of a
            sum: :func:`quantizes_apart` is False then.
    """
    if quantizes_apart(norm, fp8):
        h, normed = norm_sum(x, residual, norm)
        return h, fp8(normed)
    h = empty_rows_like(x, x.dtype)
    weight, eps = _weight_for(x, norm), eps_of(norm)
    options = {"weight_offset": weight_offset_of(norm), **quantization(fp8)}
    if sums is None:
        q, scale = rmsnorm_fp8(x, weight, eps, residual, residual_out=h, **options)
    else:
        q, scale = sums.add_norm_quantize(residual, weight, eps, x, residual_out=h, **options)
    return h, (fp8 if project is None else project)(Quantized(q, scale, x.dtype))


def quantizes_apart(norm: Optional[nn.Module], fp8: nn.Module) -> bool:
    """Whether a linear quantises its input itself, or takes it as it is."""
    return norm is None or is_weight_only(fp8) or not is_unseen(fp8)


def _weight_for(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """The norm's weight, in float32 where Mamba's residual is that beside a 16-bit weight."""
    weight = norm.weight
    return weight if weight.dtype in (x.dtype, torch.float32) else weight.float()
