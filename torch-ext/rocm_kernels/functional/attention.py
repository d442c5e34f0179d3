"""Attention by the names and arguments of flash-attn, so that it takes its place.

Queries are ``[batch, rows, heads, D]``, or ``[rows, heads, D]`` with ``cu_seqlens_q``; keys and
values have fewer heads, each shared by as many query heads in a row, and values may have heads of
their own size. Queries are float16, bfloat16 or float32 (on a GPU float32 takes the slow ``plain``
kernel), keys and values the same, or FP8. Heads have 1 to 512 elements.

What is not served raises a ValueError, TypeError or RuntimeError that says what was required and
what came; nothing is written then. A gradient is refused.

The functions share these arguments:

``softmax_scale``
    Factor of the scores; None: ``D ** -0.5``.
``causal``
    A query sees no key behind its own position. Queries are the last positions of their sequence.
``window_size``
    ``(left, right)``: keys that a query sees before and behind its position; -1: all.
``softcap``
    Scores become ``softcap * tanh(score / softcap)``; 0: they stay.
``s_aux``
    ``[heads]``, float: one more score a head in the softmax's sum, without a value (a sink).
``k_descale``, ``v_descale``
    Factors of FP8 keys and values: a number, or float32 of one element, ``[KV heads]`` or
    ``[batch, KV heads]``. 16-bit ones are multiplied too, but not divided as they are appended.
``deterministic``, ``num_splits``; in ``others`` ``pack_gqa``, ``sm_margin``, ``scheduler_metadata``
    For those who give them: they change nothing. The same call has the same bits every time, and
    the backend divides the work (below).
``return_lse``, ``return_softmax_lse``, ``return_attn_probs``
    Also return float32 ``log(sum(exp(scores)))``: ``[batch, heads, rows]``, or ``[heads, rows]``
    with ``cu_seqlens_q``; -inf of a query that sees no key, whose result is 0.
``others``
    What versions of flash-attn take that we do not, as ``dropout_p``, ``alibi_slopes``, ``qv``,
    ``q_descale``, ``attention_chunk`` and ``seqused_q``: it must be what changes nothing, 0 or
    None. Their orders are others, too (in flash_attn 2 ``dropout_p`` is the fourth): give what
    follows q, k and v by name. ``more`` is refused, with that advice.
``out``
    A tensor to write the result to.

Bits: those of a sequence depend on no other sequence's queries, keys, lengths or scales. On the CPU
they are what the sequence has alone, with its keys divided every 512 of them. On a GPU a config
divides the keys, which follows from the sizes of a call, of the batch and its longest sequence too:
:func:`attention_config` tells it. On AMD they do not depend on the number of parts where what a
sequence's queries see lies in one step of 32 keys, counted from its first, nor in the prefill
design, which has one part; on NVIDIA no such class is promised.

Source of the formula: Vaswani et al., 2017; of sinks: GPT-OSS; of soft caps: Gemma 2.
"""

from typing import Any, List, Optional, Tuple, Union

import torch

from .._ops import ops
from .attention_arguments import (
    Scale,
    cap,
    descale,
    flag,
    integers,
    lengths,
    scale,
    take_others,
    window,
)
from .fp8 import FP8_DTYPES
from .gradients import mark_written, needs_gradient, refuse_gradient
from .kvcache import Rotation, append_to_cache, rotated_by_attention, rotates_queries
from .rows import optional_vector, require_tensors, side_by_side, side_by_side_told
from .shapes import register_shapes

_attention = ops.attention.default
_attention_configs = ops.attention_configs.default

Result = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


register_shapes("attention")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Optional[torch.Tensor] = None,
    *more: Any,
    k_descale: Scale = None,
    v_descale: Scale = None,
    deterministic: bool = False,
    num_splits: int = 0,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_attn_probs: bool = False,
    out: Optional[torch.Tensor] = None,
    **others: Any,
) -> Result:
    """Attention of sequences of one length.

    Args:
        q: ``[batch, rows, heads, D]``.
        k: ``[batch, keys, KV heads, D]``.
        v: ``[batch, keys, KV heads, Dv]``.

    The rest as in the module's text. Returns ``[batch, rows, heads, Dv]`` in q's dtype.
    """
    _check("flash_attn_func", _NAMES, q, k, v, s_aux, out, k_descale, v_descale)
    if more or others:
        take_others("flash_attn_func", 8, more, others)
    return _run(
        q, k, v, None, None, None, None, None, None, softmax_scale, causal, window_size, softcap,
        s_aux, k_descale, v_descale, return_lse or return_softmax_lse or return_attn_probs, out,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    *more: Any,
    seqused_k: Optional[torch.Tensor] = None,
    usual_seqlen_k: Optional[int] = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    deterministic: bool = False,
    num_splits: int = 0,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_attn_probs: bool = False,
    out: Optional[torch.Tensor] = None,
    **others: Any,
) -> Result:
    """Attention of sequences of any lengths, one after the other.

    Args:
        q: ``[rows, heads, D]``; sequence i has rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``.
        k: ``[keys, KV heads, D]`` by ``cu_seqlens_k`` likewise; with ``block_table`` the cache,
            ``[pages, rows of a page, KV heads, D]``.
        v: as k, with heads of Dv.
        cu_seqlens_q: int32 ``[batch + 1]``.
        cu_seqlens_k: int32 ``[batch + 1]``. With a block table only its differences count.
        max_seqlen_q: rows of the longest sequence, or more; None: those of q.
        max_seqlen_k: keys of the longest, or more; None: those of k, or of a whole row of the block
            table. With a block table, keys of a sequence behind so many do not count.
        block_table: int32 ``[batch, pages]``: the pages of each sequence, in order.
        seqused_k: int32 ``[batch]``: keys of each sequence that count.
        usual_seqlen_k: what the config is chosen for where max_seqlen_k is but a bound, as in a
            CUDA graph that serves all lengths. None: max_seqlen_k.

    The rest as in the module's text. Returns ``[rows, heads, Dv]`` in q's dtype.
    """
    _check("flash_attn_varlen_func", _NAMES, q, k, v, s_aux, out, k_descale, v_descale)
    if more or others:
        take_others("flash_attn_varlen_func", 13, more, others)
    cu_seqlens_q = integers(cu_seqlens_q, "cu_seqlens_q")
    cu_seqlens_k = integers(cu_seqlens_k, "cu_seqlens_k")
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q must say where sequences of q begin, got None")
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError("cu_seqlens_k or seqused_k must say how long sequences are, got neither")
    if block_table is None and cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k must say where sequences begin, or block_table, got neither")
    if block_table is not None:
        if seqused_k is None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    config = ""
    if usual_seqlen_k is not None and (max_seqlen_k is None or usual_seqlen_k < max_seqlen_k):
        config = attention_config(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=usual_seqlen_k, causal=causal,
            window_size=window_size, block_table=block_table, out=out,
        )  # fmt: skip
    return _run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window_size, softcap, s_aux, k_descale, v_descale,
        return_lse or return_softmax_lse or return_attn_probs, out, config=config,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Optional[torch.Tensor] = None,
    v: Optional[torch.Tensor] = None,
    cache_seqlens: Union[int, torch.Tensor, None] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Optional[torch.Tensor] = None,
    *more: Any,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    rotary_interleaved: bool = True,
    page_table: Optional[torch.Tensor] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    deterministic: bool = False,
    num_splits: int = 0,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_attn_probs: bool = False,
    out: Optional[torch.Tensor] = None,
    **others: Any,
) -> Result:
    """Attention to a cache of keys and values, to which new ones are appended first.

    Args:
        q: ``[batch, rows, heads, D]``, any number of rows a sequence; with ``cu_seqlens_q``, and
            without new keys, ``[rows, heads, D]`` as :func:`flash_attn_varlen_func` has them.
        k_cache: ``[batch, keys, KV heads, D]``; with a block table ``[pages, rows of a page, KV
            heads, D]``.
        v_cache: as k_cache, with heads of Dv.
        k: ``[batch, new rows, KV heads, D]``, written to the cache behind each sequence's keys; an
            FP8 cache gets ``k * (1 / k_descale)``, rounded. None: nothing is appended.
            :func:`kvcache_append_path` tells by what path.
        v: as k, with heads of Dv.
        cache_seqlens: int32 ``[batch]`` or a number: keys of each sequence before those that are
            appended; None: the whole cache.
        block_table: int32 ``[batch, pages]``: the pages of each sequence, in order. Also named
            ``page_table``.
        rotary_cos: ``[positions, rotary_dim / 2]``, with new keys: those rotate by the rows of
            their places in the cache, ``cache_seqlens`` and so on, and so do the queries where
            causal is on or there is a window; where not, all queries of a sequence rotate by the
            row ``cache_seqlens``. On a GPU a position beyond the table gives NaN, the CPU refuses
            it.
        rotary_sin: as rotary_cos.
        rotary_interleaved: pairs are neighbours (GPT-J), else halves of rotary_dim apart (NeoX,
            Llama).
        cache_batch_idx: ``[batch]``: the sequence of the cache that each of q's has; not with a
            block table, which says so itself.
        cache_leftpad: int32 ``[batch]``: how many keys at the beginning of each sequence no query
            sees.

    The rest as in the module's text. Returns ``[batch, rows, heads, Dv]`` in q's dtype.
    """
    if page_table is not None:
        if block_table is not None:
            raise ValueError("block_table and page_table are one argument, got both")
        block_table = page_table
    _check(
        "flash_attn_with_kvcache", _CACHE_NAMES, q, k_cache, v_cache, s_aux, out, k_descale,
        v_descale, k, v, rotary_cos, rotary_sin,
    )  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together, got one of them")
    if more or others:
        if k is None:  # then it says nothing
            others.pop("cu_seqlens_k_new", None)
        take_others("flash_attn_with_kvcache", 12, more, others)
    if cache_seqlens is None and isinstance(softmax_scale, int):
        raise ValueError(
            f"softmax_scale must be a float where cache_seqlens is None, got {softmax_scale}: if "
            "that is what cache_seqlens should be, as in flash_attn 2's order, give it by name"
        )
    block_table = integers(block_table, "block_table")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx is for a cache without block_table, got both")
        block_table = integers(cache_batch_idx, "cache_batch_idx")[:, None]
    window_size = window(window_size)
    cu_seqlens_q = integers(cu_seqlens_q, "cu_seqlens_q")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    cache_seqlens = lengths(cache_seqlens, batch, k_cache, block_table)
    rotation = None
    if rotary_cos is not None or rotary_sin is not None:
        rotation = Rotation(rotary_cos, rotary_sin, rotary_interleaved)
        if k is None:
            raise ValueError("rotary_cos rotates new keys and the queries, got no k and v")
    if k is not None:
        if cu_seqlens_q is not None:
            raise ValueError(
                "cu_seqlens_q is for calls without new keys, got k and v: append them by "
                "rope_and_cache"
            )
        if cache_seqlens is None:
            raise ValueError("cache_seqlens must say where k and v are appended, got None")
        require_tensors({"k": k, "v": v}, {})
        k_descale = descale(k_descale, "k_descale", q.shape[0], k_cache.shape[-2], q)
        v_descale = descale(v_descale, "v_descale", q.shape[0], k_cache.shape[-2], q)
        _require_attends(
            q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size,
            softcap, s_aux, k_descale, v_descale, out, cache_leftpad,
        )  # fmt: skip
    joined = rotation is not None and q.dim() == 4 and rotates_queries(q, k_cache, v_cache, k, v)
    with rotated_by_attention(q, joined):
        if k is not None:
            sees_all = not causal and window_size[0] < 0 and window_size[1] < 0
            q = append_to_cache(
                q, k_cache, v_cache, k, v, cache_seqlens, block_table, k_descale, v_descale,
                rotation, one_position=sees_all and q.shape[1] > 1,
            )  # fmt: skip
            cache_seqlens = cache_seqlens + k.shape[1]
        return _run(
            q, k_cache, v_cache, cu_seqlens_q, None, cache_seqlens, block_table, max_seqlen_q, None,
            softmax_scale, causal, window_size, softcap, s_aux, k_descale, v_descale,
            return_lse or return_softmax_lse or return_attn_probs, out, cache_leftpad,
        )  # fmt: skip


def attention_config(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    block_table: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> str:
    """The config that attention of these operands runs with, in words.

    Args:
        q: as in the function that is asked about, all other arguments too; k and v are the caches
            of :func:`flash_attn_with_kvcache`. Nothing is computed.

    Returns:
        The backend's own text: the kernel's name, then ``name=value`` for each of its parameters;
        on the CPU the instruction set. ``decode`` is bound by the bytes of keys and values,
        ``prefill`` by matrix instructions; ``plain`` (GPUs) is the slower kernel that takes what
        these do not. Values of sequences' lengths do not count, but the longest that is possible.
    """
    return attention_configs(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, causal=causal, window_size=window_size,
        block_table=block_table, out=out,
    )[0]  # fmt: skip


def attention_configs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    block_table: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> List[str]:
    """All configs worth timing for these operands, as :func:`attention_config` takes them; what it
    tells is the first. The op ``attention`` takes one of them as its ``config``."""
    q, k, v = side_by_side_told(q), side_by_side_told(k), side_by_side_told(v)
    if block_table is not None:
        cu_seqlens_k = None
    integers = (
        None if t is None else side_by_side_told(t, torch.int32)
        for t in (cu_seqlens_q, cu_seqlens_k, block_table)
    )  # fmt: skip
    cu_seqlens_q, cu_seqlens_k, block_table = integers
    operands = _operands(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, block_table, max_seqlen_q, max_seqlen_k, None,
        causal, window_size, 0.0, None, None, None, False, out, None,
    )  # fmt: skip
    return _attention_configs(*operands).splitlines()


_NAMES = ("q", "k", "v", "s_aux", "out", "k_descale", "v_descale")
_CACHE_NAMES = (
    "q", "k_cache", "v_cache", *_NAMES[3:], "k", "v", "rotary_cos", "rotary_sin",
)  # fmt: skip


def _check(
    function: str, names: Tuple[str, ...], q: Any, k: Any, v: Any, s_aux: Any, out: Any, *more: Any
) -> None:
    """Raises unless q, k and v are tensors, s_aux and out tensors or None, and no gradient is
    wanted of any."""
    given = (q, k, v, s_aux, out, *more)
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if len(tensors) < 3 + (s_aux is not None) + (out is not None) or tensors[2] is not v:
        require_tensors(dict(zip(names[:3], given[:3])), dict(zip(names[3:5], given[3:5])))
    if min(q.dim(), k.dim(), v.dim()) < 3:
        told = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(names[:3], given[:3]))
        raise ValueError(f"q, k and v must have 3 or 4 dimensions, got {told}")
    if needs_gradient(*tensors):
        named = zip(names, given)
        refuse_gradient(function, **{k: v for k, v in named if isinstance(v, torch.Tensor)})


def _require_attends(
    q, k, v, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap, s_aux,
    k_descale, v_descale, out, leftpad_k,
) -> None:  # fmt: skip
    """Raises what the attention would: nothing is appended then. The op itself is asked only where
    something looks unusual, for it takes longer."""
    if softmax_scale is not None:
        scale(softmax_scale)
    flag(causal)
    usual = (
        cap(softcap) >= 0
        and q.dim() == 4
        and (k.dtype == q.dtype or k.dtype in FP8_DTYPES)
        and k.shape[-1] == q.shape[-1]
        and k.shape[-2] > 0
        and q.shape[2] % k.shape[-2] == 0
        and (s_aux is None or s_aux.shape == q.shape[2:3])
        and leftpad_k is None
        and out is None
    )
    if usual or torch.compiler.is_compiling():
        return
    operands = _operands(
        q, k, v, None, None, cache_seqlens, block_table, None, None, softmax_scale, causal,
        window_size, softcap, s_aux, k_descale, v_descale, False, out, leftpad_k,
    )  # fmt: skip
    _attention_configs(*operands)


def _run(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k,
    softmax_scale, causal, window_size, softcap, s_aux, k_descale, v_descale, with_lse, out,
    leftpad_k=None, config="",
):  # fmt: skip
    operands = _operands(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window_size, softcap, s_aux, k_descale, v_descale, with_lse, out,
        leftpad_k,
    )  # fmt: skip
    _attention(*operands, config)
    mark_written(out)
    return operands[:2] if with_lse else operands[0]


def _operands(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, max_seqlen_q, max_seqlen_k,
    softmax_scale, causal, window_size, softcap, s_aux, k_descale, v_descale, with_lse, out,
    leftpad_k,
) -> Tuple[Any, ...]:  # fmt: skip
    """Makes the op's operands, all but the config: the result, lse, and what is read."""
    q, k, v = side_by_side(q), side_by_side(k), side_by_side(v)
    window_size = window(window_size)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if max_seqlen_k is None:
        if block_table is not None:
            max_seqlen_k = block_table.shape[1] * k.shape[1]
        else:
            max_seqlen_k = k.shape[0] if cu_seqlens_k is not None else k.shape[1]
    if max_seqlen_q is None:
        max_seqlen_q = q.shape[0] if cu_seqlens_q is not None else q.shape[1]
    kv_heads = k.shape[-2]
    result = out
    if out is None:
        result = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = None
    if with_lse:
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (batch, q.shape[2], q.shape[1])
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    return (
        result, lse, q, k, v, integers(cu_seqlens_q, "cu_seqlens_q"),
        integers(cu_seqlens_k, "cu_seqlens_k"), integers(seqused_k, "seqused_k"),
        integers(leftpad_k, "cache_leftpad"), integers(block_table, "block_table"),
        descale(k_descale, "k_descale", batch, kv_heads, q),
        descale(v_descale, "v_descale", batch, kv_heads, q),
        optional_vector(s_aux), max_seqlen_q, max_seqlen_k,
        max(1, q.shape[-1]) ** -0.5 if softmax_scale is None else scale(softmax_scale),
        window_size[0], 0 if flag(causal) else window_size[1], cap(softcap),
    )  # fmt: skip
