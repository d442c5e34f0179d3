"""An attention between its projections: norms of heads, rotary embedding and the cache in one op,
for the attentions that models/probe_attention.py has asked, and the cache of use_decode_step. And
kernel layers of attentions whose decoder layers keep their own forward.

With other caches an attention keeps its own code, and so its bits, compiled or not: in 16 bits that
rounds three times where the op rounds once.
"""

import sys
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ..functional import rope_and_cache
from ..models import attention as model_attention
from ..models.asked_once import made_once
from ..models.fuse import has_fused
from ..models.hooks import is_unseen, runs_unseen
from ..models.linear import Projected
from ..models.norms import eps_of, weight_offset_of
from ..models.registration import ATTENTIONS
from .by_arguments import layers_by_arguments

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attend(attention: nn.Module, qkv: torch.Tensor, keywords: Dict[str, Any]) -> Optional[Tuple]:
    """Runs an attention from its projections' result on: norms, rotation, cache, attention.

    Args:
        attention: with ``kernel_attention``, how it is put together.
        qkv: ``[batch, rows, heads of q, k and v times D]``; q and k turn in place.
        keywords: of its own forward.

    Returns:
        None where that one must run: with another cache, in a compiled graph, with arguments that
        it makes something of, with other numbers in its module than it was probed with, or where
        a hook wants to see its norms, or their forward is another's.
    """
    call = attention.kernel_attention
    tables, cache = keywords.get(call.positions), keywords.get(call.cache)
    if (
        not hasattr(cache, "place")
        or torch.compiler.is_compiling()
        or qkv.dim() != 3
        or qkv.dtype not in _DTYPES
        or not cache.takes(attention.layer_idx, qkv.dtype)
        or (call.rotates and not _are_tables(tables, qkv, call.columns))
        or not call.holds(attention)
        or not (call.norms_whole or all(map(runs_unseen, _norms(attention))))
    ):
        return None
    function = attention_function(attention.config)
    others = {
        name: value
        for name, value in keywords.items()
        if name not in (call.positions, call.mask, call.cache)
    }
    if function is None or (others and not call.hands_others) or set(others) & set(call.names):
        return None
    batch, rows = qkv.shape[:2]
    heads = qkv.view(batch, rows, call.heads + 2 * call.kv_heads, call.head_dim)
    q, k, v = heads.split((call.heads, call.kv_heads, call.kv_heads), 2)
    options: Dict[str, Any] = {"interleaved": call.interleaved}
    if call.rotates:
        if call.spread:
            tables = made_once(tables, lambda: [t[..., ::2].contiguous() for t in tables])
        options["cos"], options["sin"] = tables
        options["rotary_dim"] = call.rotary_dim
    norms = _norms(attention)
    if call.norms_whole:
        q, k = (norm(x.flatten(2)).view(x.shape) for norm, x in zip(norms, (q, k)))
    elif norms:
        q_norm, k_norm = norms
        if eps_of(q_norm) != eps_of(k_norm) or weight_offset_of(q_norm) != weight_offset_of(k_norm):
            return None
        options.update(q_weight=q_norm.weight, k_weight=k_norm.weight, eps=eps_of(q_norm),
                       weight_offset=weight_offset_of(q_norm))  # fmt: skip
    place = cache.place(attention.layer_idx, k, v)

    def append() -> None:
        rope_and_cache(
            q, k, v, k_cache=place.keys.transpose(1, 2), v_cache=place.values.transpose(1, 2),
            cache_positions=place.positions, k_scale=place.scales[0], v_scale=place.scales[1],
            out=q, **options,
        )  # fmt: skip

    if function is model_attention.attend:
        others["append"] = append
    else:
        append()
    for keyword, name in call.attributes:
        others[keyword] = getattr(attention, name)
    others.update((name, value) for name, value in call.constants if name not in others)
    out, second = function(
        attention, q.transpose(1, 2), place.keys, place.values, keywords.get(call.mask), **others
    )
    out = getattr(attention, call.out)(out.reshape(batch, rows, -1))
    return (out, *[second] * (call.results - 1))


def _norms(attention: nn.Module) -> List[nn.Module]:
    return [getattr(attention, name) for name in attention.kernel_attention.norms or ()]


def _are_tables(tables: Any, qkv: torch.Tensor, columns: int) -> bool:
    return (
        isinstance(tables, tuple)
        and len(tables) == 2
        and all(isinstance(t, torch.Tensor) and t.dim() == 3 for t in tables)
        and tables[0].shape[0] in (1, qkv.shape[0])
        and tables[0].shape[1:] == (qkv.shape[1], columns)
    )


def attention_function(config: Any) -> Any:
    """The attention function that a configuration names; None for the model's own eager one."""
    modeling = sys.modules["transformers.modeling_utils"]
    known = modeling.AttentionInterface._global_mapping
    return known.get(config._attn_implementation)


def attention_layer(attention: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Runs an attention with the arguments of its own forward: one projection of queries, keys and
    values, and what is between that and the result's.

    In training, and where a hook wants to see one of the three run, its own forward runs."""
    call = vars(attention).get("kernel_attention")
    qkv = None if call is None else attention.kernel_family.qkv
    if attention.training or not has_fused(attention, qkv):
        return type(attention).forward(attention, *args, **kwargs)
    named = [name for name in call.names if name != "kwargs"]
    given = {**dict(zip(named, args)), **kwargs}
    hidden = given.pop(named[0], None)
    # Its own forward says best what is missing or too many.
    if not isinstance(hidden, torch.Tensor) or len(given) + 1 < len(args) + len(kwargs):
        return type(attention).forward(attention, *args, **kwargs)
    projection = getattr(attention, qkv.name)
    result = projection(hidden)
    if is_unseen(projection):  # or it may have kept what attend writes into
        results = attend(attention, result, given)
        if results is not None:
            return results
    return type(attention).forward(attention, Projected(result), **given)


LAYERS = layers_by_arguments(ATTENTIONS, attention_layer, __name__)
