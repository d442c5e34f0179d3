"""Mixtures of experts: routing, the experts' layer, and products of rows sorted by expert."""

import math
from typing import Callable, Optional, Tuple

import torch

from .._ops import ops
from .fp8 import E8M0, FP8_DTYPES, is_ue8m0
from .gradients import mark_written, needs_gradient, refuse_gradient
from .rows import explain, input_rows, input_vector, optional_vector, written_rows
from .shapes import register_shapes

_topk = ops.topk.default
_fused_moe = ops.fused_moe.default
_grouped_gemm = ops.grouped_gemm.default

# moe/experts.h has them.
MAX_EXPERTS = 2048
MAX_TOPK = 32  # slots a token


register_shapes("topk")
register_shapes("fused_moe")
register_shapes("grouped_gemm")


def topk_softmax(
    logits: torch.Tensor, k: int, *, renormalize: bool = True
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Routes each token to the k experts of its greatest logits, weighted by softmax (Shazeer et
    al., 2017; Mixtral, Qwen-MoE, GPT-OSS).

    Args:
        logits: ``[..., E]``, float32, float16 or bfloat16; E up to 2,048.
        k: 1 to 32, at most E.
        renormalize: True: the k weights sum to 1; False: softmax over all E.

    Returns:
        ``(weights [..., k] float32, ids [..., k] int32)``, the greatest first; of equal logits the
        lower id comes first. A NaN counts as -infinity in choosing and makes its row's weights NaN.
    """
    return _route("topk_softmax", logits, k, None, "softmax", 1, 1, renormalize, 1.0)


def topk_sigmoid(
    logits: torch.Tensor,
    k: int,
    *,
    bias: Optional[torch.Tensor] = None,
    groups: int = 1,
    groups_kept: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Routes each token by sigmoid scores, as DeepSeek-V3 does (2024).

    ``s = sigmoid(logits)``; experts are chosen by ``s + bias`` and weighted by s.

    Args:
        logits: ``[..., E]``, float32, float16 or bfloat16; E up to 2,048.
        k: 1 to 32, at most the experts of the groups kept.
        bias: ``[E]`` float32, for choosing alone.
        groups: equal runs of experts, of which a token keeps some: E is a multiple of it.
        groups_kept: how many; those with the greatest sum of their two greatest ``s + bias``.
        renormalize: divide the k weights by their sum + 1e-20.
        scale: multiplies the weights.

    Returns:
        As :func:`topk_softmax`, in descending order of ``s + bias``.
    """
    return _route(
        "topk_sigmoid", logits, k, bias, "sigmoid", groups, groups_kept, renormalize, scale
    )


def _route(
    name: str,
    logits: torch.Tensor,
    k: int,
    bias: Optional[torch.Tensor],
    scoring: str,
    groups: int,
    groups_kept: int,
    renormalize: bool,
    scale: float,
) -> Tuple[torch.Tensor, torch.Tensor]:
    try:
        if needs_gradient(logits, bias):
            refuse_gradient(name, logits=logits, bias=bias)
        weights = logits.new_empty(*logits.shape[:-1], k, dtype=torch.float32)
        ids = logits.new_empty(*logits.shape[:-1], k, dtype=torch.int32)
        _topk(
            written_rows(weights, "weights"), written_rows(ids, "ids"), input_rows(logits),
            optional_vector(bias), scoring, groups, groups_kept, renormalize, scale,
        )  # fmt: skip
        return weights, ids
    except Exception:
        explain({"logits": logits}, {"bias": bias})
        raise


def fused_moe(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    scale_gate_up: Optional[torch.Tensor] = None,
    scale_down: Optional[torch.Tensor] = None,
    bias_gate_up: Optional[torch.Tensor] = None,
    bias_down: Optional[torch.Tensor] = None,
    activation: str = "silu",
    limit: Optional[float] = None,
    interleaved: bool = False,
    quantize_input: bool = True,
    scale_fmt: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """A mixture-of-experts layer without its router: for each token the weighted sum of its
    experts, each a gated MLP.

    Args:
        x: ``[..., H]``, float16, bfloat16, or float32, which is rounded to bfloat16 first.
        w_gate_up: ``[E, 2 * I, H]``, E up to 2,048: gate's rows, then up's. x's 16-bit dtype, FP8
            of the device's dialect, or MXFP4: uint8 ``[E, 2 * I, H / 2]``, two e2m1 values of K a
            byte, the even one in the low half, as GPT-OSS's checkpoints hold them.
        w_down: ``[E, H, I]`` of the same dtype; MXFP4 ``[E, H, I / 2]``.
        topk_weights: ``[..., k]``, k of 1 to 32; converted to float32.
        topk_ids: ``[..., k]``, integers. An id below 0 or not below E is skipped: under expert
            parallelism another rank's. int32 takes one launch less than int64.
        scale_gate_up, scale_down: of FP8 weights, float32: ``[E]`` per tensor, ``[E, N, 1]`` per
            output channel, or ``[E, ceil(N / 128), ceil(K / 128)]`` per 128 x 128 block;
            float8_e8m0fnu is converted to float32 first, in a launch of its own. Of MXFP4 weights
            ``[E, N, K / 32]``, uint8 or float8_e8m0fnu: powers of two.
        bias_gate_up, bias_down: ``[E, 2 * I]`` and ``[E, H]``, float32, float16 or bfloat16.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``: ``act(gate) * up``; ``"swigluoai"``:
            ``gate * sigmoid(1.702 * gate) * (up + 1)`` (GPT-OSS).
        limit: gate is clamped to at most it, up to +-it, before the activation. None: not.
        interleaved: rows of w_gate_up are gate and up in turn, as GPT-OSS has them.
        quantize_input: of FP8 weights: x and the activated product are quantised, one scale a
            token, or one for each 128 columns where the weight has block scales. False: the
            products take x, and the activated product rounded to x's dtype, as they do with other
            weights.
        scale_fmt: ``"ue8m0"``: the scales of x and of the activated product are powers of two. For
            FP8 weights with quantize_input.
        out_dtype: float32 or x's dtype, which None means.
        out: ``[..., H]`` to write the result to; it need not be zeroed.

    Returns:
        ``[..., H]``, zeros for a token without experts. The slots' results are added in order in
        float32 and rounded once. The same operands give the same bits in every call.
    """
    try:
        given = (x, w_gate_up, w_down, topk_weights, scale_gate_up, scale_down, bias_gate_up,
                 bias_down, out)  # fmt: skip
        if needs_gradient(*given):
            refuse_gradient(
                "fused_moe", x=x, w_gate_up=w_gate_up, w_down=w_down, topk_weights=topk_weights,
                scale_gate_up=scale_gate_up, scale_down=scale_down, bias_gate_up=bias_gate_up,
                bias_down=bias_down, out=out,
            )  # fmt: skip
        result = out
        if out is None:
            result = x.new_empty(x.shape, dtype=x.dtype if out_dtype is None else out_dtype)
        _require_dtype(result, out_dtype)
        rows = input_rows(x)
        rows = rows.bfloat16() if x.dtype == torch.float32 else rows
        run_experts(
            written_rows(result, "out"), rows,
            input_rows(topk_weights).to(torch.float32).contiguous(),
            input_rows(expert_ids(topk_ids, "topk_ids", w_gate_up.shape[0])).contiguous(),
            (w_gate_up, scale_gate_up, bias_gate_up), (w_down, scale_down, bias_down),
            (activation, limit, interleaved), quantize_input, scale_fmt,
        )  # fmt: skip
        mark_written(out)
        return result
    except Exception:
        explain(
            {"x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights,
             "topk_ids": topk_ids},
            {"scale_gate_up": scale_gate_up, "scale_down": scale_down, "out": out,
             "bias_gate_up": bias_gate_up, "bias_down": bias_down},
        )  # fmt: skip
        raise


def run_experts(
    out: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Tuple[Optional[torch.Tensor], ...],
    down: Tuple[Optional[torch.Tensor], ...],
    gate: Tuple[str, Optional[float], bool],
    quantize_input: bool,
    scale_fmt: Optional[str],
) -> None:
    """What :func:`fused_moe` does, of operands that the op takes: rows of 16 bits, weights in
    float32, ids in int32.

    Args:
        gate_up, down: a weight, its scale and its bias.
        gate: activation, limit, interleaved.
    """
    (w_gate_up, scale_gate_up, bias_gate_up), (w_down, scale_down, bias_down) = gate_up, down
    activation, limit, interleaved = gate
    _fused_moe(
        out, rows, w_gate_up, w_down, weights, ids, _scale_of(w_gate_up, scale_gate_up),
        _scale_of(w_down, scale_down), _bias_rows(bias_gate_up), _bias_rows(bias_down), activation,
        math.inf if limit is None else limit, interleaved, quantize_input,
        scale_fmt is not None and is_ue8m0(scale_fmt, None),
    )  # fmt: skip


def each_expert_in_turn(x: torch.Tensor, experts: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The routing of ``x [E * rows, H]`` that holds equally many rows of each expert in turn:
    ``(weights, ids)``, one slot a row."""
    ids = torch.arange(experts, device=x.device, dtype=torch.int32)
    ids = ids.repeat_interleave(x.shape[0] // experts)[:, None]
    return x.new_ones(x.shape[0], 1, dtype=torch.float32), ids


def moe_of_weighted_inputs(
    x: torch.Tensor,
    scores: torch.Tensor,
    k: int,
    moe: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A layer whose weights multiply its experts' inputs, as Llama 4's: not linear in them.

    Args:
        x: ``[T, H]``.
        scores: ``[T, E]``, of which the k greatest of a token are its weights.
        moe: ``(x [rows, H], ids [rows, 1], weights [rows, 1])`` to ``[rows, H]``.
    """
    weights, ids = scores.topk(k, dim=-1)
    weighted = (x[:, None] * weights[..., None]).flatten(0, 1)
    out = moe(weighted, ids.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
    return out if k == 1 else out.unflatten(0, (-1, k)).sum(1)


def grouped_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    out_dtype: Optional[torch.dtype] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Products of rows sorted by expert with their experts' weights: ``(a[r] @ w[e].T) * scale_a *
    scale_w`` for the rows r of expert e, float32 accumulation.

    Args:
        a: ``[R, K]``. FP8, bfloat16 or float16.
        w: ``[E, N, K]``, E up to 2,048. FP8 of a's dialect or a's 16-bit dtype; with a 16-bit a
            also FP8 or MXFP4, as in :func:`fused_moe`.
        offsets: ``[E]`` int32 on the device, ascending: expert e has rows ``offsets[e - 1]`` (0 for
            the first) to ``offsets[e]``, as in ``torch._grouped_mm``. One below 0, below the one
            before or beyond R counts as the nearest that is none of these.
        scale_a: float32; ``[1]``, ``[R, 1]`` or ``[R, ceil(K / 128)]``. For an FP8 a.
        scale_w: as in :func:`fused_moe`.
        out_dtype: float32, bfloat16 or float16. None: a's dtype, or bfloat16 for an FP8 a.
        out: ``[R, N]`` to write the result to. Rows beyond the last offset stay as they are.

    Returns:
        ``[R, N]``, rounded once; without ``out``, rows beyond the last offset are undefined. The
        same operands give the same bits in every call.
    """
    try:
        if needs_gradient(a, w, scale_a, scale_w, out):
            refuse_gradient("grouped_gemm", a=a, w=w, scale_a=scale_a, scale_w=scale_w, out=out)
        result = out
        if out is None:
            if out_dtype is None:
                out_dtype = torch.bfloat16 if a.dtype in FP8_DTYPES else a.dtype
            result = a.new_empty(a.shape[0], w.shape[1], dtype=out_dtype)
        _require_dtype(result, out_dtype)
        _grouped_gemm(
            result, input_rows(a), w, input_vector(offsets), scale_a, _scale_of(w, scale_w)
        )
        mark_written(out)
        return result
    except Exception:
        explain(
            {"a": a, "w": w, "offsets": offsets},
            {"scale_a": scale_a, "scale_w": scale_w, "out": out},
        )
        raise


def _require_dtype(out: torch.Tensor, out_dtype: Optional[torch.dtype]) -> None:
    if out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"out must have out_dtype, got {out.dtype} and {out_dtype}")


def expert_ids(ids: torch.Tensor, name: str, experts: int) -> torch.Tensor:
    """Ids of any integer dtype as int32: what is no expert's stays none, and may become another
    that is none."""
    if ids.dtype == torch.int32:
        return ids
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"{name} must be integers, got {ids.dtype}")
    if ids.dtype == torch.uint64:
        ids = ids.view(torch.int64)  # half of them become negative: those were beyond E, too
    elif ids.dtype == torch.uint32:
        ids = ids.to(torch.int64)
    if ids.dtype == torch.int64:
        ids = ids.clamp(-1, experts)
    return ids.to(torch.int32)


_INTEGERS = (torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
             torch.uint64)  # fmt: skip


def _bias_rows(bias: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if bias is None else input_rows(bias)


def _scale_of(w: torch.Tensor, scale: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """E8M0 scales as the op takes them: of MXFP4 as the bytes that they are, of FP8 in float32;
    others as they are."""
    if scale is None or scale.dtype is not E8M0:
        return scale
    return scale.view(torch.uint8) if w.dtype == torch.uint8 else scale.float()
