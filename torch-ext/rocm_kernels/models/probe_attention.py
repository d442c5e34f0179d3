"""Checks by a run of its own forward whether an attention is projections, norms of heads, rotary
embedding, cache and attention function, in that order: then ``rope_and_cache`` may do its middle.

As in probe.py, the class's own forward runs once in float32 on the CPU, with stand-ins for its
modules, its cache and its attention function, which record what they get.
"""

import contextlib
import copy
import inspect
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..reference import rope_and_cache
from .families import Family
from .linear import Projected
from .norms import computes_rmsnorm
from .probe import Differs, _Affine, _Given, _is_close, _probe, _random, _StandIn

_PLAIN = (bool, int, float, str, type(None))
_OTHER = "an_argument_of_another_name"
_PROBED = "rocm_kernels_probe"
_FAR = 987_654_321  # farther than any model counts, so that no scale or bound of its is beyond


class AttentionCall(NamedTuple):
    """What a transformers attention does between its projections.

    Attributes:
        heads, kv_heads, head_dim: of queries, and of keys and values.
        rotates: q and k turn by ``position_embeddings``, which have as many ``columns``; of each
            head ``rotary_dim`` elements turn.
        interleaved: pairs are neighbours.
        spread: so are the two columns of each angle in ``position_embeddings``.
        norms: names of the norms of q and k, before they turn; None: there are none.
        norms_whole: they are of all heads at once.
        out: name of the projection of the result.
        mask, cache, positions: names of these arguments of its forward.
        names: of all arguments of its forward.
        hands_others: whether the attention function gets the ``**kwargs``.
        constants: what else the function gets, by keyword.
        attributes: keyword and name of those that are tensors of the module, such as sinks.
        results: how many things it returns, of which the second is the function's second.
        asked: name and value of each number that its code asks of the module; Ellipsis: none.
        settings: likewise of the module's configuration.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotates: bool
    columns: int
    rotary_dim: int
    interleaved: bool
    spread: bool
    norms: Optional[Tuple[str, str]]
    norms_whole: bool
    out: str
    mask: str
    cache: str
    positions: str
    names: Tuple[str, ...]
    hands_others: bool
    constants: Tuple[Tuple[str, Any], ...]
    attributes: Tuple[Tuple[str, str], ...]
    results: int
    asked: Tuple[Tuple[str, Any], ...]
    settings: Tuple[Tuple[str, Any], ...]

    def holds(self, attention: nn.Module) -> bool:
        """Whether the numbers are still those that its code was asked with."""
        config = attention.config
        return all(_is(getattr(attention, name, ...), value) for name, value in self.asked) and all(
            _is(getattr(config, name, ...), value) for name, value in self.settings
        )


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def probe_attention(attention: nn.Module, family: Family) -> AttentionCall:
    """
    Raises:
        Differs: it does something else, or cannot be asked.
    """
    first, far = (_call_behind(before, attention, family) for before in (0, _FAR))
    if first != far:
        raise Differs("makes something of its tokens' positions beside the rotation")
    return first


def _call_behind(before: int, attention: nn.Module, family: Family) -> AttentionCall:
    """What it does with three tokens behind as many others as there are ``before``."""
    names = tuple(inspect.signature(type(attention).forward).parameters)[1:]
    cache = next((name for name in ("past_key_values", "cache") if name in names), None)
    if cache is None or not {"position_embeddings", "attention_mask"} <= set(names):
        raise Differs(f"its forward takes {', '.join(names)}")
    head_dim = getattr(attention, "head_dim", None)
    out = attention._modules.get("o_proj")
    if not isinstance(head_dim, int) or out is None:
        raise Differs("has no head_dim or no o_proj")
    widths = _widths(attention, family, head_dim)
    q, k, v = (_random(3, width, seed=seed)[None] for seed, width in enumerate(widths))
    parts = _parts(attention, family, (q, k, v))
    norms = ("q_norm", "k_norm") if "q_norm" in attention._modules else None
    stand_ins: Dict[str, Any] = dict(parts)
    found = [attention._modules.get(name) for name in norms or ()]
    sizes = [norm.weight.numel() if norm and computes_rmsnorm(norm) else 0 for norm in found]
    norms_whole = norms is not None and sizes == [*widths[:2]] and sizes != [head_dim] * 2
    if not norms_whole and any(size != head_dim for size in sizes):
        raise Differs(f"its {' and '.join(norms)} are no RMSNorms of a head, or of all")
    for seed, (name, norm) in enumerate(zip(norms or (), found)):
        stand_ins[name] = _Affine(norm, 50 + seed)
    stand_ins["o_proj"] = recorded = _Recorded(out)
    probe = _probe(attention, stand_ins)
    if not hasattr(attention, "config"):
        raise Differs("has no config")
    probe.__dict__["config"] = copy.copy(attention.config)
    vars(probe.config)["_attn_implementation_internal"] = _PROBED
    settings, asked = _noted(probe.config), _noted(probe)
    places = torch.arange(before, before + 3, device="cpu")
    others: Dict[str, Any] = {}
    if "kwargs" in names:
        others = {"position_ids": places[None], "cache_position": places, _OTHER: _Given(_OTHER)}
        others = {name: value for name, value in others.items() if name not in names}
    failure = turns = None
    for spread, table in _tables(attention, head_dim):
        written, function, mask = _Cache(before), _Function(), _Given("mask")
        recorded.inputs.clear()
        given = {
            names[0]: Projected(_random(3, 8)[None]),  # which it may be given
            "position_embeddings": table,
            "attention_mask": mask,
            cache: written,
            **others,
        }
        try:
            with torch.no_grad(), _known(function):
                result = type(attention).forward(probe, **given)
        except Exception as raised:
            failure = Differs(f"its forward cannot be asked what it computes: {raised}")
            continue
        if len(function.calls) != 1 or len(written.calls) != 1 or len(recorded.inputs) != 1:
            raise Differs("does not call its cache, its attention function and o_proj once each")
        (called,), (into,) = function.calls, written.calls
        if called["mask"] is not mask or into["layer"] != attention.layer_idx:
            raise Differs("changes its mask, or has another place in the cache")
        columns = table[0].shape[-1]
        rotary_dim = 2 * columns if torch.unique(table[0][0, 0]).numel() == columns else columns
        angles = tuple(t[..., ::2] for t in table) if spread else table
        turns = _middle(
            stand_ins, norms, norms_whole, (q, k, v), angles, rotary_dim, head_dim, into, called
        )
        if turns is not None:
            break
        failure = Differs("does something else to its queries, keys and values")
    if turns is None:
        raise failure
    if called["key"] is not written.keys or called["value"] is not written.values:
        raise Differs("does something else to its queries, keys and values")
    if not torch.equal(recorded.inputs[0], function.out.flatten(2)):
        raise Differs("does something else to the attention's result")
    if not isinstance(result, tuple) or result[0] is not recorded.result:
        raise Differs("does not return its projection's result")
    if any(value is not function.second for value in result[1:]):
        raise Differs("returns more than its result and its function's")
    constants, attributes = _others(attention, called["kwargs"], others)
    return AttentionCall(
        widths[0] // head_dim, widths[1] // head_dim, head_dim, turns[0], columns, rotary_dim,
        turns[1], spread, norms, norms_whole, "o_proj",
        "attention_mask", cache, "position_embeddings", names, _OTHER in called["kwargs"],
        constants, attributes, len(result), *(tuple(sorted(n.items())) for n in (asked, settings)),
    )  # fmt: skip


def _tables(
    attention: nn.Module, head_dim: int
) -> Iterator[Tuple[bool, Tuple[torch.Tensor, torch.Tensor]]]:
    """cos and sin as models make them: each angle twice, of a head or a part of it, or once; and
    whether it stands beside itself."""
    part = getattr(attention.config, "partial_rotary_factor", None)
    part = part or (getattr(attention.config, "rope_parameters", None) or {}).get(
        "partial_rotary_factor"
    )
    sizes = [int(head_dim * part)] if isinstance(part, float) else []
    for size, times in [*((size, 2) for size in (*sizes, head_dim)), (head_dim, 1)]:
        angle = torch.cat([_random(3, size // 2, seed=7)[None]] * times, -1)
        yield False, (angle.cos(), angle.sin())
    for size in (*sizes, head_dim):
        angle = _random(3, size // 2, seed=7)[None].repeat_interleave(2, -1)
        yield True, (angle.cos(), angle.sin())


def _widths(attention: nn.Module, family: Family, head_dim: int) -> Tuple[int, int, int]:
    names = family.qkv.of(attention)
    if len(names) == 3:
        widths = [getattr(attention._modules[name], "out_features", 0) for name in names]
    elif len(names) == 1:
        config = attention.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        if sum(widths) != getattr(attention._modules[names[0]], "out_features", 0):
            raise Differs("its projection is not of queries, keys and values")
    else:
        raise Differs("has no projections of queries, keys and values")
    if widths[1] != widths[2] or any(width % head_dim or not width for width in widths):
        raise Differs("its values have heads of another size")
    return tuple(widths)


def _parts(attention: nn.Module, family: Family, qkv: Tuple) -> Dict[str, Any]:
    names = family.qkv.of(attention)
    results = qkv if len(names) == 3 else (torch.cat(qkv, -1),)
    return {
        name: _Recorded(attention._modules[name], result) for name, result in zip(names, results)
    }


def _middle(
    stand_ins: Dict[str, Any],
    norms: Optional[Tuple[str, str]],
    norms_whole: bool,
    qkv: Tuple,
    table: Tuple,
    rotary_dim: int,
    head_dim: int,
    into: Dict,
    called: Dict,
) -> Optional[Tuple[bool, bool]]:
    """Whether queries and keys turn, and whether pairs are neighbours; None: neither fits."""
    q, k, v = qkv
    if norms is not None and norms_whole:
        q, k = stand_ins[norms[0]].of(q), stand_ins[norms[1]].of(k)
    q, k, v = (states.view(1, 3, -1, head_dim) for states in (q, k, v))
    if norms is not None and not norms_whole:
        q, k = stand_ins[norms[0]].of(q), stand_ins[norms[1]].of(k)
    if not _is_close(into["values"].transpose(1, 2), v):
        return None
    for rotates, interleaved in ((True, False), (True, True), (False, False)):
        turned = (q, k)
        if rotates:
            keys = torch.empty_like(k)
            queries = rope_and_cache(
                q, k, v, *table, rotary_dim=rotary_dim, interleaved=interleaved, k_out=keys
            )  # fmt: skip
            turned = (queries, keys)
        seen = called["query"].transpose(1, 2), into["keys"].transpose(1, 2)
        if all(map(_is_close, seen, turned)):
            return rotates, interleaved
    return None


def _others(
    attention: nn.Module, kwargs: Dict[str, Any], others: Dict[str, Any]
) -> Tuple[Tuple[Tuple[str, Any], ...], Tuple[Tuple[str, str], ...]]:
    constants, attributes = [], []
    tensors = {**attention._parameters, **attention._buffers}
    handed = {name for name, value in others.items() if kwargs.get(name) is value}
    if handed and len(handed) < len(others):
        raise Differs("hands some of its other arguments on, and others not")
    for keyword, value in kwargs.items():
        if keyword in handed:
            continue
        name = next((n for n, tensor in tensors.items() if tensor is value), None)
        if type(value) in _PLAIN:
            constants.append((keyword, value))
        elif name is not None and value is not None:
            attributes.append((keyword, name))
        else:
            raise Differs(f"makes {keyword} for its attention function")
    return tuple(constants), tuple(attributes)


@contextlib.contextmanager
def _known(function: Any) -> Iterator[None]:
    """Lets transformers find an attention function by the probe's name while the context lasts."""
    known = sys.modules["transformers.modeling_utils"].AttentionInterface._global_mapping
    known[_PROBED] = function
    try:
        yield
    finally:
        del known[_PROBED]


def _noted(thing: Any) -> Dict[str, Any]:
    """The numbers that code will ask of a module or a configuration, as it does."""
    noted: Dict[str, Any] = {}
    base = type(thing)

    def asked(self: Any, name: str) -> Any:
        ours = name.startswith(("__", "_attn_implementation")) or name in _OF_MODULES
        try:
            value = base.__getattribute__(self, name)
        except AttributeError:
            held = ("_parameters", "_buffers", "_modules")
            if not ours and not any(name in vars(self).get(each, ()) for each in held):
                noted[name] = ...
            raise
        if not ours and _is_plain(value):
            noted[name] = copy.deepcopy(value)
        return value

    thing.__class__ = type(base.__name__, (base,), {"__getattribute__": asked})
    return noted


# Of each module; and its place in the cache, which is asked for anew.
_OF_MODULES = {*vars(nn.Module()), "layer_idx"} - {"training"}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (tuple, list) else type(value) in _PLAIN


class _Recorded(_StandIn):
    """Stands in a projection's place: keeps its inputs, and gives a result of its own."""

    def __init__(self, module: nn.Module, result: Optional[torch.Tensor] = None) -> None:
        super().__init__(module)
        self.result = _random(1, 3, 8, seed=8) if result is None else result
        self.inputs: List[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x)
        return self.result


class _Cache:
    def __init__(self, before: int) -> None:
        self.before = before
        self.calls: List[Dict] = []
        self.keys: Any = None
        self.values: Any = None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        self.calls.append({"keys": keys, "values": values, "layer": layer})
        self.keys, self.values = keys.clone(), values.clone()
        return self.keys, self.values

    def get_seq_length(self, *args: Any) -> int:
        return self.before + (3 if self.calls else 0)


class _Function:
    """Stands in the attention function's place, and keeps its calls."""

    def __init__(self) -> None:
        self.calls: List[Dict] = []
        self.second = _Given("weights")

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> Tuple[torch.Tensor, Any]:
        self.calls.append(
            {"query": query, "key": key, "value": value, "mask": mask, "kwargs": kwargs}
        )
        batch, heads, rows, head_dim = query.shape
        self.out = _random(batch, rows, heads, head_dim, seed=9)
        return self.out, self.second
