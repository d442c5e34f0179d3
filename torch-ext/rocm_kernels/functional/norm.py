"""RMSNorm, with a residual and with FP8 results."""

from typing import Optional, Tuple

import torch

from .._ops import ops
from .fp8 import QuantizedOut, is_ue8m0, quantized_out, written_pair
from .gradients import mark_written, needs_gradient, refuse_gradient
from .rows import (
    empty_rows_like,
    explain,
    input_rows,
    input_vector,
    optional_rows,
    written_rows,
)
from .shapes import register_shapes

_rmsnorm_fp8 = ops.rmsnorm_fp8.default


register_shapes("rmsnorm_fp8")


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: Optional[torch.Tensor] = None,
    *,
    weight_offset: float = 0.0,
    residual_out: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Residual add and RMSNorm (Zhang and Sennrich, 2019).

    ``h = x + residual`` rounded to x's dtype; ``h * rsqrt(mean(h^2) + eps) * (weight +
    weight_offset)`` in float32.

    Args:
        x: ``[..., hidden]``, float32, float16 or bfloat16.
        weight: ``[hidden]``, x's dtype or float32.
        eps: added to the mean of squares.
        residual: ``[..., hidden]`` like x; h is written back to it, unless there is residual_out.
        weight_offset: 1 for norms that multiply by 1 + weight, as Gemma's do.
        residual_out: like x, to write h to: then the residual is only read.
        out: like x, to write the result to.

    Returns:
        ``[..., hidden]`` in x's dtype, rounded once.
    """
    try:
        if needs_gradient(x, weight, residual, residual_out, out):
            refuse_gradient(
                "rmsnorm", x=x, weight=weight, residual=residual, residual_out=residual_out,
                out=out,
            )  # fmt: skip
        result = empty_rows_like(x, x.dtype) if out is None else out
        h, addend = sum_and_addend(residual, residual_out)
        _rmsnorm_fp8(
            written_rows(result, "out"), None, input_rows(x), h, input_vector(weight), None, eps,
            0, 0.0, False, weight_offset, addend,
        )  # fmt: skip
        mark_written(residual if residual_out is None else residual_out, out)
        return result
    except Exception:
        optional = {"residual": residual, "residual_out": residual_out, "out": out}
        explain({"x": x, "weight": weight}, optional)
        raise


def apply_rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`rmsnorm` by the name and arguments of the Hub's ``rmsnorm`` package."""
    return rmsnorm(input, weight, eps)


def rmsnorm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: Optional[torch.Tensor] = None,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    scale_fmt: Optional[str] = None,
    fp8_dtype: Optional[torch.dtype] = None,
    weight_offset: float = 0.0,
    residual_out: Optional[torch.Tensor] = None,
    out: QuantizedOut = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """:func:`rmsnorm` whose float32 result is quantised in the same pass over memory.

    Args as :func:`rmsnorm` and the module's text; returns ``(q, scale)``.
    """
    try:
        if needs_gradient(x, weight, residual, scale, residual_out, *written_pair(out)):
            refuse_gradient(
                "rmsnorm_fp8", x=x, weight=weight, residual=residual, scale=scale,
                residual_out=residual_out, out=out,
            )  # fmt: skip
        q, scales = quantized_out(x, None, scale, group_size, fp8_dtype, out)
        h, addend = sum_and_addend(residual, residual_out)
        _rmsnorm_fp8(
            written_rows(q, "out"), optional_rows(scales, "scales"), input_rows(x), h,
            input_vector(weight), scale, eps, group_size or 0, scale_ub or 0.0,
            scale_fmt is not None and is_ue8m0(scale_fmt, scale), weight_offset, addend,
        )  # fmt: skip
        mark_written(residual if residual_out is None else residual_out, *written_pair(out))
        return q, (scales if scale is None else scale)
    except Exception:
        optional = {"residual": residual, "residual_out": residual_out, "scale": scale}
        explain({"x": x, "weight": weight}, optional)
        raise


def sum_and_addend(
    residual: Optional[torch.Tensor], residual_out: Optional[torch.Tensor]
) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """What the op leaves h in, and what it reads in that one's place."""
    if residual_out is None:
        return optional_rows(residual, "residual"), None
    if residual is None:
        raise ValueError("residual_out must come with a residual, got none")
    return written_rows(residual_out, "residual_out"), input_rows(residual)


def add_residual(
    residual: torch.Tensor, x: torch.Tensor, multiplier: Optional[float] = None
) -> torch.Tensor:
    """``residual + multiplier * x``, both ``[..., hidden]``: the sum that no norm follows, by
    torch."""
    return torch.add(residual, x, alpha=1.0 if multiplier is None else multiplier)


def multiply(x: torch.Tensor, multiplier: float) -> torch.Tensor:
    """``multiplier * x``, by torch."""
    return torch.mul(x, multiplier)
