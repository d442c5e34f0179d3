"""The definition of every op, in plain torch: slow, and what each backend is tested against.

The functions have the names, arguments and results of the functional API, less the ``out``
arguments. See ``rocm_kernels.functional`` for shapes and units.

Longer than 500 lines, because every definition stands here.
"""

import math
from typing import Any, Optional, Sequence, Tuple, Union

import torch

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
MIN_SCALE = torch.finfo(torch.float32).tiny
SCALE_BLOCK = 128


def all_reduce(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' x, ``parts`` in the ranks' order: of
    :meth:`rocm_kernels.comm.Communicator.all_reduce`."""
    total = torch.zeros(parts[0].shape, dtype=torch.float32, device=parts[0].device)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    residual: Optional[torch.Tensor] = None,
    *,
    weight_offset: float = 0.0,
    residual_out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The sum goes to ``residual_out``, or else to ``residual``, in place."""
    return _rmsnorm(x, weight, eps, residual, weight_offset, residual_out).to(x.dtype)


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
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The sum goes to ``residual_out``, or else to ``residual``, in place."""
    y = _rmsnorm(x, weight, eps, residual, weight_offset, residual_out)
    return _quantize(y, scale, group_size, scale_ub, scale_fmt, fp8_dtype)


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
    scale_fmt: Optional[str] = None,
    fp8_dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return _quantize(_swiglu(x, up, activation), scale, group_size, scale_ub, scale_fmt, fp8_dtype)


def quantize_fp8(
    x: torch.Tensor,
    *,
    scale: Optional[torch.Tensor] = None,
    group_size: Optional[int] = None,
    scale_ub: Optional[float] = None,
    scale_fmt: Optional[str] = None,
    fp8_dtype: Optional[torch.dtype] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    return _quantize(x.float(), scale, group_size, scale_ub, scale_fmt, fp8_dtype)


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
        scale_a = scale_a.reshape(rows.shape[0], scale_a.shape[-1])
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
    scale_fmt: Optional[str] = None,
    bias: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    if x.dtype in FP8_MAX:
        return gemm(x, w, scale_x, scale_w, bias=bias, out_dtype=out_dtype)
    blocks = scale_w.dim() == 2 and scale_w.shape[1] > 1 and scale_x is None
    group_size = SCALE_BLOCK if blocks else None
    q, scale = quantize_fp8(
        x, scale=scale_x, group_size=group_size, scale_fmt=scale_fmt, fp8_dtype=w.dtype
    )
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


def matmul_2d(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    block_size: Optional[Sequence[int]],
    output_dtype: Optional[torch.dtype] = None,
    activation_scale: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    whole = block_size is None or tuple(block_size) == tuple(B.shape)
    group_size = None if whole or activation_scale is not None else SCALE_BLOCK
    q, scale = quantize_fp8(A, scale=activation_scale, group_size=group_size, fp8_dtype=B.dtype)
    out_dtype = A.dtype if output_dtype is None else output_dtype
    # A weight's two scales, of gate and up, become one for each row.
    Bs = Bs.float()
    Bs = Bs.repeat_interleave(B.shape[0] // Bs.shape[0], 0) if whole and Bs.numel() > 1 else Bs
    return gemm(q, B, scale, Bs, out_dtype=out_dtype)


def matmul_batched(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    expert_ids: torch.Tensor,
    block_size: Optional[Sequence[int]],
    output_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    out = A.new_zeros(A.shape[0], B.shape[1], dtype=output_dtype)
    for row, expert in enumerate(expert_ids.tolist()):
        if 0 <= expert < B.shape[0]:
            product = matmul_2d(A[row : row + 1], B[expert], Bs[expert], block_size, output_dtype)
            out[row : row + 1] = product
    return out


def matmul_grouped(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    block_size: Optional[Sequence[int]],
    output_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    experts = torch.searchsorted(offsets, torch.arange(A.shape[0], device=A.device), right=True)
    return matmul_batched(A, B, Bs, experts, block_size, output_dtype)


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


def _rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: Optional[torch.Tensor],
    weight_offset: float,
    residual_out: Optional[torch.Tensor],
) -> torch.Tensor:
    if residual is not None:
        x = (residual if residual_out is None else residual_out).copy_(x + residual)
    h = x.float()
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h * rstd * (weight.float() + weight_offset)


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
    scale_fmt: Optional[str],
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
        if scale_fmt == "ue8m0":
            scale = next_power_of_two(scale)
        full = scale.repeat_interleave(width, -1)[..., :columns]
    q = (y * (1.0 / full)).clamp(-largest, largest).to(fp8_dtype)
    return q, scale


def next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The least one that is not below ``scale``, float32, positive and normal: ``2 **
    ceil(log2(scale))`` without a logarithm's rounding. Where the mantissa is not zero, it goes, and
    the exponent is one more."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def topk_softmax(
    logits: torch.Tensor, k: int, *, renormalize: bool = True
) -> Tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    ids = _greatest(logits, k)
    weights = logits.double().softmax(-1).gather(-1, ids)
    if renormalize:  # softmax of the chosen alone, in which no weight of a far lower logit is lost
        weights = logits.double().gather(-1, ids).softmax(-1) + 0 * weights
    return weights.float(), ids.int()


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
    scores = logits.float().sigmoid()
    choice = _nan_last(scores if bias is None else scores + bias)
    by_group = choice.unflatten(-1, (groups, -1))
    best = by_group.sort(-1, descending=True).values[..., :2].sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _greatest(best, groups_kept), True)
    # Of those dropped none may be chosen, not even beside choices of -infinity: so by order.
    order = _greatest(choice, choice.shape[-1])
    of_kept = kept.gather(-1, order // by_group.shape[-1])
    ids = order.gather(-1, _greatest(of_kept.float(), k))
    weights = scores.double().gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * scale).float(), ids.int()


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
) -> torch.Tensor:
    """Products and sums in float64: the kernels, in float32, are held to an error bound."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    ids = topk_ids.reshape(rows.shape[0], topk_ids.shape[-1])
    weights = topk_weights.reshape(ids.shape).double()
    out_dtype = x.dtype if out_dtype is None else out_dtype
    rows = rows.bfloat16() if x.dtype == torch.float32 else rows
    k = ids.shape[1]
    slots = rows.new_zeros(rows.shape[0], k, rows.shape[1], dtype=torch.float64)
    quantize = quantize_input and w_gate_up.dtype in FP8_MAX

    def product(a, w, scale, bias, expert):
        scale_e = None if scale is None else scale[expert]
        if quantize:
            a = _quantized_like(a, w.dtype, scale_e, scale_fmt)
        out = a.double() @ dequantize_expert(w[expert], scale_e).t()
        return out if bias is None else out + bias[expert].double()

    for expert in range(w_gate_up.shape[0]):
        tokens, slot = (ids == expert).nonzero(as_tuple=True)
        both = product(rows[tokens], w_gate_up, scale_gate_up, bias_gate_up, expert)
        h = gated_experts(both.float(), activation, limit, interleaved)
        h = h if quantize else h.to(rows.dtype)
        y = product(h, w_down, scale_down, bias_down, expert)
        slots[tokens, slot] = y * weights[tokens, slot, None]
    return slots.sum(1).to(out_dtype).view(x.shape)


def grouped_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Rows beyond the last offset are zeros."""
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype in FP8_MAX else a.dtype
    rows = dequantize(a, scale_a, 1)
    out = a.new_zeros(a.shape[0], w.shape[1], dtype=torch.float64)
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        end = max(begin, min(end, a.shape[0]))
        scale = None if scale_w is None else scale_w[expert]
        out[begin:end] = rows[begin:end] @ dequantize_expert(w[expert], scale).t()
        begin = end
    return out.to(out_dtype)


def dequantize_expert(w: torch.Tensor, scale: Optional[torch.Tensor]) -> torch.Tensor:
    """One expert's ``w [N, K]``, or ``[N, K / 2]`` of MXFP4, in float64. (No FP4 dtype of torch's
    converts.)"""
    if w.dtype != torch.uint8:
        return dequantize(w, scale, SCALE_BLOCK)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    magnitudes += [-value for value in magnitudes]
    values = torch.tensor(magnitudes, dtype=torch.float64, device=w.device)
    halves = torch.stack([w & 0xF, w >> 4], -1).flatten(-2)
    exponents = scale.view(torch.uint8).double()
    powers = torch.where(exponents == 255, math.nan, torch.exp2(exponents - 127))
    return values[halves.long()] * powers.repeat_interleave(32, -1)[..., : halves.shape[-1]]


def gated_experts(
    both: torch.Tensor, activation: str, limit: Optional[float], interleaved: bool
) -> torch.Tensor:
    """The activated product of ``both [rows, 2 * I]`` float32: see ``functional.fused_moe``."""
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swigluoai":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return _swiglu(gate, up, activation)


def _quantized_like(
    a: torch.Tensor,
    fp8_dtype: torch.dtype,
    scale: Optional[torch.Tensor],
    scale_fmt: Optional[str],
) -> torch.Tensor:
    """``a [rows, K]`` through FP8 and back, in groups of 128 beside block scales, in float64."""
    # Of one expert: 0-d per tensor, [N, 1] per channel, else blocks. A K of one block is the same
    # by either rule.
    blocks = scale is not None and scale.dim() == 2 and scale.shape[1] > 1
    group_size = SCALE_BLOCK if blocks else None
    q, scales = quantize_fp8(
        a.float(), group_size=group_size, scale_fmt=scale_fmt, fp8_dtype=fp8_dtype
    )
    return dequantize(q, scales, 1)


def _greatest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k greatest along the last dimension, of equal ones the lowest first."""
    return _nan_last(values).sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _nan_last(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), -math.inf, values)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Optional[torch.Tensor] = None,
    *,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of ``[batch, rows, heads, D]``, in float32, or in float64 for float64.

    ``seqused_k``: int ``[batch]``, the keys of each sequence that count; ``cache_leftpad``: those
    at its beginning that are not seen. ``k_descale``, ``v_descale``: ``[batch, KV heads]``.
    """
    outs, sums = [], []
    for b in range(q.shape[0]):
        count = k.shape[1] if seqused_k is None else int(seqused_k[b])
        scales = [None if s is None else s[b] for s in (k_descale, v_descale)]
        out, lse = attention(
            q[b], k[b, :count], v[b, :count], softmax_scale, causal, window_size, softcap, s_aux,
            *scales, 0 if cache_leftpad is None else int(cache_leftpad[b]),
        )  # fmt: skip
        outs.append(out)
        sums.append(lse)
    return torch.stack(outs), torch.stack(sums)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    leftpad: int = 0,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of one sequence: q ``[rows, heads, D]``, k and v ``[keys, KV heads, D]``;
    descales ``[KV heads]``. Nothing is rounded: out is float32, or float64 for float64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads, size = q.shape
    keys, kv_heads = k.shape[:2]
    k, v = k.to(wide), v.to(wide)
    if k_descale is not None:
        k = k * k_descale.to(wide)[:, None]
    if v_descale is not None:
        v = v * v_descale.to(wide)[:, None]
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(rows, device=q.device)[:, None] + keys - rows
    key = torch.arange(keys, device=q.device)[None]
    # More keys than lie between any two positions are all; their sums would overflow.
    left, right = (min(bound, 2**31) for bound in (window_size[0], 0 if causal else window_size[1]))
    seen = (key >= leftpad).expand(rows, keys)
    if left >= 0:
        seen = seen & (key >= position - left)
    if right >= 0:
        seen = seen & (key <= position + right)
    scores = scores.masked_fill(~seen, -math.inf)
    if s_aux is not None:
        sink = s_aux.to(wide)[:, None, None].expand(heads, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse[..., None]).nan_to_num(0.0)[..., :keys]
    # What no query sees may hold anything.
    v = v.masked_fill(~seen.any(0)[:, None, None], 0.0)
    return torch.einsum("hqk,khd->qhd", p, v), lse


def rope_and_cache(
    q: torch.Tensor,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    cos: Optional[torch.Tensor] = None,
    sin: Optional[torch.Tensor] = None,
    *,
    num_kv_heads: Optional[int] = None,
    positions: Optional[torch.Tensor] = None,
    rotary_dim: Optional[int] = None,
    interleaved: bool = False,
    q_weight: Optional[torch.Tensor] = None,
    k_weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    k_cache: Optional[torch.Tensor] = None,
    v_cache: Optional[torch.Tensor] = None,
    slot_mapping: Optional[torch.Tensor] = None,
    cache_seqlens: Union[int, torch.Tensor, None] = None,
    cache_positions: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    k_scale: Union[float, torch.Tensor, None] = None,
    v_scale: Union[float, torch.Tensor, None] = None,
    k_out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The turned keys go to ``k_out``, and with the values to the caches, in place.

    Everything is float32 from the inputs, exact in it, to the one rounding of each result: the norm
    is not rounded before it turns, as it is in transformers.
    """
    if num_kv_heads is not None:
        q, k, v = q.split((q.shape[-2] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), -2)
    if rotary_dim is None:
        rotary_dim = 0 if cos is None else cos.shape[-1]
    half = rotary_dim // 2
    if cos is not None:
        cos, sin = cos[..., :half], cos[..., half:] if sin is None else sin[..., :half]
        if positions is not None:
            cos, sin = cos[positions.long()], sin[positions.long()]
        cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)

    def turned(x: torch.Tensor, weight: Optional[torch.Tensor]) -> torch.Tensor:
        y = x.float()
        if weight is not None:
            y = _rmsnorm(x, weight, eps, None, weight_offset, None)
        if cos is None:
            return y
        turning, rest = y[..., :rotary_dim], y[..., rotary_dim:]
        pairs = turning.unflatten(-1, (half, 2) if interleaved else (2, half))
        a, b = pairs.unbind(-1 if interleaved else -2)
        z = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if interleaved else -2)
        return torch.cat([z.flatten(-2), rest], -1)

    if k is not None:
        keys = turned(k, k_weight)
        if k_out is not None:
            k_out.copy_(keys)
        if k_cache is not None:
            places = _cache_places(
                k.shape, k_cache, slot_mapping, cache_seqlens, cache_positions, block_table
            )
            rows = k.shape[1] if k.dim() == 4 else k.shape[0]
            _write_cache(k_cache, keys, k_scale, rows, *places)
            _write_cache(v_cache, v.float(), v_scale, rows, *places)
    return turned(q, q_weight).to(q.dtype)


def decode_layers(
    residual: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    *,
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    norm_weights: Sequence[torch.Tensor],
    w_o: Sequence[torch.Tensor],
    scale_o: Sequence[torch.Tensor],
    w_gate_up: Sequence[torch.Tensor],
    scale_gate_up: Sequence[torch.Tensor],
    w_down: Sequence[torch.Tensor],
    scale_down: Sequence[torch.Tensor],
    next_norm_weights: Sequence[torch.Tensor] = (),
    w_qkv: Sequence[torch.Tensor] = (),
    scale_qkv: Sequence[torch.Tensor] = (),
    bias_qkv: Sequence[torch.Tensor] = (),
    q_norm_weights: Sequence[torch.Tensor] = (),
    k_norm_weights: Sequence[torch.Tensor] = (),
    k_scales: Sequence[torch.Tensor] = (),
    v_scales: Sequence[torch.Tensor] = (),
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale: Optional[float] = None,
    seqused_k: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    window_left: int = -1,
    interleaved: bool = False,
) -> torch.Tensor:
    """The functions above one by one; residual, qkv and caches are written."""
    if residual.dim() == 2:  # sequence by sequence
        for b in range(len(residual)):

            def its(tensor: Any, b: int = b) -> Any:
                return tensor if tensor is None or tensor.numel() == 1 else tensor[b : b + 1]

            angles = (t if t.dim() == 1 else t[b] for t in (cos, sin))
            decode_layers(
                residual[b], qkv[b], *angles, its(position),
                k_caches=[cache[b] for cache in k_caches],
                v_caches=[cache[b] for cache in v_caches], norm_weights=norm_weights, w_o=w_o,
                scale_o=scale_o, w_gate_up=w_gate_up, scale_gate_up=scale_gate_up, w_down=w_down,
                scale_down=scale_down, next_norm_weights=next_norm_weights, w_qkv=w_qkv,
                scale_qkv=scale_qkv, bias_qkv=bias_qkv, q_norm_weights=q_norm_weights,
                k_norm_weights=k_norm_weights, k_scales=k_scales, v_scales=v_scales, eps=eps,
                weight_offset=weight_offset, scale=scale, seqused_k=its(seqused_k),
                leftpad_k=its(leftpad_k), window_left=window_left, interleaved=interleaved,
            )  # fmt: skip
        return residual
    fp8_dtype = w_o[0].dtype
    end = int(position) + 1 if seqused_k is None else int(seqused_k)
    begin = 0 if leftpad_k is None else int(leftpad_k)
    if window_left >= 0:
        begin = max(begin, end - 1 - window_left)
    norm_options = {"fp8_dtype": fp8_dtype, "weight_offset": weight_offset}

    def product(quantized: Tuple[torch.Tensor, torch.Tensor], w: torch.Tensor,
                scale_w: torch.Tensor, bias: Optional[torch.Tensor] = None
                ) -> torch.Tensor:  # fmt: skip
        return gemm(quantized[0], w, quantized[1], scale_w, bias=bias, out_dtype=residual.dtype)

    def of_layer(tensors: Sequence[torch.Tensor], i: int) -> Optional[torch.Tensor]:
        return tensors[i] if tensors else None

    for i, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches)):
        k_scale, v_scale = of_layer(k_scales, i), of_layer(v_scales, i)
        q = rope_and_cache(
            qkv.view(1, 1, -1, k_cache.shape[2]), None, None, cos[None, None], sin[None, None],
            num_kv_heads=k_cache.shape[1], interleaved=interleaved, k_cache=k_cache[None],
            v_cache=v_cache[None],
            cache_positions=position.view(1, 1), k_scale=k_scale, v_scale=v_scale,
            q_weight=of_layer(q_norm_weights, i), k_weight=of_layer(k_norm_weights, i), eps=eps,
            weight_offset=weight_offset,
        )  # fmt: skip
        kv_heads = k_cache.shape[1]
        attended, _ = flash_attn_func(
            q, k_cache[None, begin:end], v_cache[None, begin:end], softmax_scale=scale,
            k_descale=None if k_scale is None else k_scale.expand(1, kv_heads),
            v_descale=None if v_scale is None else v_scale.expand(1, kv_heads),
        )  # fmt: skip
        attended = quantize_fp8(attended.reshape(1, -1), fp8_dtype=fp8_dtype)
        h = residual.clone()[None]
        x = rmsnorm_fp8(
            product(attended, w_o[i], scale_o[i]), norm_weights[i], eps, h, **norm_options
        )
        y = swiglu_fp8(product(x, w_gate_up[i], scale_gate_up[i]), fp8_dtype=fp8_dtype)
        residual.copy_((h + product(y, w_down[i], scale_down[i]))[0])
        if i < len(w_qkv):
            x = rmsnorm_fp8(residual[None], next_norm_weights[i], eps, **norm_options)
            qkv.copy_(product(x, w_qkv[i], scale_qkv[i], of_layer(bias_qkv, i))[0])
    return residual


def _cache_places(
    shape: torch.Size,
    cache: torch.Tensor,
    slot_mapping: Optional[torch.Tensor],
    cache_seqlens: Union[int, torch.Tensor, None],
    cache_positions: Optional[torch.Tensor],
    block_table: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which of the tokens, flat, go to the cache; their pages, and rows in these."""
    batch, rows = shape[:2] if len(shape) == 4 else (1, shape[0])
    page_size = cache.shape[1]
    if slot_mapping is not None:
        slots = slot_mapping.reshape(-1).long()
        tokens = (slots >= 0).nonzero().flatten()
        return tokens, slots[tokens] // page_size, slots[tokens] % page_size
    if cache_seqlens is not None:
        begin = torch.as_tensor(cache_seqlens, device=cache.device).long().reshape(-1, 1)
        at = begin + torch.arange(rows, device=cache.device)
    else:
        at = cache_positions.long()
    at = at.expand(batch, rows).reshape(-1)
    tokens = (at >= 0).nonzero().flatten()
    at, page = at[tokens], tokens // rows
    if block_table is not None:
        page, at = block_table[page, at // page_size].long(), at % page_size
    return tokens, page, at


def _write_cache(
    cache: torch.Tensor,
    values: torch.Tensor,
    scale: Union[float, torch.Tensor, None],
    rows_of_sequence: int,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    values = values.reshape(-1, *values.shape[-2:])[tokens]
    if cache.dtype in FP8_MAX:
        if scale is not None:
            scale = torch.as_tensor(scale, dtype=torch.float32, device=values.device)
            if scale.dim() == 2 and scale.shape[0] > 1 and scale.shape[1] == values.shape[1]:
                values = values * (1.0 / scale)[tokens // rows_of_sequence][:, :, None]
            else:
                values = values * (1.0 / scale).reshape(-1, 1)
        values = values.clamp(-FP8_MAX[cache.dtype], FP8_MAX[cache.dtype])
    values = values.to(cache.dtype)
    if cache.dtype in FP8_MAX:  # torch copies no FP8 by indices
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    cache[pages, rows] = values
