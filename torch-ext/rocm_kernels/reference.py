"""The definition of every op, in plain torch: slow, and what each backend is tested against.

The functions have the names, arguments and results of the functional API, less the ``out``
arguments. See ``rocm_kernels.functional`` for shapes and units.
"""

import math
from typing import Optional, Tuple

import torch

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
MIN_SCALE = torch.finfo(torch.float32).tiny
SCALE_BLOCK = 128


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """``residual`` is updated in place."""
    return _rms_norm(x, weight, eps, residual).to(x.dtype)


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: Optional[torch.Tensor] = None,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    fp8_dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``residual`` is updated in place."""
    return _quantize(_rms_norm(x, weight, eps, residual), scale, group_size, scale_ub, fp8_dtype)


def swiglu(
    x: torch.Tensor, up: Optional[torch.Tensor] = None, *, activation: str = "silu"
) -> torch.Tensor:
    return _swiglu(x, up, activation).to(x.dtype)


def swiglu_fp8(
    x: torch.Tensor,
    up: Optional[torch.Tensor] = None,
    *,
    activation: str = "silu",
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    fp8_dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return _quantize(_swiglu(x, up, activation), scale, group_size, scale_ub, fp8_dtype)


def quantize_fp8(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    fp8_dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return _quantize(x.float(), scale, group_size, scale_ub, fp8_dtype)


def gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Accumulates in float64: the kernels, in float32, are held to an error bound against it."""
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype in FP8_MAX else a.dtype
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    if scale_a is not None and scale_a.dim() > 2:
        scale_a = scale_a.reshape(rows.shape[0], -1)
    out = dequantize(rows, scale_a, 1) @ dequantize(w, scale_w, SCALE_BLOCK).t()
    if bias is not None:
        out = out + bias.double()
    return out.to(out_dtype).view(*a.shape[:-1], w.shape[0])


def skinny_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    return gemm(a, w, scale_a, scale_w, bias=bias, out_dtype=out_dtype)


def fp8_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    *,
    scale_x: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    if x.dtype in FP8_MAX:
        return gemm(x, w, scale_x, scale_w, bias=bias, out_dtype=out_dtype)
    blocks = scale_w.dim() == 2 and scale_w.shape[1] > 1 and scale_x is None
    group_size = SCALE_BLOCK if blocks else None
    q, scale = quantize_fp8(x, scale=scale_x, group_size=group_size, fp8_dtype=w.dtype)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    return gemm(q, w, scale, scale_w, bias=bias, out_dtype=out_dtype)


def to_native_fp8(
    w: torch.Tensor, scale: torch.Tensor, *, fp8_dtype: torch.dtype
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Halves (OCP to FNUZ) or doubles (back) every value and lets the scale make up for it."""
    if w.dtype == fp8_dtype:
        return w, scale
    factor = 0.5 if fp8_dtype == torch.float8_e4m3fnuz else 2.0
    largest = FP8_MAX[fp8_dtype]
    return (w.float() * factor).clamp(-largest, largest).to(fp8_dtype), scale / factor


def dequantize(q: torch.Tensor, scale: Optional[torch.Tensor], row_block: int) -> torch.Tensor:
    """``q [rows, columns] * scale`` in float64.

    ``scale`` is None, one value, one a row, or one for each ``row_block`` x 128 block.
    """
    values = q.double()
    if scale is None or scale.numel() == 1:
        return values if scale is None else values * scale.double().reshape(())
    if scale.dim() == 1 or scale.shape == (q.shape[0], 1):
        return values * scale.double().reshape(-1, 1)
    blocks = scale.double().repeat_interleave(row_block, 0)[: q.shape[0]]
    return values * blocks.repeat_interleave(SCALE_BLOCK, 1)[:, : q.shape[1]]


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: Optional[torch.Tensor]
) -> torch.Tensor:
    if residual is not None:
        residual.add_(x)
        x = residual
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()


def _swiglu(x: torch.Tensor, up: Optional[torch.Tensor], activation: str) -> torch.Tensor:
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    gate, up = gate.float(), up.float()
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    # In float64 and by functions that do not cancel: GELU's 1 + erf(v) does, for negative v.
    v = gate.double()
    if activation == "gelu":
        share = torch.special.erfc(-v * math.sqrt(0.5)) / 2
    else:
        share = torch.sigmoid(math.sqrt(8 / math.pi) * (v + 0.044715 * v**3))
    return (v * share).float() * up


def _quantize(
    y: torch.Tensor,
    scale: Optional[torch.Tensor],
    group_size: Optional[int],
    scale_ub: Optional[float],
    fp8_dtype: Optional[torch.dtype],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Quantises the float32 ``y [..., columns]``; NaN does not count in a computed scale."""
    fp8_dtype = torch.float8_e4m3fn if fp8_dtype is None else fp8_dtype
    largest = FP8_MAX[fp8_dtype]
    columns = y.shape[-1]
    if scale is not None:
        full = scale.reshape(())
    else:
        width = max(columns, 1) if group_size is None else group_size
        groups = 1 if group_size is None else -(-columns // width)
        padded = torch.nn.functional.pad(y, (0, groups * width - columns))
        amax = padded.unflatten(-1, (groups, width)).abs()
        amax = amax.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).amax(-1)
        if scale_ub is not None:
            amax = amax.clamp(max=scale_ub)
        # By a tensor: on CUDA, torch divides by a number through its reciprocal.
        scale = (amax / amax.new_tensor(largest)).clamp(min=MIN_SCALE)
        full = scale.repeat_interleave(width, -1)[..., :columns]
    q = (y * (1.0 / full)).clamp(-largest, largest).to(fp8_dtype)
    return q, scale
