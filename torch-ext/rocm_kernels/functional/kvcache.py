"""New keys and values behind those of a cache, and rotations by their places in it: what
``flash_attn_with_kvcache`` does before it attends."""

import contextlib
from typing import Iterator, Optional

import torch

from .._ops import ops
from .fp8 import FP8_DTYPES
from .gradients import mark_written
from .rows import side_by_side

_rope_and_cache = ops.rope_and_cache.default

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def kvcache_append_path(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> str:
    """Which path :func:`flash_attn_with_kvcache` takes to append k and v.

    Returns:
        ``"rope_and_cache"``: the op of :func:`rope_and_cache`, a launch for keys and values of all
        sequences; with ``rotary_cos`` it rotates the queries too, if there are as many as new keys
        and each has a position of its own, and else another launch does. ``"torch"``: copies by
        index, where k and v are FP8 already, or of another type than a cache that is not FP8, or
        where the elements of a cache's heads are not side by side.
    """
    dtype = k_cache.dtype
    served = (
        k.dtype in _FLOATS
        and (dtype == k.dtype or dtype in FP8_DTYPES)
        and (v.dtype, v_cache.dtype) == (k.dtype, dtype)
        and k_cache.shape[:2] == v_cache.shape[:2]
        and k_cache.shape[0] * k_cache.shape[1] < 2**31
        and all(c.stride(-1) == 1 or c.shape[-1] == 1 for c in (k_cache, v_cache))
    )
    return "rope_and_cache" if served else "torch"


@contextlib.contextmanager
def rotated_by_attention(q: torch.Tensor, if_alike: bool = True) -> Iterator[None]:
    """The ``rope_and_cache`` within, and the attention behind it, may be one launch: of one query a
    sequence, on NVIDIA's GPUs, where the launcher of attention has a kernel for it. The rotated
    queries, which nothing else may read, are not written then.

    Args:
        if_alike: there is such an op within, and it is the first.
    """
    if not (if_alike and q.shape[1] == 1 and _may_join(q)):
        yield
        return
    ops.hold_rotation(True)
    try:
        yield
    except BaseException:
        ops.hold_rotation(False)
        raise


def _may_join(q: torch.Tensor) -> bool:
    return q.is_cuda and torch.version.cuda is not None and not torch.compiler.is_compiling()


class Rotation:
    """The rotary embedding of some tokens, by the rows of its tables that their places are."""

    def __init__(
        self,
        cos: Optional[torch.Tensor],
        sin: Optional[torch.Tensor],
        interleaved: bool,
    ) -> None:
        if cos is None or sin is None or cos.dim() != 2 or cos.shape != sin.shape:
            raise ValueError(
                "rotary_cos and rotary_sin must both be [positions, rotary_dim / 2], got "
                f"{_shape(cos)} and {_shape(sin)}"
            )
        self.cos, self.sin = side_by_side(cos), side_by_side(sin)
        self.columns, self.interleaved = 2 * cos.shape[-1], interleaved

    def of(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``heads``, ``[batch, rows, heads, D]``, rotated; ``positions`` are ``[batch]``, of the
        first rows, or ``[batch, rows]``."""
        out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        _rope_and_cache(
            out, None, None, None, side_by_side(heads), None, None, self.cos, self.sin, positions,
            None, None, None, None, None, None, "cache_seqlens", self.columns, self.interleaved,
            0.0, 0.0,
        )  # fmt: skip
        return out


def append_to_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    block_table: Optional[torch.Tensor],
    k_descale: Optional[torch.Tensor],
    v_descale: Optional[torch.Tensor],
    rotation: Optional[Rotation],
    one_position: bool,
) -> torch.Tensor:
    """Writes k and v behind the ``lengths`` keys that each sequence's cache has, and returns q; k
    and q are rotated.

    Args:
        k_descale: ``[batch, KV heads]``, of an FP8 cache; likewise ``v_descale``.
        one_position: all queries of a sequence rotate as its first.
    """
    _require_room(k_cache, v_cache, k, v, q.shape[0], lengths, block_table)
    served = kvcache_append_path(k_cache, v_cache, k, v) == "rope_and_cache"
    alike = _are_alike(q, k) and not one_position
    with_queries = rotation is not None and served and alike and k.shape[1] > 0
    if rotation is not None and not with_queries:
        if k.dtype not in _FLOATS:
            raise ValueError(f"k must not be FP8 where rotary_cos rotates it, got {k.dtype}")
        q = rotation.of(q, lengths[:, None].expand(q.shape[:2]) if one_position else lengths)
        if not served and k.shape[1] > 0:
            k = rotation.of(k, lengths)
    if k.shape[0] == 0 or k.shape[1] == 0:
        return q
    if not served:
        _copy_by_index(k_cache, k, lengths, block_table, k_descale)
        _copy_by_index(v_cache, v, lengths, block_table, v_descale)
        return q
    k, v = side_by_side(k), side_by_side(v)
    queries = side_by_side(q) if with_queries else k[:, :, :0]  # no heads: keys and values alone
    out = torch.empty(queries.shape, dtype=k.dtype, device=k.device)
    places = lengths.unsqueeze(1)
    if k.shape[1] > 1:
        places = places.expand(k.shape[:2])
    angles = (None, None, None) if rotation is None else (rotation.cos, rotation.sin, lengths)
    scales = (k_descale, v_descale) if k_cache.dtype in FP8_DTYPES else (None, None)
    _rope_and_cache(
        out, None, k_cache, v_cache, queries, k, v, *angles, None, None,
        places, block_table, *scales, "cache_seqlens",
        0 if rotation is None else rotation.columns, rotation is not None and rotation.interleaved,
        0.0, 0.0,
    )  # fmt: skip
    mark_written(k_cache, v_cache)
    return out if with_queries else q


def rotates_queries(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> bool:
    """Whether one op of :func:`append_to_cache` rotates a query of each sequence, too."""
    return _are_alike(q, k) and kvcache_append_path(k_cache, v_cache, k, v) == "rope_and_cache"


def _are_alike(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.dtype == k.dtype and q.shape[1] == k.shape[1]


def _shape(tensor: Optional[torch.Tensor]) -> str:
    return "None" if tensor is None else str(list(tensor.shape))


def _require_room(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: int,
    lengths: torch.Tensor,
    block_table: Optional[torch.Tensor],
) -> None:
    """Raises unless the new rows are the caches', and fit. Whether they fit is asked on the CPU
    alone: a GPU would have to be waited for."""
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dim() != 4 or new.shape[0] != batch or new.shape[2:] != cache.shape[2:]:
            expected = f"[{batch}, new rows, {', '.join(map(str, cache.shape[2:]))}]"
            raise ValueError(f"{name} must be {expected} as its cache, got {list(new.shape)}")
    if k_cache.dtype != v_cache.dtype or k.shape[1] != v.shape[1]:
        raise ValueError(
            "k and v must have as many new rows and caches of one dtype, got "
            f"{k.shape[1]} and {v.shape[1]} rows, {k_cache.dtype} and {v_cache.dtype}"
        )
    if lengths.device.type != "cpu" or torch.compiler.is_compiling() or lengths.numel() == 0:
        return
    pages = 1 if block_table is None else block_table.shape[1]
    rows = min(k_cache.shape[1], v_cache.shape[1]) * pages
    least, most = int(lengths.min()), int(lengths.max())
    if least < 0 or most + k.shape[1] > rows:
        raise ValueError(
            f"{k.shape[1]} new rows of k and v must fit a sequence's {rows} rows of the cache, got "
            f"cache_seqlens of {least} to {most}"
        )


def _copy_by_index(
    cache: torch.Tensor,
    new: torch.Tensor,
    lengths: torch.Tensor,
    block_table: Optional[torch.Tensor],
    descale: Optional[torch.Tensor],
) -> None:
    batch, count = new.shape[:2]
    at = lengths.to(torch.int64)[:, None] + torch.arange(count, device=new.device)
    pages, size = cache.shape[:2]
    if block_table is None:
        page = torch.arange(batch, device=new.device)[:, None].expand_as(at)
        is_there = (at >= 0) & (at < size)
    else:
        last = block_table.shape[1] - 1
        page = block_table.to(torch.int64).gather(1, (at // size).clamp(0, last))
        is_there = (at >= 0) & (at // size <= last) & (page >= 0) & (page < pages)
    if cache.dtype in FP8_DTYPES and new.dtype != cache.dtype:
        values = new.float() if descale is None else new.float() * (1 / descale)[:, None, :, None]
        largest = torch.finfo(cache.dtype).max
        new = values.clamp(-largest, largest)
    new, cells = new.to(cache.dtype), cache
    if new.dtype in FP8_DTYPES:  # torch copies no FP8 by indices
        new, cells = new.view(torch.uint8), cache.view(torch.uint8)
    # A row of no place is written where some other goes, and as that; nobody waits for the device
    # to know which. If none has a place, one is written as it is.
    number = torch.arange(batch * count, device=new.device).view(batch, count)
    some = torch.where(is_there, number, -1).max()
    taken = torch.where(is_there, number, some.clamp(min=0)).flatten()
    page = page.clamp(0, pages - 1).flatten()[taken]
    row = (at % size).flatten()[taken]
    cells[page, row] = torch.where(some >= 0, new.flatten(0, 1)[taken], cells[page, row])
    mark_written(cache)
