"""Matrix products, and linear layers with FP8 weights.

Longer than 500 lines, because all ways through a linear share their checks and conversions.
"""

import contextlib
import functools
from typing import Callable, Iterable, Iterator, List, Optional, Tuple

import torch

from .._ops import ops
from .fp8 import E8M0, FP8_DTYPES, SCALE_BLOCK, quantize_fp8, quantized_told
from .gradients import mark_written, needs_gradient, refuse_gradient
from .rows import explain, input_rows, optional_vector, rows_told, written_rows
from .shapes import register_shapes

_gemm = ops.gemm.default
_quantized_gemm = ops.quantized_gemm.default
_gated_gemm = ops.gated_gemm.default
_linear_limits = ops.linear_limits.default
_known_linear_limits = functools.lru_cache(maxsize=None)(_linear_limits)  # an op costs 2 us

SKINNY_GEMM_MAX_ROWS = 64


for _name in ("gemm", "quantized_gemm", "gated_gemm"):
    register_shapes(_name)


@contextlib.contextmanager
def settled(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Products of this thread may read these weights before the kernel that runs before them is
    done: no kernel writes them that may still run then. For what is recorded in a graph, which does
    not write them. Attentions of one query a sequence may read keys and values so, in rows, but for
    the last that a sequence has."""
    ops.settle_weights(0)
    for weight in weights:
        ops.settle_weights(weight.data_ptr())
    try:
        yield
    finally:
        ops.settle_weights(0)


def gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Matrix product for any number of rows: ``(a @ w.T) * scale_a * scale_w + bias``, float32
    accumulation.

    Args:
        a: ``[..., K]``. FP8, bfloat16 or float16.
        w: ``[N, K]``, as checkpoints hold it. FP8 of a's dialect, a's 16-bit dtype, or FP8 with a
            16-bit a (weight only).
        scale_a: float32; ``[1]`` per tensor, ``[..., 1]`` per row or ``[..., ceil(K / 128)]`` per
            1 x 128 block. For an FP8 a.
        scale_w: float32; ``[1]``, ``[N, 1]`` or ``[N]`` per output channel, or
            ``[ceil(N / 128), ceil(K / 128)]`` per 128 x 128 block. For an FP8 w. float8_e8m0fnu is
            converted to float32 first, in a launch of its own.
        bias: ``[N]``, the output's dtype or float32.
        out_dtype: float32, bfloat16 or float16. None: a's dtype, or bfloat16 for an FP8 a.
        out: ``[..., N]`` to write the result to; it need not be zeroed.

    Returns:
        ``[..., N]``, rounded once. The same operands give the same bits in every call. A row's bits
        are the same for every M of 1 to 16, of 17 to 32 and of 33 to 64, but as
        docs/kernels/skinny_gemm.md says. Beyond, a GPU may divide K by a rule that looks at M,
        which :func:`gemm_config` tells; on the CPU a row's bits do not depend on M there.
    """
    return run_product(_gemm, a, w, scale_a, scale_w, bias, out_dtype, out)


def gemm_config(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    out_dtype: Optional[torch.dtype] = None,
) -> str:
    """The config that ``gemm(a, w, scale_a, scale_w, out_dtype=out_dtype)`` runs with, in words.

    Returns:
        The tuned config where one is in force and serves these operands, else the backend's choice.
        The backend's own text: the kernel's name, then ``name=value`` for each of its parameters;
        on the CPU the instruction set. ``plain`` (GPUs) and ``mma`` (CUDA) are the
        slower kernels that take what the matrix units' own kernel does not.
    """
    return gemm_configs(a, w, scale_a, scale_w, out_dtype, tuned=True)[0]


def gemm_configs(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor],
    scale_w: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
    *,
    tuned: bool,
) -> List[str]:
    """All configs worth timing. First the one that runs with ``tuned``, else the backend's own
    choice."""
    out = _allocate(None, out_dtype, a, w)
    rows = rows_told(a)
    scale_a, scale_w = _row_scale_told(scale_a, rows), _in_float32_told(scale_w)
    told = ops.gemm_configs(written_rows(out, "out"), rows, w, scale_a, scale_w, tuned)
    return told.splitlines()


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
    """:func:`gemm` of few rows, 1 to 64 in all: the same product, by the same kernels.

    Args:
        a: ``[..., K]`` with at most 64 rows in all; this and the others as in :func:`gemm`.

    Returns:
        ``[..., N]``, rounded once.
    """
    scalar = not isinstance(a, torch.Tensor) or a.dim() == 0  # run_product says what is wrong
    if not scalar and a.numel() > SKINNY_GEMM_MAX_ROWS * a.shape[-1]:
        raise ValueError(
            f"skinny_gemm takes at most {SKINNY_GEMM_MAX_ROWS} rows, got a of {tuple(a.shape)}; "
            "gemm takes any number"
        )
    return run_product(_gemm, a, w, scale_a, scale_w, bias, out_dtype, out)


def fp8_linear_path(
    rows: int,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    scale_x: Optional[torch.Tensor] = None,
    *,
    weight_only: bool = False,
    out_dtype: Optional[torch.dtype] = None,
) -> str:
    """Which path :func:`fp8_linear` takes for this many rows, as the backend decides it; with
    ``weight_only``, :func:`weight_only_linear` of a 16-bit x.

    Args:
        out_dtype: of the result; None: bfloat16.

    Returns:
        ``"gemm"``: :func:`gemm`; ``"scaled_mm"``: ``torch._scaled_mm``, where that is quicker and
        rounds once to out_dtype, or for weights alone ``torch.nn.functional.linear`` with w in x's
        dtype.
    """
    if _is_exporting():
        return "gemm"  # an exported graph has one path for all numbers of rows
    if _is_block_scale(scale_w, w.shape[0]) or (
        scale_x is not None and _is_block_scale(scale_x, rows)
    ):
        scales = "block"
    elif scale_w.numel() > 1 or (scale_x is not None and scale_x.numel() > 1):
        scales = "row"
    else:
        scales = "tensor"
    fp8_rows, wide_rows, *_ = _limits_of(w, scales)
    if rows <= (wide_rows if weight_only else fp8_rows):
        return "gemm"
    # The library adds up FP8 products in fewer bits than float32 has, which a 16-bit result hides;
    # and it rounds a product with scales by row to bfloat16, whatever is asked for.
    by_row = scales == "row" and out_dtype == torch.float16
    loses_bits = by_row or out_dtype == torch.float32
    return "gemm" if loses_bits and not weight_only else "scaled_mm"


def _limits_of(w: torch.Tensor, scales: str) -> Tuple[int, ...]:
    device = -1 if w.device.type == "cpu" else w.device.index
    # torch.compile does not look into caches, and may have symbols for sizes.
    limits = _linear_limits if torch.compiler.is_compiling() else _known_linear_limits
    return limits(device, w.shape[0], w.shape[1], scales)


def joined_rows(w: torch.Tensor, scale_w: torch.Tensor) -> Tuple[int, int]:
    """Up to how many rows a product with this FP8 weight quantises them, a scale each, and up to
    how many it gates its results, in its own kernel; 0 where none does."""
    if torch.compiler.is_compiling() or _is_block_scale(scale_w, w.shape[0]):
        return 0, 0
    quantized, gated = _limits_of(w, "row")[2:]
    return quantized, gated


def rows_of_gemm(
    w: torch.Tensor, scale_w: torch.Tensor, scale_x: Optional[torch.Tensor], *, weight_only: bool
) -> Tuple[int, int]:
    """From how many rows on, and up to how many, an FP8 linear is one :func:`gemm` of rows that an
    op before it has made, quantised or, with ``weight_only``, in 16 bits.

    Args:
        scale_x: the rows' static scale; None: each has its own.
    """
    if _is_block_scale(scale_w, w.shape[0]):
        scales = "block"
    elif scale_w.numel() > 1 or (not weight_only and (scale_x is None or scale_x.numel() > 1)):
        scales = "row"
    else:
        scales = "tensor"
    fp8_rows, wide_rows, *_ = _limits_of(w, scales)
    return (1, wide_rows) if weight_only else (1 + max(joined_rows(w, scale_w)), fp8_rows)


def gated_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    scale_x: torch.Tensor,
    *,
    bias: Optional[torch.Tensor],
    activation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``act(gate) * up`` in float32, of a linear's results as ``dtype``, a type of 16 bits, has
    them: w has the rows of gate, then those of up. For few rows (:func:`joined_rows`).

    Args:
        x: ``[rows, K]``, FP8.
        scale_x: its scale, of the tensor or of rows.
    """
    out = x.new_empty(x.shape[0], w.shape[0] // 2, dtype=torch.float32)
    bias, rounded = usable_bias(bias, dtype), str(dtype).rpartition(".")[2]
    _gated_gemm(out, x, w, scale_x, in_float32(scale_w), bias, activation, rounded)
    return out


def _is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which torch.compile takes for true in torch 2.11, not in
    2.13 (pytorch/pytorch#176347): many rows would miss the library's product. The flag is read."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def fp8_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    *,
    scale_x: Optional[torch.Tensor] = None,
    scale_fmt: Optional[str] = None,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Linear layer with an FP8 weight, for any number of rows: quantises x, then multiplies.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16; or FP8, already quantised.
        w: ``[N, K]`` FP8 in the device's dialect (see :func:`to_native_fp8`).
        scale_w: as in :func:`gemm`. With 128 x 128 blocks x is quantised per 128 columns,
            else per row.
        scale_x: float32, one value: x is quantised with it instead. For an FP8 x: its scale, of
            any shape that :func:`gemm` takes.
        scale_fmt: ``"ue8m0"``: x's computed scales are powers of two. For an x that is not FP8, and
            without scale_x.
        bias: ``[N]``, as in :func:`gemm`.
        out_dtype: None: x's dtype, or bfloat16 for an FP8 x.

    Returns:
        ``[..., N]``, rounded once. :func:`fp8_linear_path` tells which kernel ran; a bias of
        another dtype than the result's makes it that of a float32 result.
    """
    if scale_x is None and scale_fmt is None and _quantizes(x, w, scale_w, bias):
        dtype = x.dtype if out_dtype is None else out_dtype
        out = x.new_empty(*x.shape[:-1], w.shape[0], dtype=dtype)
        _quantized_gemm(out, x, w, in_float32(scale_w), usable_bias(bias, dtype))
        return out
    return linear_by(_gemm, "fp8_linear", x, w, scale_w, scale_x, scale_fmt, bias, out_dtype)[0]


def _quantizes(
    x: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor, bias: Optional[torch.Tensor]
) -> bool:
    """Whether the product quantises x itself; what is wrong is said by the way that others go."""
    return (
        all(isinstance(tensor, torch.Tensor) for tensor in (x, w, scale_w))
        and x.dim() == 2
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.stride(-1) == 1
        and w.dtype in FP8_DTYPES
        and 0 < x.shape[0] <= joined_rows(w, scale_w)[0]
        and not needs_gradient(x, w, scale_w, bias)
    )


def linear_by(
    gemm: Callable[..., None],
    name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    scale_x: Optional[torch.Tensor],
    scale_fmt: Optional[str],
    bias: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
    told: bool = False,
) -> Tuple[torch.Tensor, bool]:
    """What :func:`fp8_linear` does, for the function of that name, by ``gemm``, which takes what
    the op takes. And whether that was called: it is not where the library's product is quicker.

    ``told``: nothing is computed: ``gemm`` tells something of operands without values.
    """
    as_rows, in_float32, row_scale, quantize, scaled_mm = _TELLING if told else _COMPUTING
    try:
        if needs_gradient(x, w, scale_w, scale_x, bias):
            refuse_gradient(name, x=x, w=w, scale_w=scale_w, scale_x=scale_x, bias=bias)
        rows = as_rows(x)
        scale_w = in_float32(scale_w)
        if x.dtype in FP8_DTYPES:
            if scale_fmt is not None:
                raise ValueError(f"scale_fmt is for an x to quantise, got one of {x.dtype}")
            q, scale = rows, row_scale(scale_x, rows)
            out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
        else:
            blocks = scale_x is None and _is_block_scale(scale_w, w.shape[0])
            group_size = SCALE_BLOCK if blocks else None
            q, scale = quantize(
                rows, scale=scale_x, group_size=group_size, scale_fmt=scale_fmt, fp8_dtype=w.dtype
            )
            out_dtype = x.dtype if out_dtype is None else out_dtype
        count = rows.shape[0]
        path = fp8_linear_path(count, w, scale_w, scale, out_dtype=_sum_dtype(bias, out_dtype))
        if path == "scaled_mm":
            out = scaled_mm(q, w, scale, scale_w, bias, out_dtype)
        else:
            out = x.new_empty(count, w.shape[0], dtype=out_dtype)
            gemm(out, q, w, scale, scale_w, usable_bias(bias, out_dtype))
        return (out if x.dim() == 2 else out.view(*x.shape[:-1], w.shape[0])), path == "gemm"
    except Exception:
        explain({"x": x, "w": w, "scale_w": scale_w}, {"scale_x": scale_x, "bias": bias})
        raise


def linear_of_router(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: Optional[torch.Tensor],
    *,
    in_float32: bool,
) -> torch.Tensor:
    """Linear layer of a router.

    Args:
        x: ``[rows, K]``.
        w: ``[N, K]``, not quantised.
        bias: ``[N]``.
        in_float32: products of 16 bits are not rounded to these; else the result has x's dtype.
    """
    in_16_bits = x.dtype == w.dtype and x.dtype in (torch.bfloat16, torch.float16)
    # Few rows: in a graph it asks for the weight before the kernel before it has ended. A float32
    # result of 16 bits is none of the library's.
    if in_16_bits and (in_float32 or (not _is_exporting() and x.shape[0] <= SKINNY_GEMM_MAX_ROWS)):
        return gemm(x, w, bias=bias, out_dtype=torch.float32 if in_float32 else None)
    if in_float32:
        x, w, bias = x.float(), w.float(), None if bias is None else bias.float()
    # The library adds up in another order where x is laid out otherwise.
    return torch.nn.functional.linear(x.contiguous(), w, bias)


def weight_only_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Linear layer with an FP8 weight and inputs as they are, for any number of rows.

    Args:
        x: ``[rows, K]``, float32, float16 or bfloat16.
        w: ``[N, K]`` FP8 in the device's dialect.
        scale_w: as in :func:`gemm`.
        bias: ``[N]``, as in :func:`gemm`.

    Returns:
        ``[rows, N]`` in x's dtype. :func:`fp8_linear_path` tells which kernel ran.
    """
    if needs_gradient(x, w, scale_w, bias):
        refuse_gradient("weight_only_linear", x=x, w=w, scale_w=scale_w, bias=bias)
    x, scale_w = input_rows(x), in_float32(scale_w)
    terms = [x] if x.dtype != torch.float32 else _bfloat16_terms(x)
    a = x if len(terms) == 1 else torch.cat(terms)
    # A float32 result is not among wgmma's: its rows go to the library where FP8's do.
    path = fp8_linear_path(a.shape[0], w, scale_w, weight_only=len(terms) == 1)
    if path == "scaled_mm":
        # Where the library is quicker for many rows, unpacking the weight is a small part of it.
        bias = None if bias is None else bias.to(x.dtype)
        return torch.nn.functional.linear(x, _unpacked(w, scale_w).to(x.dtype), bias)
    out = x.new_empty(a.shape[0], w.shape[0])
    if len(terms) == 1:
        _gemm(out, a, w, None, scale_w, usable_bias(bias, x.dtype))
        return out
    _gemm(out, a, w, None, scale_w, None)
    out = out.view(len(terms), x.shape[0], w.shape[0]).sum(0)
    return out if bias is None else out + bias


def _bfloat16_terms(x: torch.Tensor) -> List[torch.Tensor]:
    """Three bfloat16 tensors whose sum is a float32 one, all but the last bit: the kernels multiply
    16 bits, and as rows of one product the terms cost no second reading of the weight."""
    terms = []
    for _ in range(3):
        terms.append(x.to(torch.bfloat16))
        x = x - terms[-1]
    return terms


def _unpacked(w: torch.Tensor, scale_w: torch.Tensor) -> torch.Tensor:
    if scale_w.dim() == 2 and scale_w.shape[1] > 1:
        scale_w = scale_w.repeat_interleave(SCALE_BLOCK, 0)[: w.shape[0]]
        scale_w = scale_w.repeat_interleave(SCALE_BLOCK, 1)[:, : w.shape[1]]
    elif scale_w.dim() == 1 and scale_w.numel() > 1:
        scale_w = scale_w[:, None]
    return w.float() * scale_w


def _is_block_scale(scale: torch.Tensor, rows: int) -> bool:
    """Whether a scale is for blocks of an operand of ``rows`` rows; ``[blocks, 1]`` where all of K
    is one block."""
    return scale.dim() == 2 and (scale.shape[1] > 1 or 1 < scale.shape[0] < rows)


def usable_bias(bias: Optional[torch.Tensor], out_dtype: torch.dtype) -> Optional[torch.Tensor]:
    """The bias as the kernels add it: side by side, in the output's dtype or float32."""
    bias = optional_vector(bias)
    if bias is None or bias.dtype == out_dtype or not bias.dtype.is_floating_point:
        return bias
    return bias.float()  # of a float32 one: itself


def run_product(
    op: Callable[..., None],
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor],
    scale_w: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
    out: Optional[torch.Tensor],
) -> torch.Tensor:
    """What :func:`gemm` does, by ``op``, which takes what its op takes."""
    try:
        if needs_gradient(a, w, scale_a, scale_w, bias, out):
            refuse_gradient(
                "a product", a=a, w=w, scale_a=scale_a, scale_w=scale_w, bias=bias, out=out
            )
        result = _allocate(out, out_dtype, a, w)
        rows = input_rows(a)
        scale_a, bias = _row_scale(scale_a, rows), usable_bias(bias, result.dtype)
        op(written_rows(result, "out"), rows, w, scale_a, in_float32(scale_w), bias)
        mark_written(out)
        return result
    except Exception:
        scales = {"scale_a": scale_a, "scale_w": scale_w}
        explain({"a": a, "w": w}, {**scales, "bias": bias, "out": out})
        raise


def _allocate(
    out: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
    a: torch.Tensor,
    w: torch.Tensor,
) -> torch.Tensor:
    """``out``, or a new ``[..., N]`` of ``out_dtype`` or of what a's dtype asks for."""
    if out is None:
        if out_dtype is None:
            out_dtype = torch.bfloat16 if a.dtype in FP8_DTYPES else a.dtype
        return a.new_empty(*a.shape[:-1], w.shape[0], dtype=out_dtype)
    if out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"out must have out_dtype, got {out.dtype} and {out_dtype}")
    return out


def in_float32(scale: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """E8M0 scales in float32, which holds each; others as they are."""
    return scale.float() if scale is not None and scale.dtype is E8M0 else scale


def _in_float32_told(scale: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """What :func:`in_float32` returns; without values where that converts."""
    if scale is None or scale.dtype is not E8M0:
        return scale
    return torch.empty_like(scale, dtype=torch.float32)


def _row_scale(scale: Optional[torch.Tensor], rows: torch.Tensor) -> Optional[torch.Tensor]:
    """scale_a with its leading dimensions folded like a's; ``[1]`` and ``[rows]`` pass through."""
    if scale is None or scale.dim() <= 2:
        return scale
    return scale.reshape(rows.shape[0], scale.shape[-1])


def _row_scale_told(scale: Optional[torch.Tensor], rows: torch.Tensor) -> Optional[torch.Tensor]:
    """What :func:`_row_scale` returns; without values where that copies."""
    if scale is None or scale.dim() <= 2:
        return scale
    try:
        return scale.view(rows.shape[0], scale.shape[-1])
    except RuntimeError:
        return scale.new_empty(rows.shape[0], scale.shape[-1])


def _scaled_mm(
    q: torch.Tensor,
    w: torch.Tensor,
    scale: Optional[torch.Tensor],
    scale_w: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``torch._scaled_mm`` takes both scales per tensor or both per row, and a bias of its 16-bit
    result's dtype; another is added to a float32 result, so that the sum is rounded once."""
    scale = scale_w.new_ones(()) if scale is None else scale
    per_row = scale.numel() > 1 or scale_w.numel() > 1
    if per_row:
        scale = scale.reshape(-1, 1).expand(q.shape[0], 1).contiguous()
        scale_w = scale_w.reshape(1, -1).expand(1, w.shape[0]).contiguous()
    else:
        scale, scale_w = scale.reshape(()), scale_w.reshape(())
    sum_dtype = _sum_dtype(bias, out_dtype)
    taken = optional_vector(bias) if sum_dtype != torch.float32 else None
    out = torch._scaled_mm(q, w.t(), scale, scale_w, bias=taken, out_dtype=sum_dtype)
    return out if bias is None or taken is not None else (out + bias).to(out_dtype)


def _sum_dtype(bias: Optional[torch.Tensor], out_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the library's product is asked for, before a bias is added: the result's, if
    the bias has it, else float32."""
    return out_dtype if bias is None or bias.dtype == out_dtype else torch.float32


def _scaled_mm_told(
    q: torch.Tensor,
    w: torch.Tensor,
    scale: Optional[torch.Tensor],
    scale_w: torch.Tensor,
    bias: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What :func:`_scaled_mm` returns, without values."""
    return q.new_empty(q.shape[0], w.shape[0], dtype=out_dtype)


# What linear_by makes of a linear's operands and, where the library's product is quicker, by whom.
_COMPUTING = input_rows, in_float32, _row_scale, quantize_fp8, _scaled_mm
_TELLING = rows_told, _in_float32_told, _row_scale_told, quantized_told, _scaled_mm_told
