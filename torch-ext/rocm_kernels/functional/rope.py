"""Norms of queries and keys, rotary embedding and the append to a cache, in one pass between the
projection and attention."""

from typing import Optional, Tuple, Union

import torch

from .._ops import ops
from .attention_arguments import Scale, descale
from .gradients import mark_written, needs_gradient, refuse_gradient
from .rows import optional_vector, require_tensors, side_by_side
from .shapes import register_shapes

_rope_and_cache = ops.rope_and_cache.default


register_shapes("rope_and_cache")


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
    k_scale: Scale = None,
    v_scale: Scale = None,
    out: Optional[torch.Tensor] = None,
    k_out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Norms of q and k, rotary embedding (Su et al., 2021), and keys and values into a cache.

    In float32: ``y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)`` over a head's
    elements, where there is a weight; pairs ``(a, b)`` of its first ``rotary_dim`` elements become
    ``(a cos - b sin, b cos + a sin)``. One rounding follows, to the dtype of what is written; an
    FP8 cache gets ``z * (1 / scale)``, saturated.

    Args:
        q: ``[tokens, heads, D]`` or ``[batch, rows, heads, D]``; with ``num_kv_heads`` the heads of
            keys and of values follow those of queries, as one product of all gives them.
        k: as q, with fewer heads. None: q alone is worked on.
        v: as k, with heads of its own size. It goes to the cache as it is.
        cos: ``[batch or 1, rows, columns]`` or ``[rows, columns]``: a row a token, of rotary_dim
            columns whose second half is not read (transformers repeats the first in it), or of
            rotary_dim / 2. None: nothing is rotated.
        sin: as cos. None: cos has the cosines in its first half of columns, the sines in the second
            (vLLM's ``cos_sin_cache``).
        positions: int32 or int64 ``[tokens]``, ``[rows]`` or ``[batch, rows]``: which row of cos,
            ``[positions, columns]``, is the token's.
        rotary_dim: elements of a head that rotate; None: as many as cos has columns.
        interleaved: pairs are neighbours (GPT-J, GLM), not halves apart (NeoX, Llama).
        q_weight: ``[D]``: q has a norm over each head. Likewise ``k_weight``.
        weight_offset: 1 for norms that multiply by 1 + weight, as Gemma's do.
        k_cache: ``[batch, rows, KV heads, D]``, or pages, ``[pages, rows, KV heads, D]``; k's dtype
            or FP8. Written at the tokens' places.
        v_cache: as k_cache, with v's heads.
        slot_mapping: int32 or int64, one a token: its row, where the rows of all pages are counted
            through. A negative one, here and below: the token goes to no cache.
        cache_seqlens: int32 or int64 ``[batch]``, or a number: rows that a sequence's cache already
            has; its tokens follow.
        cache_positions: int32 or int64 ``[rows]`` or ``[batch, rows]``: the row in the sequence.
        block_table: int32 ``[batch, pages]``: the pages of each sequence, in order; not with
            slot_mapping.
        k_scale: a number, or float32 of one element, ``[KV heads]`` or ``[batch, KV heads]``, of an
            FP8 cache; None: 1. Likewise ``v_scale``.
        out: like q, to write the result to; q itself is rotated in place.
        k_out: like k, to write the rotated keys to; k itself is rotated in place. Must be given
            where there is no cache.

    q, k and v are float32, float16 or bfloat16, of one dtype, D up to 512; cos and sin may have
    another of the three. What is not served raises a ValueError, TypeError or RuntimeError that
    says what was required and what came.

    Places beyond a cache, and positions beyond cos, are refused on the CPU. On a GPU, which would
    have to be waited for, nothing goes to such a place, and such a position gives NaN.

    Returns:
        The rotated queries, like q.
    """
    require_tensors(
        {"q": q}, {"k": k, "v": v, "cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache}
    )
    if num_kv_heads is not None:
        q, k, v = _split(q, k, v, num_kv_heads)
    if needs_gradient(
        q, k, v, cos, sin, q_weight, k_weight, k_cache, v_cache, out, k_out,
        k_scale if isinstance(k_scale, torch.Tensor) else None,
        v_scale if isinstance(v_scale, torch.Tensor) else None,
    ):  # fmt: skip
        refuse_gradient(
            "rope_and_cache", q=q, k=k, v=v, cos=cos, sin=sin, q_weight=q_weight,
            k_weight=k_weight, k_cache=k_cache, v_cache=v_cache, out=out, k_out=k_out,
            k_scale=k_scale if isinstance(k_scale, torch.Tensor) else None,
            v_scale=v_scale if isinstance(v_scale, torch.Tensor) else None,
        )  # fmt: skip
    if q.dim() not in (3, 4):
        raise ValueError(
            f"q must be [tokens, heads, D] or [batch, rows, heads, D], got {list(q.shape)}"
        )
    if rotary_dim is None:
        rotary_dim = 0 if cos is None else cos.shape[-1]
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    four = q.dim() == 4
    batch, rows = q.shape[:2] if four else (1, q.shape[0])
    places, kind = _places(slot_mapping, cache_seqlens, cache_positions, batch, rows, q.device)
    _rope_and_cache(
        result if four else result[None],
        _written(k_out, four), k_cache, v_cache,
        _heads(q, four), _heads(k, four), _heads(v, four),
        _table(cos, positions), _table(sin, positions), _integers(positions),
        optional_vector(q_weight), optional_vector(k_weight), places,
        _pages(block_table), _scale(k_scale, "k_scale", k_cache, q),
        _scale(v_scale, "v_scale", k_cache, q), kind, rotary_dim,
        interleaved, eps, weight_offset,
    )  # fmt: skip
    mark_written(out, k_out, k_cache, v_cache)
    return result


def _split(
    qkv: torch.Tensor, k: Optional[torch.Tensor], v: Optional[torch.Tensor], kv_heads: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the heads of q, k and v."""
    if k is not None or v is not None:
        raise ValueError("num_kv_heads is for keys and values behind q's heads, got k or v too")
    if qkv.dim() < 2 or not 0 < 2 * kv_heads < qkv.shape[-2]:
        raise ValueError(
            "q must have the heads of queries, then num_kv_heads of keys and as many of values, "
            f"got {list(qkv.shape)} and {kv_heads}"
        )
    sizes = (qkv.shape[-2] - 2 * kv_heads, kv_heads, kv_heads)
    return torch.split(qkv, sizes, -2)


def _places(
    slot_mapping: Optional[torch.Tensor],
    cache_seqlens: Union[int, torch.Tensor, None],
    cache_positions: Optional[torch.Tensor],
    batch: int,
    rows: int,
    device: torch.device,
) -> Tuple[Optional[torch.Tensor], str]:
    """The one that is given, by ``[batch, rows]``, and its name."""
    given = (slot_mapping, cache_seqlens, cache_positions)
    if sum(value is not None for value in given) > 1:
        raise ValueError("give one of slot_mapping, cache_seqlens and cache_positions, got more")
    if slot_mapping is not None:
        if slot_mapping.numel() != batch * rows:
            raise ValueError(
                f"slot_mapping must have one for each of {batch * rows} tokens, got "
                f"{list(slot_mapping.shape)}"
            )
        return slot_mapping.reshape(batch, rows), "slot_mapping"
    if cache_seqlens is not None:
        if isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((1,), cache_seqlens, dtype=torch.int64, device=device)
        elif cache_seqlens.shape != (batch,):
            raise ValueError(
                f"cache_seqlens must be a number or [{batch}], got {list(cache_seqlens.shape)}"
            )
        return cache_seqlens[:, None].expand(batch, rows), "cache_seqlens"
    if cache_positions is not None:
        return _integers(cache_positions), "cache_positions"
    return None, "slot_mapping"


def _heads(tensor: Optional[torch.Tensor], four: bool) -> Optional[torch.Tensor]:
    if tensor is None:
        return None
    return side_by_side(tensor if four else tensor[None])


def _written(tensor: Optional[torch.Tensor], four: bool) -> Optional[torch.Tensor]:
    return tensor if tensor is None or four else tensor[None]


def _pages(block_table: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    if block_table is None:
        return None
    if block_table.is_floating_point():
        raise TypeError(f"block_table must be of integers, got {block_table.dtype}")
    return side_by_side(block_table.to(torch.int32))


def _table(
    table: Optional[torch.Tensor], positions: Optional[torch.Tensor]
) -> Optional[torch.Tensor]:
    """``[1 or batch, rows, columns]``, or as it is beside positions."""
    if table is None:
        return None
    return side_by_side(table[None] if table.dim() == 2 and positions is None else table)


def _integers(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """``[1 or batch, rows]``."""
    return tensor[None] if tensor is not None and tensor.dim() == 1 else tensor


def _scale(
    scale: Scale, name: str, cache: Optional[torch.Tensor], q: torch.Tensor
) -> Optional[torch.Tensor]:
    """A cache's scale as the op takes it: ``[1 or KV heads]`` or ``[batch, KV heads]``."""
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        if isinstance(scale, torch.Tensor):
            return scale.reshape(1)
        return torch.full((1,), scale, dtype=torch.float32, device=q.device)
    if cache is None or scale.dim() < 2:
        return scale
    batch = q.shape[0] if q.dim() == 4 else 1
    return descale(scale, name, batch, cache.shape[-2], q)
