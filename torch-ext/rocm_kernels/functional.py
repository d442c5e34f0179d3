"""The functional API: dtypes and output allocation; the ops check and compute.

Shapes are written with ``...`` for any leading dimensions, folded into rows. The last dimension
must be contiguous; rows may be further apart than they are long.

A *scale* always dequantises: real value = FP8 value * scale, in float32. The quantising functions
share these keyword arguments:

``scale``
    float32 tensor of one value on the input's device: static, per tensor.
``group_size``
    128: one computed scale for each 128 columns. None, without ``scale``: one for each row.
``scale_ub``
    Upper bound of the largest magnitude that a computed scale covers (FBGEMM checkpoints: 1200).
``fp8_dtype``
    ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``; None: :func:`native_fp8_dtype`.
``out``
    The FP8 tensor to write, or a pair of it and the float32 scales to write.

They return ``(q, scale)``: q has the shape of the result in FP8; scale is the one given, or
``[..., 1]`` per row, or ``[..., ceil(columns / 128)]`` per group.

Errors: RuntimeError (or ValueError where Python decides) names what was required and what came, and
nothing has been written.
"""

import math
from typing import Any, Dict, Optional, Tuple, Union

import torch

from ._ops import add_op_namespace_prefix, ops

# Overloads, looked up once: a decode step makes hundreds of calls of a few microseconds.
_rmsnorm_fp8 = ops.rmsnorm_fp8.default
_swiglu_fp8 = ops.swiglu_fp8.default
_skinny_gemm = ops.skinny_gemm.default
_gemm = ops.gemm.default if hasattr(ops, "gemm") else None  # the CPU's, for any number of rows

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SKINNY_GEMM_MAX_ROWS = 64
SCALE_BLOCK = 128

QuantizedOut = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], None]


# Everything that the ops write is an argument, so their fakes have nothing to allocate.
@torch.library.register_fake(add_op_namespace_prefix("rmsnorm_fp8"))
def _(out, scales, x, residual, weight, scale, eps, group_size, scale_ub):
    return None


@torch.library.register_fake(add_op_namespace_prefix("swiglu_fp8"))
def _(out, scales, gate, up, scale, activation, group_size, scale_ub):
    return None


@torch.library.register_fake(add_op_namespace_prefix("skinny_gemm"))
def _(out, a, w, scale_a, scale_w, bias):
    return None


if _gemm is not None:

    @torch.library.register_fake(add_op_namespace_prefix("gemm"))
    def _(out, a, w, scale_a, scale_w, bias):
        return None


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


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: Optional[torch.Tensor] = None,
    *,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Residual add and RMSNorm (Zhang and Sennrich, 2019).

    ``h = x + residual`` rounded to x's dtype; ``h * rsqrt(mean(h^2) + eps) * weight`` in float32.

    Args:
        x: ``[..., hidden]``, float32, float16 or bfloat16.
        weight: ``[hidden]``, x's dtype or float32.
        eps: added to the mean of squares.
        residual: ``[..., hidden]`` like x; h is written back to it.
        out: like x, to write the result to.

    Returns:
        ``[..., hidden]`` in x's dtype, rounded once.
    """
    try:
        out = _empty_rows_like(x, x.dtype) if out is None else out
        _rmsnorm_fp8(
            _rows(out, "out"), None, _input_rows(x), _optional_rows(residual, "residual"), weight,
            None, eps, 0, 0.0,
        )  # fmt: skip
        return out
    except Exception:
        _explain({"x": x, "weight": weight}, {"residual": residual, "out": out})
        raise


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
    out: QuantizedOut = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """:func:`rms_norm` whose float32 result is quantised in the same pass over memory.

    Args as :func:`rms_norm` and the module's text; returns ``(q, scale)``.
    """
    try:
        q, scales = _quantized_out(x, None, scale, group_size, fp8_dtype, out)
        _rmsnorm_fp8(
            _rows(q, "out"), _optional_rows(scales, "scales"), _input_rows(x),
            _optional_rows(residual, "residual"), weight, scale, eps, group_size or 0,
            scale_ub or 0.0,
        )  # fmt: skip
        return q, (scales if scale is None else scale)
    except Exception:
        _explain({"x": x, "weight": weight}, {"residual": residual, "scale": scale})
        raise


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
        gate, up, columns = _gate_and_up(x, up, activation)
        out = x.new_empty(*x.shape[:-1], columns) if out is None else out
        _swiglu_fp8(_rows(out, "out"), None, gate, up, None, activation, 0, 0.0)
        return out
    except Exception:
        _explain({"x": x}, {"up": up, "out": out})
        raise


def swiglu_fp8(
    x: torch.Tensor,
    up: Optional[torch.Tensor] = None,
    *,
    activation: str = "silu",
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    fp8_dtype: Optional[torch.dtype] = None,
    out: QuantizedOut = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """:func:`swiglu` whose float32 result is quantised in the same pass over memory.

    Args as :func:`swiglu` and the module's text; returns ``(q, scale)``.
    """
    try:
        gate, up, columns = _gate_and_up(x, up, activation)
        q, scales = _quantized_out(x, columns, scale, group_size, fp8_dtype, out)
        _swiglu_fp8(
            _rows(q, "out"), _optional_rows(scales, "scales"), gate, up, scale, activation,
            group_size or 0, scale_ub or 0.0,
        )  # fmt: skip
        return q, (scales if scale is None else scale)
    except Exception:
        _explain({"x": x}, {"up": up, "scale": scale})
        raise


def quantize_fp8(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    fp8_dtype: Optional[torch.dtype] = None,
    out: QuantizedOut = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Quantises ``x [..., columns]`` (float32, float16 or bfloat16) to FP8.

    ``q = round(clamp(x * (1 / scale)))``, to nearest even; NaN stays NaN, infinities saturate. A
    computed scale is ``max(amax / largest, 2^-126)``. Args as in the module's text; returns
    ``(q, scale)``.
    """
    try:
        q, scales = _quantized_out(x, None, scale, group_size, fp8_dtype, out)
        _swiglu_fp8(
            _rows(q, "out"), _optional_rows(scales, "scales"), _input_rows(x), None, scale,
            "identity", group_size or 0, scale_ub or 0.0,
        )  # fmt: skip
        return q, (scales if scale is None else scale)
    except Exception:
        _explain({"x": x}, {"scale": scale})
        raise


def skinny_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Matrix product for few rows: ``(a @ w.T) * scale_a * scale_w + bias``, float32 accumulation.

    Args:
        a: ``[..., K]`` with 1 to 64 rows in all. FP8, bfloat16 or float16.
        w: ``[N, K]``, as checkpoints hold it. FP8 of a's dialect, a's 16-bit dtype, or FP8 with a
            16-bit a (weight only).
        scale_a: float32; ``[1]`` per tensor, ``[..., 1]`` per row or ``[..., ceil(K / 128)]`` per
            1 x 128 block. For an FP8 a.
        scale_w: float32; ``[1]``, ``[N, 1]`` or ``[N]`` per output channel, or
            ``[ceil(N / 128), ceil(K / 128)]`` per 128 x 128 block. For an FP8 w.
        bias: ``[N]``, the output's dtype or float32. Another floating dtype is converted to float32
            first, in a launch of its own.
        out_dtype: float32, bfloat16 or float16. None: a's dtype, or bfloat16 for an FP8 a.
        out: ``[..., N]`` to write the result to; it need not be zeroed.

    Returns:
        ``[..., N]``, rounded once.
    """
    try:
        if out is None:
            if out_dtype is None:
                out_dtype = torch.bfloat16 if a.dtype in FP8_DTYPES else a.dtype
            out = a.new_empty(*a.shape[:-1], w.shape[0], dtype=out_dtype)
        elif out_dtype is not None and out.dtype != out_dtype:
            raise ValueError(f"out must have out_dtype, got {out.dtype} and {out_dtype}")
        rows = _input_rows(a)
        bias = usable_bias(bias, out.dtype)
        _skinny_gemm(_rows(out, "out"), rows, w, _row_scale(scale_a, rows), scale_w, bias)
        return out
    except Exception:
        _explain(
            {"a": a, "w": w}, {"scale_a": scale_a, "scale_w": scale_w, "bias": bias, "out": out}
        )
        raise


def fp8_linear_path(
    rows: int, w: torch.Tensor, scale_w: torch.Tensor, scale_x: Optional[torch.Tensor] = None
) -> str:
    """Which path :func:`fp8_linear` takes for this many rows.

    Returns:
        ``"skinny_gemm"``: one launch; ``"skinny_gemm_slices"``: one launch for each 64 rows;
        ``"gemm"``: the CPU's kernel for many rows; ``"scaled_mm"``: ``torch._scaled_mm``.

    The CPU has no quick ``torch._scaled_mm``. Its own kernel for many rows takes over beyond 64
    rows, and beyond 32 where K is at most 2048 (docs/cpu_benchmarks.md). On a GPU the
    library takes over where it is quicker, for the scales that it knows: per tensor, per row and
    per channel. On an H200 it is not up to 64 rows, over the layers of a model (docs/h200.md);
    without sm_90's warpgroup instructions it was from 33 rows on; for ROCm nothing is measured, so
    beyond 64.
    """
    if w.device.type == "cpu":
        return "gemm" if rows > (32 if w.shape[1] <= 2048 else 64) else "skinny_gemm"
    library_rows = SKINNY_GEMM_MAX_ROWS
    if torch.version.hip is None and 32 < rows <= SKINNY_GEMM_MAX_ROWS:
        library_rows = 64 if torch.cuda.get_device_properties(w.device).major == 9 else 32
    blocks = any(s is not None and s.dim() == 2 and s.shape[1] > 1 for s in (scale_w, scale_x))
    library = not blocks and not w.shape[0] % 16 and not w.shape[1] % 16
    if library and rows > library_rows:
        return "scaled_mm"
    return "skinny_gemm" if rows <= SKINNY_GEMM_MAX_ROWS else "skinny_gemm_slices"


def fp8_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    *,
    scale_x: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Linear layer with an FP8 weight, for any number of rows: quantises x, then multiplies.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16; or FP8, already quantised.
        w: ``[N, K]`` FP8 in the device's dialect (see :func:`to_native_fp8`).
        scale_w: as in :func:`skinny_gemm`. With 128 x 128 blocks x is quantised per 128 columns,
            else per row.
        scale_x: float32, one value: x is quantised with it instead. For an FP8 x: its scale, of
            any shape that :func:`skinny_gemm` takes.
        bias: ``[N]``, as in :func:`skinny_gemm`.
        out_dtype: None: x's dtype, or bfloat16 for an FP8 x.

    Returns:
        ``[..., N]``. :func:`fp8_linear_path` tells which kernel ran.
    """
    try:
        rows = _input_rows(x)
        if x.dtype in FP8_DTYPES:
            q, scale = rows, _row_scale(scale_x, rows)
            out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
        else:
            blocks = scale_w.dim() == 2 and scale_w.shape[1] > 1 and scale_x is None
            group_size = SCALE_BLOCK if blocks else None
            q, scale = quantize_fp8(rows, scale=scale_x, group_size=group_size, fp8_dtype=w.dtype)
            out_dtype = x.dtype if out_dtype is None else out_dtype
        count = rows.shape[0]
        path = fp8_linear_path(count, w, scale_w, scale)
        if path == "scaled_mm":
            out = _scaled_mm(q, w, scale, scale_w, bias, out_dtype)
        else:
            out = x.new_empty(count, w.shape[0], dtype=out_dtype)
            multiply(path, out, q, w, scale, scale_w, usable_bias(bias, out_dtype))
        return out if x.dim() == 2 else out.view(*x.shape[:-1], w.shape[0])
    except Exception:
        _explain({"x": x, "w": w, "scale_w": scale_w}, {"scale_x": scale_x, "bias": bias})
        raise


def multiply(
    path: str,
    out: torch.Tensor,
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor],
    scale_w: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
) -> None:
    """:func:`skinny_gemm` of ``a [rows, K]`` to ``out`` by a path of :func:`fp8_linear_path`, of
    those that are this package's kernels."""
    if path == "skinny_gemm":
        _skinny_gemm(out, a, w, scale_a, scale_w, bias)
    elif path == "gemm":
        _gemm(out, a, w, scale_a, scale_w, bias)
    else:
        for begin in range(0, a.shape[0], SKINNY_GEMM_MAX_ROWS):
            end = min(begin + SKINNY_GEMM_MAX_ROWS, a.shape[0])
            part = scale_a if scale_a is None or scale_a.numel() == 1 else scale_a[begin:end]
            _skinny_gemm(out[begin:end], a[begin:end], w, part, scale_w, bias)


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
    _require_tensors({"w": w, "scale": scale}, {})
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


def usable_bias(bias: Optional[torch.Tensor], out_dtype: torch.dtype) -> Optional[torch.Tensor]:
    """The bias in a dtype that the kernels add: the output's, or float32."""
    if bias is None or bias.dtype == out_dtype or not bias.dtype.is_floating_point:
        return bias
    return bias.float()  # of a float32 one: itself


def _explain(required: Dict[str, Any], optional: Dict[str, Any]) -> None:
    """Raises a sentence if a call failed because an argument is no tensor, or one without rows.

    Looked at afterwards: asking each tensor first would cost every call a fifth of a microsecond.
    """
    _require_tensors(required, optional)
    name = next(iter(required))
    if required[name].dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar") from None


def _require_tensors(required: Dict[str, Any], optional: Dict[str, Any]) -> None:
    for name, value in {**required, **optional}.items():
        if not isinstance(value, torch.Tensor) and not (name in optional and value is None):
            got = "None" if value is None else f"a {type(value).__name__}"
            raise TypeError(f"{name} must be a torch.Tensor, got {got}") from None


def _rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A written tensor as ``[rows, columns]``; it must be a view, or the writes would be lost."""
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} is written, so its leading dimensions must fold into rows without a copy, "
            f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        ) from None


def _empty_rows_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, of x's shape and device."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _optional_rows(tensor: Optional[torch.Tensor], name: str) -> Optional[torch.Tensor]:
    return None if tensor is None else _rows(tensor, name)


def _input_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An input as ``[rows, columns]``; leading dimensions that do not fold are copied."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() == 0:
        raise ValueError("an input must have at least one dimension, got a scalar")
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


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
        return _input_rows(x), _input_rows(up), x.shape[-1]
    columns = x.shape[-1]
    if columns % 2:
        raise ValueError(f"x must hold gate and up, an even number of columns, got {columns}")
    gate, up = _input_rows(x).chunk(2, -1)
    return gate, up, columns // 2


def _quantized_out(
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
            q = _empty_rows_like(x, fp8_dtype)
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


def _row_scale(scale: Optional[torch.Tensor], rows: torch.Tensor) -> Optional[torch.Tensor]:
    """scale_a with its leading dimensions folded like a's; ``[1]`` and ``[rows]`` pass through."""
    if scale is None or scale.dim() <= 2:
        return scale
    return scale.reshape(rows.shape[0], -1)


def _scaled_mm(
    q: torch.Tensor,
    w: torch.Tensor,
    scale: Optional[torch.Tensor],
    scale_w: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``torch._scaled_mm`` takes both scales per tensor or both per row, and a 16-bit bias."""
    scale = scale_w.new_ones(()) if scale is None else scale
    per_row = scale.numel() > 1 or scale_w.numel() > 1
    if per_row:
        scale = scale.reshape(-1, 1).expand(q.shape[0], 1).contiguous()
        scale_w = scale_w.reshape(1, -1).expand(1, w.shape[0]).contiguous()
    else:
        scale, scale_w = scale.reshape(()), scale_w.reshape(())
    # Row-wise scaling is offered with a bfloat16 output alone.
    mm_dtype = torch.bfloat16 if per_row else out_dtype
    out = torch._scaled_mm(q, w.t(), scale, scale_w, out_dtype=mm_dtype)
    if bias is not None:
        out = out + bias
    return out.to(out_dtype)
