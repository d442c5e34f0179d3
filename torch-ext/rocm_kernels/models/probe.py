"""Checks by a run of their own forward what MLPs, decoder layers and Llama 4's experts compute.

The name of a class is not enough: a newer version may take other arguments, return something else,
or apply a limit. So the class's own forward runs once, in float32 on the CPU, with stand-ins for
the modules in it, and its result is compared with what the family's record says. The stand-ins are
small, whatever the model's size, and record the arguments of each call.
"""

import copy
import inspect
import itertools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..reference import gated_experts
from .families import ACTIVATIONS, Family

_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
_CPU = {"dtype": torch.float32, "device": "cpu"}


class Differs(Exception):
    """Why a module of a known name is not what its family's record says."""


# ---- decoder layers


class Argument(NamedTuple):
    """Where an argument of the attention comes from: a parameter of the layer, else a constant."""

    parameter: Optional[str]
    constant: Any = None


class DecoderCall(NamedTuple):
    """How a decoder layer's own forward takes its arguments and hands them on.

    Attributes:
        names: of the parameters, but for those of ``**kwargs``.
        parameters: those that may be given by position, in order.
        defaults: of those that have one, by name.
        required: names of those that have none, but for the hidden states.
        takes_others: has a ``**kwargs``.
        hidden: name of the hidden states.
        attention_hidden: the keyword by which the attention gets them; None: they are its first
            argument.
        attention: what else the attention gets, by keyword.
        hands_others: whether it gets the ``**kwargs`` too.
        returns: None: a tensor. Or the places of the attention's results in a tuple: 0 stands for
            the layer's own result.
    """

    names: Tuple[str, ...]
    parameters: Tuple[str, ...]
    defaults: Dict[str, Any]
    required: Tuple[str, ...]
    takes_others: bool
    hidden: str
    attention_hidden: Optional[str]
    attention: Tuple[Tuple[str, Argument], ...]
    hands_others: bool
    returns: Optional[Tuple[int, ...]]

    def fits(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        """Whether the layer's own forward takes the arguments: if not, it says so best."""
        by_position = self.parameters[: len(args)]
        return (
            len(args) <= len(self.parameters)
            and all(name not in by_position for name in kwargs)
            and all(name in by_position or name in kwargs for name in (self.hidden, *self.required))
            and (self.takes_others or all(name in self.names for name in kwargs))
        )

    def keywords(self, given: Dict[str, Any]) -> Dict[str, Any]:
        """What the attention gets besides its hidden states, of what the layer is given by name."""
        keywords = {
            keyword: argument.constant
            if argument.parameter is None
            else given[argument.parameter]
            if argument.parameter in given
            else self.defaults[argument.parameter]
            for keyword, argument in self.attention
        }
        if self.hands_others:
            others = given.items()
            keywords.update((name, value) for name, value in others if name not in self.names)
        return keywords


def probe_decoder_layer(layer: nn.Module, family: Family) -> DecoderCall:
    """
    Raises:
        Differs: it computes, hands on or returns something that no layer here does.
    """
    for name in (family.attention, family.mlp, *family.norms):
        if layer._modules.get(name) is None:
            raise Differs(f"has no {name}")
    signature = inspect.signature(type(layer).forward)
    parameters = list(signature.parameters.values())[1:]
    kinds = {parameter.kind for parameter in parameters}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        raise Differs(f"its forward{signature} takes arguments without names")
    takes_others = inspect.Parameter.VAR_KEYWORD in kinds
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    names = [parameter.name for parameter in named]
    if not names:
        raise Differs(f"its forward{signature} takes no hidden states")
    hidden = "hidden_states" if "hidden_states" in names else names[0]
    required = [p.name for p in named if p.default is inspect.Parameter.empty and p.name != hidden]
    defaults = {p.name: p.default for p in named if p.name not in (hidden, *required)}
    given = {name: _Given(name) for name in names if name != hidden}
    others = {_OTHER: _Given(_OTHER)} if takes_others else {}
    # With every argument, and with none that has a default: the layer's way is what both say.
    key, call, returns = _probe_once(layer, family, hidden, {**given, **others})
    bare_key, bare, bare_returns = _probe_once(
        layer, family, hidden, {name: given[name] for name in required}
    )
    if (key, returns) != (bare_key, bare_returns):
        raise Differs("how it calls its attention, or what it returns, depends on its arguments")
    hands_others = call.pop(_OTHER, None) is not None
    attention = []
    for keyword, value in call.items():
        expected = value
        if isinstance(value, _Given):
            expected = defaults.get(value.name, value)
        if keyword not in bare or not _is_same(bare[keyword], expected):
            raise Differs(f"what its attention gets as {keyword} depends on its arguments")
        constant = not isinstance(value, _Given)
        attention.append((keyword, Argument(None, value) if constant else Argument(value.name)))
    if set(bare) != set(call):
        raise Differs("what its attention gets depends on its arguments")
    positional = [p.name for p in named if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return DecoderCall(
        tuple(names), tuple(positional), defaults, tuple(required), takes_others, hidden, key,
        tuple(attention), hands_others, returns,
    )  # fmt: skip


_OTHER = "an_argument_of_another_name"
_PLAIN = (bool, int, float, str)


class _Given:
    """An argument of which nobody knows anything."""

    def __init__(self, name: str) -> None:
        self.name = name


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _PLAIN and one == other)


def _probe_once(
    layer: nn.Module, family: Family, hidden: str, arguments: Dict[str, Any]
) -> Tuple[Optional[str], Dict[str, Any], Optional[Tuple[int, ...]]]:
    """The keyword of the attention's hidden states, what else it gets, and what the layer returns,
    in :class:`DecoderCall`'s words."""
    modules = {name: layer._modules[name] for name in family.norms}
    norms = {name: _Affine(module, seed) for seed, (name, module) in enumerate(modules.items())}
    x = _random(3, _hidden_size(modules))[None]
    x = x * torch.tensor([1.0, 30.0, 1e4], **_CPU)[:, None]
    failures = []
    for results, scores in itertools.product((2, 1, 3), (False, True)):
        attention = _Attention(layer._modules[family.attention], results)
        mlp = _Mlp(layer._modules[family.mlp], scores)
        stand_ins = {**norms, family.attention: attention, family.mlp: mlp}
        try:
            with torch.no_grad():
                out = type(layer).forward(_probe(layer, stand_ins), **{hidden: x, **arguments})
            break
        except Exception as failure:
            failures.append(failure)
    else:
        raise Differs(f"its forward cannot be asked what it computes: {failures[0]}")
    if len(attention.calls) != 1:
        raise Differs(f"calls its attention {len(attention.calls)} times")
    key, got = _described(*attention.calls[0], _norm(stand_ins, family.attention_norm)(x))
    returns = None
    if isinstance(out, tuple):
        places = [_place(value, attention.results, i) for i, value in enumerate(out)]
        if not out or None in places:
            raise Differs("returns something that is neither its result nor its attention's")
        out, returns = out[0], tuple(places)
    if not _is_close(out, _expected(layer, family, stand_ins, x)):
        raise Differs("computes something else than its family's layers")
    return key, got, returns


def _expected(layer: nn.Module, family: Family, stand_ins: Dict[str, Any], x: torch.Tensor) -> Any:
    multiplier = 1.0
    if family.residual_multiplier is not None:
        multiplier = getattr(layer, family.residual_multiplier)
    h = _norm(stand_ins, family.attention_norm)(x)
    h = _norm(stand_ins, family.attention_out_norm)(stand_ins[family.attention].of(h))
    residual = x + h * multiplier
    h = stand_ins[family.mlp].of(_norm(stand_ins, family.mlp_norm)(residual))
    return residual + _norm(stand_ins, family.mlp_out_norm)(h) * multiplier


def _norm(stand_ins: Dict[str, Any], name: Optional[str]) -> Callable[[Any], Any]:
    return (lambda x: x) if name is None else stand_ins[name].of


def _place(value: Any, results: Tuple[Any, ...], index: int) -> Optional[int]:
    if index == 0:
        return 0 if isinstance(value, torch.Tensor) else None
    return next((i for i, result in enumerate(results) if i and result is value), None)


def _described(
    args: Tuple, kwargs: Dict[str, Any], normed: torch.Tensor
) -> Tuple[Optional[str], Dict[str, Any]]:
    """The keyword of the hidden states in a call of the attention, and its other arguments."""
    key = next((k for k, value in kwargs.items() if isinstance(value, torch.Tensor)), None)
    hidden = [*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))]
    if len(hidden) != 1 or not _is_close(hidden[0], normed):
        raise Differs(
            "gives its attention other arguments than its hidden states, and the rest by name"
        )
    others = {keyword: value for keyword, value in kwargs.items() if keyword != key}
    for keyword, value in others.items():
        if isinstance(value, _Given) and _OTHER in (keyword, value.name) and keyword != value.name:
            raise Differs(f"hands an argument on as {keyword} that is not its own")
        if not (isinstance(value, _Given) or value is None or type(value) in _PLAIN):
            raise Differs(f"makes {keyword} for its attention, a {type(value).__name__}")
    return key, others


def _hidden_size(norms: Dict[str, nn.Module]) -> int:
    for norm in norms.values():
        weight = norm._parameters.get("weight")
        if weight is not None:
            return weight.shape[-1]
    raise Differs(f"has no weight in {', '.join(norms)}")


# ---- MLPs


def probe_mlp(mlp: nn.Module, family: Family) -> None:
    """
    Raises:
        Differs: it computes something else than ``down(activation(gate(x)) * up(x))``.
    """
    gate_up = family.gate_up.of(mlp)
    for name in (*gate_up, family.down, family.activation):
        if mlp._modules.get(name) is None:
            raise Differs(f"has no {name}")
    signature = inspect.signature(type(mlp).forward)
    if [p.kind for p in signature.parameters.values()][1:] != [_BY_POSITION]:
        raise Differs(f"its forward{signature} takes other arguments than one")
    activation = ACTIVATIONS.get(type(mlp._modules[family.activation]).__name__)
    if activation is None:
        raise Differs(f"its activation is a {type(mlp._modules[family.activation]).__name__}")
    linears = (*gate_up, family.down)
    for name in linears:
        if not hasattr(mlp._modules[name], "in_features"):
            raise Differs(f"its {name} is a {type(mlp._modules[name]).__name__}")
    stand_ins = {name: _Columns(mlp._modules[name], seed) for seed, name in enumerate(linears)}
    # Small numbers and such as a limit would meet.
    x = _random(4, mlp._modules[gate_up[0]].in_features, seed=9)
    x = x * torch.tensor([[1.0], [8.0], [100.0], [1e4]], **_CPU)
    both = torch.cat([stand_ins[name].of(x) for name in gate_up], -1)
    expected = stand_ins[family.down].of(gated_experts(both, activation, None, False))
    try:
        with torch.no_grad():
            out = type(mlp).forward(_probe(mlp, stand_ins), x)
    except Exception as failure:
        raise Differs(f"its forward cannot be asked what it computes: {failure}") from failure
    if not _is_close(out, expected):
        raise Differs("computes something else than a gated MLP")


def probe_llama4_moe(moe: nn.Module) -> None:
    """
    Raises:
        Differs: it computes something else than ``shared_expert(x)`` and the sum of the experts of
            x times each score, or returns something else than that and the router's logits.
    """
    for name in ("router", "experts", "shared_expert"):
        if moe._modules.get(name) is None:
            raise Differs(f"has no {name}")
    count, x = moe.num_experts, _random(3, moe.hidden_dim)
    chosen = _random(3, count).topk(moe.top_k, -1).indices
    scores = torch.zeros(3, count, **_CPU).scatter_(1, chosen, 0.2 + 0.7 * chosen / count)
    router = _Router(moe._modules["router"], scores)
    experts = _Columns(moe._modules["experts"], 1, moe.hidden_dim)
    shared = _Affine(moe._modules["shared_expert"], 2)
    expected = shared.of(x) + experts.of(x[:, None] * scores[..., None]).sum(1)
    stand_ins = {"router": router, "experts": experts, "shared_expert": shared}
    try:
        with torch.no_grad():
            out = type(moe).forward(_probe(moe, stand_ins), x[None])
    except Exception as failure:
        raise Differs(f"its forward cannot be asked what it computes: {failure}") from failure
    if not isinstance(out, tuple) or len(out) != 2 or out[1] is not router.logits:
        raise Differs("returns something else than its result and its router's logits")
    if not _is_close(out[0], expected):
        raise Differs("computes something else than Llama 4's experts")


# ---- stand-ins


class _StandIn:
    """Stands in a module's place, which it asks for all attributes that it does not have itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _Affine(_StandIn):
    """Multiplies each column by a number of its own, and adds another: no two commute."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        super().__init__(module)
        self.seed = seed

    def of(self, x: torch.Tensor) -> torch.Tensor:
        factors, offsets = _random(2, x.shape[-1], seed=self.seed)
        return x * (1.5 + factors.tanh()) + offsets

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x)


class _Mlp(_Affine):
    """Returns a tensor; or, as experts do, that and what a router says."""

    def __init__(self, module: nn.Module, scores: bool) -> None:
        super().__init__(module, 100)
        self.scores = scores

    def __call__(self, x: torch.Tensor) -> Any:
        return (self.of(x), _Given("scores")) if self.scores else self.of(x)


class _Attention(_Affine):
    """Remembers what it gets; returns a tensor, or as many results as it is told."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__(module, 101)
        self.count = count
        self.calls: List[Tuple[Tuple, Dict]] = []
        self.results: Tuple[Any, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self.results = (self.of(given[0]), *(_Given("more") for _ in range(self.count - 1)))
        return self.results if self.count > 1 else self.results[0]


class _Columns(_StandIn):
    """Stands in a linear's place: each of its output columns is one of its input's, times a number.
    It is as wide as the linear, and takes a row's time for it."""

    def __init__(self, linear: nn.Module, seed: int, width: Optional[int] = None) -> None:
        super().__init__(linear)
        self.seed, self.width = seed, linear.out_features if width is None else width

    def of(self, x: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(self.width, device="cpu") % x.shape[-1]
        return x[..., columns] * _random(self.width, seed=self.seed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x)


class _Router(_StandIn):
    def __init__(self, module: nn.Module, scores: torch.Tensor) -> None:
        super().__init__(module)
        self.scores, self.logits = scores, _Given("logits")

    def __call__(self, x: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        return self.scores, self.logits


class _Own(_StandIn):
    """A module that stays what it is, without what hangs on it, and in evaluation mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        quiet = copy.copy(self.module)
        quiet.__dict__["training"] = False
        return type(quiet).forward(quiet, *args, **kwargs)


def _probe(module: nn.Module, stand_ins: Dict[str, Any]) -> nn.Module:
    probe = copy.copy(module)
    probe.__dict__["training"] = False
    probe.__dict__["_modules"] = {
        name: stand_ins.get(name) or (None if child is None else _Own(child))
        for name, child in module._modules.items()
    }
    return probe


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **_CPU)


def _is_close(actual: Any, expected: torch.Tensor) -> bool:
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    tolerance = 1e-4 * expected.abs() + 1e-5 * expected.abs().amax(-1, keepdim=True)
    return bool(((actual - expected).abs() <= tolerance).all())
