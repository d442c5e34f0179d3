"""Gated activations, with FP8 results."""

from typing import Callable, Optional, Tuple

import torch

from .._ops import ops
from .fp8 import QuantizedOut, is_ue8m0, quantized_out, written_pair
from .gradients import mark_written, needs_gradient, refuse_gradient
from .rows import explain, input_rows, optional_rows, written_rows
from .shapes import register_shapes

_swiglu_fp8 = ops.swiglu_fp8.default


register_shapes("swiglu_fp8")


def swiglu(
    x: torch.Tensor,
    up: Optional[torch.Tensor] = None,
    *,
    activation: str = "silu",
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Gated activation: ``act(gate) * up`` in float32 (Shazeer, 2020).

    Args:
        x: ``[..., 2 * d]``, gate and up side by side; or ``[..., d]``, the gate, with ``up`` given.
        up: ``[..., d]`` like x.
        activation: ``"silu"``: v * sigmoid(v); ``"gelu"``: its erf form; ``"gelu_tanh"``.
        out: ``[..., d]`` in x's dtype, to write the result to.

    Returns:
        ``[..., d]`` in x's dtype, rounded once.
    """
    try:
        if needs_gradient(x, up, out):
            refuse_gradient("swiglu", x=x, up=up, out=out)
        gate, up, columns = _gate_and_up(x, up, activation)
        result = x.new_empty(*x.shape[:-1], columns) if out is None else out
        _swiglu_fp8(written_rows(result, "out"), None, gate, up, None, activation, 0, 0.0, False)
        mark_written(out)
        return result
    except Exception:
        explain({"x": x}, {"up": up, "out": out})
        raise


def swiglu_fp8(
    x: torch.Tensor,
    up: Optional[torch.Tensor] = None,
    *,
    activation: str = "silu",
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    scale_fmt: Optional[str] = None,
    fp8_dtype: Optional[torch.dtype] = None,
    out: QuantizedOut = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """:func:`swiglu` whose float32 result is quantised in the same pass over memory.

    Args as :func:`swiglu` and the module's text; returns ``(q, scale)``.
    """
    try:
        if needs_gradient(x, up, scale, *written_pair(out)):
            refuse_gradient("swiglu_fp8", x=x, up=up, scale=scale, out=out)
        gate, up, columns = _gate_and_up(x, up, activation)
        q, scales = quantized_out(x, columns, scale, group_size, fp8_dtype, out)
        _swiglu_fp8(
            written_rows(q, "out"), optional_rows(scales, "scales"), gate, up, scale, activation,
            group_size or 0, scale_ub or 0.0,
            scale_fmt is not None and is_ue8m0(scale_fmt, scale),
        )  # fmt: skip
        mark_written(*written_pair(out))
        return q, (scales if scale is None else scale)
    except Exception:
        explain({"x": x}, {"up": up, "scale": scale})
        raise


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``out [..., d] = silu(x[..., :d]) * x[..., d:]``, as in the Hub's ``activation`` package."""
    return swiglu(x, out=out)


def mul_and_silu(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``out [..., d] = x[..., :d] * silu(x[..., d:])``, as in the Hub's ``activation`` package."""
    up, gate = x.chunk(2, -1)
    return swiglu(gate, up, out=out)


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``out [..., d] = gelu(x[..., :d]) * x[..., d:]``, the erf form, as in the Hub's
    ``activation`` package."""
    return swiglu(x, activation="gelu", out=out)


def gelu_tanh_and_mul(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Does what :func:`gelu_and_mul` does, with GELU's tanh form."""
    return swiglu(x, activation="gelu_tanh", out=out)


def gated(
    activation: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """``activation(gate) * up`` by torch, for an activation that no kernel knows."""
    return activation(gate) * up


def _gate_and_up(
    x: torch.Tensor, up: Optional[torch.Tensor], activation: str
) -> Tuple[torch.Tensor, torch.Tensor, int]:
    """Both as rows, and their columns."""
    if activation not in ("silu", "gelu", "gelu_tanh"):
        raise ValueError(f"activation must be silu, gelu or gelu_tanh, got {activation!r}")
    if up is not None:
        if up.shape != x.shape:
            raise ValueError(
                f"up must have the shape of x, {tuple(x.shape)}, got {tuple(up.shape)}"
            )
        return input_rows(x), input_rows(up), x.shape[-1]
    columns = x.shape[-1]
    if columns % 2:
        raise ValueError(f"x must hold gate and up, an even number of columns, got {columns}")
    gate, up = input_rows(x).chunk(2, -1)
    return gate, up, columns // 2
