"""Checks by a run of its own forward whether a router is a product and a choice that ``topk``
makes, and whether the block around it hands that choice to its experts as it is.

As in probe.py, the class's own forward runs once in float32 on the CPU, with random numbers in
place of its tensors; and once in bfloat16, to see what it rounds.
"""

import copy
import inspect
from types import ModuleType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .. import reference
from ..functional.moe import MAX_EXPERTS, MAX_TOPK
from .experts import Experts
from .hooks import is_wrapped
from .probe import _CPU, Differs, _Affine, _is_close, _probe, _random, _StandIn


class RouterCall(NamedTuple):
    """What a router computes: ``x @ weight.T + bias``, and of these logits what ``topk_softmax``
    or ``topk_sigmoid`` does.

    Attributes:
        bias: name of the product's bias; None: there is none.
        logits: of 16-bit tensors: ``"rounded"`` to 16 bits, ``"widened"`` to float32 after that, or
            ``"float32"``.
        sigmoid: the choice is that of ``topk_sigmoid``, which has what follows ``renormalize``.
        choice_bias: name of the bias for choosing alone; None: there is none. It is the module's,
            or an argument of its forward.
    """

    bias: Optional[str]
    logits: str
    sigmoid: bool
    k: int
    renormalize: bool
    choice_bias: Optional[str] = None
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0

    def choose(
        self, logits: torch.Tensor, choice_bias: Optional[torch.Tensor], by: ModuleType
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids, by the functions of those names that a module has."""
        if not self.sigmoid:
            return by.topk_softmax(logits, self.k, renormalize=self.renormalize)
        return by.topk_sigmoid(
            logits, self.k, bias=choice_bias, groups=self.groups, groups_kept=self.groups_kept,
            renormalize=self.renormalize, scale=self.scale,
        )  # fmt: skip


def probe_routed_block(block: nn.Module) -> Tuple[nn.Module, nn.Module, RouterCall, bool]:
    """The router of a block that has an :class:`Experts`, those, and what it computes; and whether
    the block gives its experts what it gets, and what they return is its first result.

    Raises:
        Differs: it has none that is known, or does something else with what that chooses.
    """
    if is_wrapped(block):
        raise Differs("its forward was replaced")
    experts = [name for name, m in block._modules.items() if isinstance(m, Experts)]
    if len(experts) != 1:
        raise Differs(f"has {len(experts)} experts of this package")
    count = block._modules[experts[0]].num_experts
    routers = [name for name, m in block._modules.items() if _has_a_row_for_each(m, count)]
    if len(routers) != 1:
        raise Differs(f"has {len(routers)} modules that are a weight of a row for each expert")
    router = block._modules[routers[0]]
    call = probe_router(router)
    alone = _require_choice_as_it_is(block, routers[0], experts[0], call)
    return router, block._modules[experts[0]], call, alone


def _has_a_row_for_each(module: Optional[nn.Module], experts: int) -> bool:
    weight = None if module is None else module._parameters.get("weight")
    return (
        type(weight) is nn.Parameter  # no share of one
        and weight.dim() == 2
        and weight.shape[0] == experts
        and not module._modules
        and not isinstance(module, nn.Linear)
    )


def probe_router(router: nn.Module) -> RouterCall:
    """
    Raises:
        Differs: it computes or returns something else, or cannot be asked.
    """
    experts, hidden = router.weight.shape
    if experts > MAX_EXPERTS:
        raise Differs(f"routes to {experts} experts")
    tensors = _random_tensors(router)
    # Logits of usual sizes, such as a limit would meet, of whose sigmoids many are equal, and such
    # that all sigmoids are next to nothing.
    sizes = torch.tensor([0.3, 1.0, 4.0, 1.0, 50.0], **_CPU).repeat(12)[:, None]
    x = _random(len(sizes), hidden, seed=4) * sizes
    x[:, 0] = torch.tensor([0.0, 0.0, 0.0, -20.0, 0.0], **_CPU).repeat(12)  # times 1
    logits, weights, ids = _run(router, tensors, x)
    bias = _bias_of_product(router, tensors, x, logits)
    used = ("weight", bias)
    rounded = {name: t.bfloat16() if name in used else t for name, t in tensors.items()}
    of_rounded = _run(router, rounded, x.bfloat16())[0]
    kind = "rounded"
    if of_rounded.dtype == torch.float32:
        was_rounded = torch.equal(of_rounded, of_rounded.bfloat16().float())
        kind = "widened" if was_rounded else "float32"
    others = [name for name in tensors if name not in used]
    if len(others) > 1:
        raise Differs(f"has {', '.join(others)}")
    choice_bias = others[0] if others else None
    chosen = _by_expert(weights, ids, experts)
    for call in _candidates(router, bias, kind, ids.shape[-1], choice_bias):
        rows = (sizes < 50.0)[:, 0] if call.sigmoid else slice(None)
        expected = _by_expert(*call.choose(logits, tensors.get(choice_bias), reference), experts)
        if torch.allclose(chosen[rows], expected[rows], 1e-4, 1e-6):
            return call
    raise Differs("chooses its experts, or weighs them, in another way")


def arguments_of(router: nn.Module) -> Tuple[str, ...]:
    """Names: the hidden states, and maybe the bias for choosing."""
    return tuple(inspect.signature(type(router).forward).parameters)[1:]


def _random_tensors(router: nn.Module) -> Dict[str, torch.Tensor]:
    """In place of its own, by name."""
    experts, hidden = router.weight.shape
    found = {"weight": _random(experts, hidden, seed=1) * hidden**-0.5}
    found["weight"][:, 0] = 1.0
    given = arguments_of(router)
    if len(given) > 2:
        raise Differs(f"its forward takes {', '.join(given)}")
    own = {
        **router._parameters,
        **router._buffers,
        **dict.fromkeys(given[1:], found["weight"][:, 0]),
    }
    for seed, (name, tensor) in enumerate(own.items()):
        if tensor is None or name == "weight":
            continue
        if tensor.shape != (experts,):
            raise Differs(f"its {name} is no number for each expert")
        found[name] = _random(experts, seed=10 + seed) * 0.25
    return found


def _run(
    router: nn.Module, tensors: Dict[str, torch.Tensor], x: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its own forward: logits, weights, ids."""
    probe = copy.copy(router)
    probe.__dict__["training"] = False
    for kind in ("_parameters", "_buffers"):
        own = getattr(router, kind)
        probe.__dict__[kind] = {name: tensors.get(name) for name in own}
    given = [tensors[name] for name in arguments_of(router)[1:]]
    try:
        with torch.no_grad():
            out = type(router).forward(probe, x, *given)
    except Exception as failure:
        raise Differs(f"its forward cannot be asked what it computes: {failure}") from failure
    rows, experts = x.shape[0], tensors["weight"].shape[0]
    is_three = (
        isinstance(out, tuple)
        and len(out) == 3
        and all(isinstance(value, torch.Tensor) and value.dim() == 2 for value in out)
        and out[0].shape == (rows, experts)
        and out[1].shape == out[2].shape
        and out[1].shape[0] == rows
        and out[2].dtype == torch.int64
    )
    if not is_three or not 1 <= out[2].shape[1] <= min(MAX_TOPK, experts):
        raise Differs("returns something else than logits, weights and ids")
    return out


def _bias_of_product(
    router: nn.Module, tensors: Dict[str, torch.Tensor], x: torch.Tensor, logits: torch.Tensor
) -> Optional[str]:
    own = {**router._parameters, **router._buffers}
    product = x @ tensors["weight"].t()
    for name in (None, *(name for name in tensors if name in own and name != "weight")):
        if _is_close(logits, product if name is None else product + tensors[name]):
            return name
    raise Differs("its logits are no product with its weight")


def _candidates(
    router: nn.Module, bias: Optional[str], logits: str, k: int, choice_bias: Optional[str]
) -> Iterator[RouterCall]:
    """Choices that it may make, with the numbers that it has."""
    experts = router.weight.shape[0]
    first = (bias, logits)
    if choice_bias is None:
        for renormalize in (True, False):
            yield RouterCall(*first, False, k, renormalize)
    plain = [value for value in vars(router).values() if type(value) in (int, float)]
    scales = dict.fromkeys([1.0, *map(float, plain)])
    counts: List[int] = [value for value in plain if type(value) is int and value > 0]
    groupings = [(groups, kept) for groups in counts for kept in counts if kept < groups]
    for groups, kept in dict.fromkeys([(1, 1), *groupings]):
        if experts % groups or k > experts // groups * kept:
            continue
        for renormalize in (True, False):
            for scale in scales:
                yield RouterCall(
                    *first, True, k, renormalize, choice_bias, groups, kept, scale
                )  # fmt: skip


def _by_expert(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The weight of each expert, in whatever order they were chosen."""
    zeros = torch.zeros(len(ids), experts, **_CPU)
    return zeros.scatter(1, ids.long(), weights.float())


def _require_choice_as_it_is(
    block: nn.Module, router_name: str, experts_name: str, call: RouterCall
) -> bool:
    """A block's forward runs with weights in float32 and ids in int32, which its own router does
    not give it: it must hand both to its experts, and take no notice. Returns whether these are
    all that there is between its input and its result."""
    router, experts = block._modules[router_name], block._modules[experts_name]
    count, hidden = router.weight.shape
    weights, ids = call.choose(_random(3, count), None, reference)
    routing = _Routing(router, (_random(3, count), weights, ids))
    routed = _Routed(experts)
    stand_ins: Dict[str, Any] = {
        name: _Affine(child, seed)
        for seed, (name, child) in enumerate(block._modules.items())
        if child is not None
    }
    stand_ins.update({router_name: routing, experts_name: routed})
    x = _random(1, 3, hidden)
    try:
        with torch.no_grad():
            result = type(block).forward(_probe(block, stand_ins), x)
    except Exception as failure:
        raise Differs(f"its forward cannot be asked what it computes: {failure}") from failure
    if len(routing.inputs) != 1 or not _is_close(routing.inputs[0].reshape(3, hidden), x[0]):
        raise Differs("routes something else than its input, or several times")
    if len(routed.calls) != 1:
        raise Differs(f"calls its experts {len(routed.calls)} times")
    if routed.calls[0].get("top_k_index") is not ids:
        raise Differs("hands its experts other ids than its router's")
    if routed.calls[0].get("top_k_weights") is not weights:
        raise Differs("hands its experts other weights than its router's")
    first = result[0] if isinstance(result, tuple) else result
    return (
        isinstance(first, torch.Tensor)
        and first.numel() == x.numel()
        and torch.equal(first.reshape(3, hidden), _Routed.result_of(x[0]))
    )


class _Routing(_StandIn):
    def __init__(self, module: nn.Module, result: Tuple[torch.Tensor, ...]) -> None:
        super().__init__(module)
        self.result = result
        self.inputs: List[torch.Tensor] = []

    def __call__(self, x: torch.Tensor, *more: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        self.inputs.append(x)
        return self.result


class _Routed(_StandIn):
    """Stands in the experts' place, and keeps what they get."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.calls: List[Dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = inspect.signature(Experts.forward).bind(self.module, *args, **kwargs).arguments
        self.calls.append(given)
        return self.result_of(given["hidden_states"])

    @staticmethod
    def result_of(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5
