"""FP8: its two dialects, quantising, and checks that quantising functions share."""

from typing import Optional, Tuple, Union

import torch

from .._ops import ops
from .gradients import mark_written, needs_gradient, refuse_gradient
from .rows import (
    empty_rows_like,
    explain,
    input_rows,
    optional_rows,
    require_tensors,
    written_rows,
)

# Plain quantising is the gated activation's op without a gate.
_swiglu_fp8 = ops.swiglu_fp8.default

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SCALE_BLOCK = 128
E8M0 = torch.float8_e8m0fnu

QuantizedOut = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None]


def native_fp8_dtype(device: torch.device) -> torch.dtype:
    """The FP8 dialect that the device's matrix units read.

    ``torch.float8_e4m3fnuz`` on gfx940 to gfx942 (MI300X); ``torch.float8_e4m3fn`` (OCP) on gfx950,
    gfx12, CUDA and the CPU.
    """
    if torch.version.hip is not None and device.type == "cuda":
        arch = torch.cuda.get_device_properties(device).gcnArchName
        if arch.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def quantize_fp8(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    scale_fmt: Optional[str] = None,
    fp8_dtype: Optional[torch.dtype] = None,
    out: QuantizedOut = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Quantises ``x [..., columns]`` (float32, float16 or bfloat16) to FP8.

    ``q = round(clamp(x * (1 / scale)))``, to nearest even; NaN stays NaN, infinities saturate. A
    computed scale is ``max(amax / largest, 2^-126)``, rounded up to a power of two if ``scale_fmt``
    says so. Args as in the module's text; returns ``(q, scale)``.
    """
    try:
        if needs_gradient(x, scale, *written_pair(out)):
            refuse_gradient("quantize_fp8", x=x, scale=scale, out=out)
        q, scales = quantized_out(x, None, scale, group_size, fp8_dtype, out)
        _swiglu_fp8(
            written_rows(q, "out"), optional_rows(scales, "scales"), input_rows(x), None, scale,
            "identity", group_size or 0, scale_ub or 0.0,
            scale_fmt is not None and is_ue8m0(scale_fmt, scale),
        )  # fmt: skip
        mark_written(*written_pair(out))
        return q, (scales if scale is None else scale)
    except Exception:
        explain({"x": x}, {"scale": scale})
        raise


def quantized_told(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor],
    group_size: Optional[int],
    scale_fmt: Optional[str],
    fp8_dtype: Optional[torch.dtype],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """What :func:`quantize_fp8` returns, without values."""
    if scale_fmt is not None:
        is_ue8m0(scale_fmt, scale)
    q, scales = quantized_out(x, None, scale, group_size, fp8_dtype, None)
    return q, (scales if scale is None else scale)


def quantize_fp8_within(
    x: torch.Tensor, bound: torch.Tensor, *, fp8_dtype: Optional[torch.dtype] = None
) -> Tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_fp8` with a ``scale_ub`` that is a tensor of one value.

    Reading the value would wait for the device. Clamping x to it bounds the scale just the same:
    what lies beyond saturates either way.
    """
    return quantize_fp8(x.clamp(-bound, bound), fp8_dtype=fp8_dtype)


def to_native_fp8(
    w: torch.Tensor, scale: torch.Tensor, *, fp8_dtype: Optional[torch.dtype] = None
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Converts an FP8 weight and its scale between the OCP and FNUZ dialects, without rounding.

    The same bits mean half as much in FNUZ, so the scale doubles (or halves, back). The two codes
    that mean something else are mapped: -0 (0x80) becomes 0, NaN becomes NaN. One value has no OCP
    counterpart: FNUZ's largest, 240, becomes 224.

    Args:
        w: FP8, any shape.
        scale: float32, any shape.
        fp8_dtype: the dialect to convert to; None: :func:`native_fp8_dtype` of w's device.

    Returns:
        ``(w, scale)``: the same tensors when w already has the dialect, new ones otherwise.
    """
    require_tensors({"w": w, "scale": scale}, {})
    fp8_dtype = native_fp8_dtype(w.device) if fp8_dtype is None else fp8_dtype
    if w.dtype not in FP8_DTYPES or fp8_dtype not in FP8_DTYPES:
        raise ValueError(f"w and fp8_dtype must be one of {FP8_DTYPES}, got {w.dtype}, {fp8_dtype}")
    if w.dtype == fp8_dtype:
        return w, scale
    bits = w.view(torch.uint8)
    magnitude = bits & 0x7F
    if fp8_dtype == torch.float8_e4m3fnuz:
        converted = torch.where(magnitude == 0x7F, 0x80, torch.where(magnitude == 0, 0, bits))
        return converted.to(torch.uint8).view(fp8_dtype), scale * 2
    largest = torch.where(magnitude == 0x7F, bits - 1, bits)
    converted = torch.where(bits == 0x80, 0x7F, largest)
    return converted.to(torch.uint8).view(fp8_dtype), scale / 2


def is_ue8m0(scale_fmt: str, given: Optional[torch.Tensor]) -> bool:
    """Whether computed scales are to be powers of two; ``given`` is the scale that would be taken
    instead of computed ones. Callers ask for None first: a call costs a tenth of a microsecond."""
    if scale_fmt != "ue8m0":
        raise ValueError(f"scale_fmt must be None or 'ue8m0', got {scale_fmt!r}")
    if given is not None:
        raise ValueError("scale_fmt is for scales that are computed, got one that is given, too")
    return True


def written_pair(out: QuantizedOut) -> Tuple[Optional[torch.Tensor], ...]:
    """The tensors that a caller gave to write."""
    return out if isinstance(out, tuple) else (out,)


def quantized_out(
    x: torch.Tensor,
    columns: Optional[int],
    scale: Optional[torch.Tensor],
    group_size: Optional[int],
    fp8_dtype: Optional[torch.dtype],
    out: QuantizedOut,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """The FP8 tensor and, unless the scale is static, the scales to write.

    ``columns`` are the result's, None: x's. Sizes go to ``new_empty`` one by one: as a tuple they
    cost half a microsecond more.
    """
    q, scales = out if isinstance(out, tuple) else (out, None)
    if q is None:
        fp8_dtype = native_fp8_dtype(x.device) if fp8_dtype is None else fp8_dtype
        if fp8_dtype not in FP8_DTYPES:
            raise ValueError(f"fp8_dtype must be one of {FP8_DTYPES}, got {fp8_dtype}")
        if columns is None:
            q = empty_rows_like(x, fp8_dtype)
        else:
            q = x.new_empty(*x.shape[:-1], columns, dtype=fp8_dtype)
    elif q.dtype not in FP8_DTYPES or (fp8_dtype is not None and q.dtype != fp8_dtype):
        raise ValueError(f"out must be {fp8_dtype or FP8_DTYPES}, got {q.dtype}")
    if scale is None and scales is None:
        groups = 1
        if group_size is not None:
            if group_size != SCALE_BLOCK:
                raise ValueError(f"group_size must be None or {SCALE_BLOCK}, got {group_size}")
            groups = -(-(x.shape[-1] if columns is None else columns) // group_size)
        scales = x.new_empty(*x.shape[:-1], groups, dtype=torch.float32)
    return q, scales
