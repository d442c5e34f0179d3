"""Checks attention's arguments: takes those of flash-attn's other orders and versions that mean the
same here, and refuses the others with what to do instead."""

import numbers
from typing import Any, Dict, Optional, Tuple, Union

import torch

from .rows import side_by_side

Scale = Union[float, torch.Tensor, None]

_OTHER_ORDER = (
    "the orders of flash_attn 2 and 3 are others: give arguments behind q, k and v by name"
)

# They say how the work is divided, which the backend decides, or which flash_attn computes.
_CHANGE_NOTHING = (
    "pack_gqa",
    "sm_margin",
    "scheduler_metadata",
    "num_splits_dynamic_ptr",
    "fa_version",
)
# Those that other versions have, by what they may be here, and what to do about all else.
_OTHERS = {
    "dropout_p": (0, "for inference alone"),
    "alibi_slopes": (
        None,
        "no kernel here adds them to scores; take another attention for such models",
    ),
    "qv": (
        None,
        "give torch.cat([q, qv], -1) as q, torch.cat([k, v], -1) as k, and a softmax_scale",
    ),
    "q_descale": (None, "q is not FP8 here: what it was quantised from needs no factor"),
    "attention_chunk": (
        0,
        "give each chunk as a sequence of its own to flash_attn_varlen_func",
    ),
    "seqused_q": (None, "all rows of q count: leave the others out, by cu_seqlens_q"),
    "cu_seqlens_k_new": (None, "append keys of sequences that get unlike many by rope_and_cache"),
    "rotary_seqlens": (None, "rotate keys and queries that stand elsewhere by rope_and_cache"),
    "learnable_sink": (None, "its name is s_aux here"),
    "leftpad_k": (None, "flash_attn_with_kvcache has cache_leftpad"),
    "mask_mod": (None, "no kernel here calls functions"),
    "score_mod": (None, "no kernel here calls functions"),
    "block_sparse_tensors": (None, "no kernel here leaves out blocks of keys"),
}  # fmt: skip


def take_others(
    function: str, by_position: int, more: Tuple[Any, ...], others: Dict[str, Any]
) -> None:
    """Raises unless what other versions of flash-attn take changes nothing here.

    Args:
        by_position: how many arguments ``function`` has by position; ``more`` are behind them.
    """
    if more:
        raise TypeError(
            f"{function} takes {by_position} arguments by position, got {by_position + len(more)}: "
            f"{_OTHER_ORDER}"
        )
    for name, value in others.items():
        if name in _CHANGE_NOTHING:
            continue
        if name not in _OTHERS:
            raise TypeError(
                f"{function} has no argument {name}; help({function}) tells which it has"
            )
        nothing, advice = _OTHERS[name]
        if value is not None and (nothing is None or isinstance(value, torch.Tensor) or value != 0):
            raise ValueError(f"{name} must be {nothing}, got {_told(value)}: {advice}")


def flag(causal: Any) -> bool:
    """True or False. In the places of other orders' arguments other things come here."""
    if causal is True or causal is False:
        return causal
    raise ValueError(f"causal must be True or False, got {_told(causal)}: {_OTHER_ORDER}")


def cap(softcap: Any) -> float:
    """A number; None is none."""
    if softcap is None:
        return 0.0
    if isinstance(softcap, (bool, torch.Tensor, tuple, list)):
        raise ValueError(
            f"softcap must be a number, 0 for none, got {_told(softcap)}: {_OTHER_ORDER}"
        )
    return softcap


def _told(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def scale(softmax_scale: Any) -> float:
    """A number. In the places of flash_attn 2's arguments other things come here."""
    if isinstance(softmax_scale, (bool, torch.Tensor, tuple, list)) or softmax_scale == 0:
        raise ValueError(
            f"softmax_scale must be a number other than 0, got {_told(softmax_scale)}: "
            f"{_OTHER_ORDER}"
        )
    return softmax_scale


def window(window_size: Any) -> Tuple[int, int]:
    """Two integers; None is no bound."""
    if window_size is None:
        return (-1, -1)
    pair = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(pair) != 2 or any(isinstance(bound, float) for bound in pair):
        raise ValueError(
            "window_size must be two integers, keys before and behind a query, -1 or None for all, "
            f"got {_told(window_size)}: {_OTHER_ORDER}"
        )
    left, right = (-1 if bound is None else bound for bound in pair)
    return left, right


def lengths(
    given: Any, batch: int, cache: torch.Tensor, block_table: Optional[torch.Tensor]
) -> Optional[torch.Tensor]:
    """``[batch]``, of as many or of one number for all sequences."""
    if isinstance(given, numbers.Integral):
        rows = cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        if not 0 <= given <= rows:
            raise ValueError(
                f"cache_seqlens must be 0 to the {rows} rows of a sequence's cache, got {given}"
            )
        return torch.full((batch,), int(given), dtype=torch.int32, device=cache.device)
    counts = integers(given, "cache_seqlens")
    return counts.expand(batch) if counts is not None and counts.dim() == 0 else counts


def integers(tensor: Optional[torch.Tensor], name: str) -> Optional[torch.Tensor]:
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
        what = type(tensor).__name__ if not isinstance(tensor, torch.Tensor) else tensor.dtype
        raise TypeError(f"{name} must be a tensor of integers, got {what}: {_OTHER_ORDER}")
    # A conversion to the same dtype still costs the host a call, and there are up to five.
    return side_by_side(tensor if tensor.dtype == torch.int32 else tensor.to(torch.int32))


def descale(
    scale: Scale, name: str, batch: int, kv_heads: int, q: torch.Tensor
) -> Optional[torch.Tensor]:
    """Expands a descale to ``[batch, KV heads]``."""
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        return torch.full((1, 1), scale, dtype=torch.float32, device=q.device).expand(
            batch, kv_heads
        )
    if scale.numel() == 1:
        if scale.dim() > 2:
            scale = scale.reshape(1)
    elif (
        scale.dim() not in (1, 2)
        or scale.shape[-1] not in (1, kv_heads)
        or scale.shape[:-1] not in ((), (1,), (batch,))
    ):
        raise ValueError(
            f"{name} must be a number, or have one element, {kv_heads} or {[batch, kv_heads]}, got "
            f"shape {list(scale.shape)}"
        )
    scale = scale if scale.dtype == torch.float32 else scale.float()
    # What an append has expanded comes here again.
    return scale if scale.shape == (batch, kv_heads) else scale.expand(batch, kv_heads)
