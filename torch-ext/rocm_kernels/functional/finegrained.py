"""The products of finegrained FP8 checkpoints, by the names and signatures of the Hub's
``finegrained-fp8`` kernel, which transformers looks up: naming this package there runs them here.

    A [..., K] @ B[N, K].T * Bs                 matmul_2d        one linear
    A [S, K]   @ B[expert of the row].T * Bs    matmul_batched   rows in any order (decode)
                                                matmul_grouped   rows sorted by expert (prompts)

A is 16-bit or float32 and quantised here: per 128 columns beside weights with 128 x 128 blocks, per
row beside a weight with one scale, or with ``activation_scale``. Computed scales of A are not
rounded to powers of two beside UE8M0 scales of B, here as there: ``scale_fmt`` of
:func:`fp8_linear` does that, and ``quantize_model_`` asks for it. Arguments that the three share:

``B``
    ``[N, K]`` or, for experts, ``[E, N, K]``; FP8 in either dialect. On an FNUZ device a weight in
    OCP is read as FNUZ, see dialect.py.
``Bs``
    float32 or UE8M0; it dequantises. Blocks: ``[ceil(N / 128), ceil(K / 128)]``; whole: one value.
    For experts with a leading ``E``, and whole ones may have a scale each for gate and up,
    ``[E, 2, 1]``.
``block_size``
    ``(128, 128)``; None or ``(N, K)``: one scale for the whole weight.
``output_dtype``
    None: A's.

Errors: ValueError for block sizes and packed FP4 weights that have no kernel here.
"""

from typing import Optional, Sequence

import torch

from .dialect import native_weight
from .fp8 import FP8_DTYPES, SCALE_BLOCK, quantize_fp8
from .gradients import needs_gradient, refuse_gradient
from .moe import expert_ids as int32_ids
from .moe import grouped_gemm
from .product import fp8_linear
from .rows import require_tensors


def matmul_2d(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    block_size: Optional[Sequence[int]],
    output_dtype: Optional[torch.dtype] = None,
    activation_scale: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """One linear's product, without a bias.

    Args:
        A: ``[..., K]``.
        activation_scale: float32, one value in the units of an OCP checkpoint: A is quantised with
            it. None: with computed scales.

    Returns:
        ``[..., N]``.
    """
    require_tensors({"A": A, "B": B, "Bs": Bs}, {"activation_scale": activation_scale})
    if needs_gradient(A, B, Bs, activation_scale):
        refuse_gradient("matmul_2d", A=A, B=B, Bs=Bs, activation_scale=activation_scale)
    _whole(B, block_size)
    w, scale_w = native_weight(B, Bs)
    if activation_scale is not None and w.dtype != B.dtype:
        activation_scale = activation_scale * 2  # FNUZ reaches half as far
    out_dtype = A.dtype if output_dtype is None else output_dtype
    return fp8_linear(A, w, scale_w, scale_x=activation_scale, out_dtype=out_dtype)


def matmul_batched(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    expert_ids: torch.Tensor,
    block_size: Optional[Sequence[int]],
    output_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Multiplies each row by the weight of its expert.

    Args:
        A: ``[S, K]``.
        expert_ids: ``[S]``, integers. Ids of E and beyond, and negative ones, stand for experts
            that live elsewhere.

    Returns:
        ``[S, N]``; zeros where the expert lives elsewhere.
    """
    require_tensors({"A": A, "B": B, "Bs": Bs, "expert_ids": expert_ids}, {})
    if needs_gradient(A, B, Bs):
        refuse_gradient("matmul_batched", A=A, B=B, Bs=Bs)
    experts = B.shape[0]
    if expert_ids.shape != A.shape[:1]:
        raise ValueError(
            f"expert_ids must be [S] for an A of [S, K], got {tuple(expert_ids.shape)} and "
            f"{tuple(A.shape)}"
        )
    if expert_ids.device != A.device:
        raise ValueError(f"expert_ids must be on A's {A.device}, got {expert_ids.device}")
    ids = int32_ids(expert_ids, "expert_ids", experts)
    # Those that live elsewhere go last.
    sorted_ids, order = torch.sort(torch.where(ids < 0, experts, ids))
    own = torch.arange(experts, device=A.device, dtype=sorted_ids.dtype)
    offsets = torch.searchsorted(sorted_ids, own, right=True, out_int32=True)
    out = _expert_products(A[order], B, Bs, offsets, block_size, output_dtype)
    return torch.empty_like(out).index_copy_(0, order, out)


def matmul_grouped(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    block_size: Optional[Sequence[int]],
    output_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Rows sorted by expert.

    Args:
        A: ``[S, K]``.
        offsets: ``[E]``, int32: where each expert's rows end, as in :func:`grouped_gemm`.
        tokens_per_expert: ``[E]``; not read, ``offsets`` says it.

    Returns:
        ``[S, N]``; zeros after the last expert's rows.
    """
    require_tensors({"A": A, "B": B, "Bs": Bs, "offsets": offsets}, {})
    if needs_gradient(A, B, Bs):
        refuse_gradient("matmul_grouped", A=A, B=B, Bs=Bs)
    return _expert_products(A, B, Bs, offsets, block_size, output_dtype)


def _whole(w: torch.Tensor, block_size: Optional[Sequence[int]]) -> bool:
    """Whether a weight has one scale; raises for what has no kernel here."""
    if w.dtype not in FP8_DTYPES:
        raise ValueError(f"B must be one of {FP8_DTYPES}, got {w.dtype}: FP4 has no kernel here")
    if block_size is None or tuple(block_size) == tuple(w.shape[-2:]):
        return True
    if tuple(block_size) != (SCALE_BLOCK, SCALE_BLOCK):
        raise ValueError(
            f"block_size must be {(SCALE_BLOCK, SCALE_BLOCK)}, None or (N, K), "
            f"got {tuple(block_size)}: load such a checkpoint with dequantize=True"
        )
    return False


def _expert_products(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    offsets: torch.Tensor,
    block_size: Optional[Sequence[int]],
    output_dtype: Optional[torch.dtype],
) -> torch.Tensor:
    """``[S, N]`` of rows sorted by expert, quantised together and multiplied in one launch."""
    if A.dim() != 2 or B.dim() != 3:
        raise ValueError(
            f"A must be [S, K] and B [E, N, K], got {tuple(A.shape)} and {tuple(B.shape)}"
        )
    whole = _whole(B, block_size)
    w, scale_w = native_weight(B, Bs)
    q, scale = quantize_fp8(A, group_size=None if whole else SCALE_BLOCK, fp8_dtype=w.dtype)
    # Where the experts' rows end is known on the device alone.
    out = A.new_zeros(A.shape[0], B.shape[1], dtype=output_dtype)
    return grouped_gemm(q, w, offsets, scale, _scale_of_experts(scale_w, w, whole), out=out)


def _scale_of_experts(scale: torch.Tensor, w: torch.Tensor, whole: bool) -> torch.Tensor:
    """Reshapes a scale to what grouped_gemm takes: ``[E]``, or ``[E, N, 1]`` where gate and up have
    a scale each."""
    if not whole:
        return scale
    experts, rows = w.shape[:2]
    scale = scale.reshape(experts, -1, 1)
    if scale.shape[1] == 1:
        return scale.reshape(experts)
    return scale.repeat_interleave(rows // scale.shape[1], 1)
