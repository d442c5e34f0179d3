"""A decode step that was recorded: a graph, with the tensors that it reads and writes.

A call's arguments are copied to where the graph reads them, and its results out of where it leaves
them, so that nobody's results are overwritten; likewise the tensors that modules keep between calls
as attributes, such as an image's offset of positions. A replay serves calls of the same kind:
arguments of the same names, values or shapes. But a mask of padding grows with its sequence, and an
argument that the step does not look at, such as the kinds of all tokens so far, may be any tensor.
"""

import contextlib
import functools
import gc
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Set,
    Tuple,
)

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..functional.product import settled
from .ahead import asking_ahead
from .aside import Aside, may_branch
from .cpu_recording import CpuGraph, place_of_caller
from .late_sums import LateSums
from .layer_stacks import LayerStacks, handed_out, takes_stacks
from .probe_stacks import why_no_stacks
from .step_arguments import Unread, can_be_given
from .step_length import Lengths

_CACHE = object()  # stands in a recorded result for the cache of the call


class RecordedStep:
    """A step as a graph, with the tensors that it reads and writes; or a prompt, ``beside`` others
    that were recorded with the same cache: their graphs run one after the other, and share memory.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        model: nn.Module,
        cache: Any,
        cache_name: str,
        kwargs: Dict[str, Any],
        beside: Optional[List["RecordedStep"]] = None,
    ) -> None:
        layers = vars(cache)["layers"]
        room = layers[0].max_cache_len if beside is None else 0
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = {
                name: _place(name, value, room)
                for name, value in kwargs.items()
                if can_be_given(value, model.device)
            }
            self.attributes = [_Attribute(*each) for each in _tensors_kept(model)]
        others = kwargs.keys() - self.inputs.keys()
        self.kinds_of_others = {name: type(kwargs[name]) for name in others}
        self.unread: Set[str] = set()
        self.mask_length = 0
        self.in_inference = torch.is_inference_mode_enabled()
        self._copy_in(kwargs)
        weights = shares(model.parameters())
        # Of a cache a step writes what its attention sees last, and earlier steps are done.
        written = [
            states
            for layer in layers
            if layer.is_initialized and beside is None
            for states in (layer.keys, layer.values)
        ]
        with settled([*weights, *written]), asking_ahead(model.device) as self.asked:
            run = functools.partial(self._run, forward, cache, cache_name)
            if beside is None or model.device.type == "cpu":
                branching = weights if may_branch(model) else None
                self.graph, self.layers = _record(model.device, run, branching)
            else:  # what shortens steps of few rows is not for it
                pool = beside[0].graph.pool() if beside else None
                self.graph, self.layers = _cuda_graph(run, pool=pool), {}
        self.attributes = [each for each in self.attributes if id(each.place) in self.seen]
        self.unread = {
            name
            for name, place in self.inputs.items()
            if isinstance(place, torch.Tensor) and id(place) not in self.seen
        }
        self.kept = [*tensors_of(model), *map(sums_of, model.modules())]

    def _run(self, forward: Callable[..., Any], cache: Any, cache_name: str) -> None:
        with _in_place(self.attributes), RecordedLooks() as looks, Lengths(cache) as lengths:
            unread = {name: Unread(name) for name in self.kinds_of_others}
            outputs = forward(**self.inputs, **unread, **{cache_name: cache})
        self.lengths = cache_name, *lengths.bounds
        self.seen = looks.seen | {id(leaf) for leaf in tree_leaves(outputs)}
        self.outputs = _changed(outputs, handed_out, lambda _: _CACHE)

    def is_for_length_of(self, kwargs: Dict[str, Any]) -> bool:
        """Whether the model's code asks of a length what it asked of the recorded one's."""
        cache, least, beyond = self.lengths
        return least <= getattr(kwargs.get(cache), "tokens", 0) < beyond

    def fits(self, kwargs: Dict[str, Any]) -> bool:
        """Whether a call's arguments, a cache among them, are of the kind that was recorded."""
        count = len(self.inputs) + len(self.kinds_of_others) + 1
        if len(kwargs) != count or not self.is_for_length_of(kwargs):
            return False
        for name, kind in self.kinds_of_others.items():
            if type(kwargs.get(name)) is not kind:
                return False
        for name, place in self.inputs.items():
            value = kwargs.get(name, _CACHE)
            if value is place or (name in self.unread and isinstance(value, torch.Tensor)):
                continue
            if not _fits(name, value, place):
                return False
        return self.in_inference == torch.is_inference_mode_enabled() and all(
            each.fits() for each in self.attributes
        )

    def _copy_in(self, kwargs: Dict[str, Any]) -> None:
        for name, place in self.inputs.items():
            value = kwargs[name]
            if value is place or name in self.unread:
                continue
            if isinstance(value, dict):
                for key, tensor in value.items():
                    if tensor is not None:
                        place[key].copy_(tensor)
            elif _is_padding(name, value):
                # It grows with the sequence; its place is as long as the cache.
                length = value.shape[-1]
                if length < self.mask_length:
                    place.zero_()
                place[:, :length].copy_(value)
                self.mask_length = length
            elif isinstance(value, torch.Tensor):
                place.copy_(value)
        for each in self.attributes:
            each.copy_in()

    def replay(self, kwargs: Dict[str, Any], cache_name: str) -> Any:
        self._copy_in(kwargs)
        self.graph.replay()
        return _changed(self.outputs, torch.clone, lambda _: kwargs[cache_name])


class _Attribute:
    """A tensor that a module keeps as an attribute, and the place that a graph reads it from."""

    def __init__(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        self.module, self.name, self.value = module, name, value
        self.place = value.detach().clone()

    def now(self) -> Any:
        return vars(self.module).get(self.name)

    def fits(self) -> bool:
        value = self.now()
        return value is self.value or _fits(self.name, value, self.place)

    def copy_in(self) -> None:
        self.value = self.now()
        self.place.copy_(self.value)


def _tensors_kept(model: nn.Module) -> Iterator[Tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is torch.Tensor:
                yield module, name, value


@contextlib.contextmanager
def _in_place(attributes: List[_Attribute]) -> Iterator[None]:
    """Within, modules have the places for the tensors that they keep."""
    for each in attributes:
        vars(each.module)[each.name] = each.place
    try:
        yield
    finally:
        for each in attributes:
            if each.now() is each.place:  # what a step has put there instead is told elsewhere
                vars(each.module)[each.name] = each.value


class Looks(TorchFunctionMode):
    """Notes the tensors that Python's code calls a function with or asks for anything, a shape
    included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None
    ) -> Any:
        self.seen.update(
            id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        )
        return func(*args, **(kwargs or {}))


class RecordedLooks(Looks):
    """Of a run that is recorded: what takes numbers out of the memory of a tensor, unseen by the
    dispatcher, cannot be. A run that is only looked at may do so, as a prompt does for its mask."""

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None
    ) -> Any:
        # Of a GPU's a graph cannot be told any.
        if func in _NUMBERS or (func in _NUMBER and args[0].device.type != "cpu"):
            raise NotImplementedError(
                f"{place_of_caller()} takes numbers out of a tensor, by {func.__name__}"
            )
        return super().__torch_function__(func, types, args, kwargs)


_NUMBERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_NUMBER = (
    torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__index__,
    torch.Tensor.__float__,
)  # fmt: skip


def _record(
    device: torch.device, run: Callable[[], None], weights: Optional[List[torch.Tensor]]
) -> Tuple[Any, Dict[str, int]]:
    """A graph of what ``run`` launches, with branches where the weights are told, and how layers
    run, as ``DecodeSteps.layers`` says."""

    def record(run: Callable[[], Any], *stacks: ContextManager) -> Any:
        if device.type == "cpu":
            return CpuGraph(run, *stacks)
        branches = [] if weights is None else [Aside(weights)]
        return _cuda_graph(run, *branches, *stacks, LateSums())

    takes = takes_stacks(device)
    why = why_no_stacks(device, record) if takes else None
    layers = {} if why is None else {why: 0}
    if takes and why is None:
        stacks = LayerStacks()
        try:
            return record(run, stacks), dict(stacks.layers)
        except Exception as error:  # if it is not the stacks' it comes again
            layers = {first_line(error): stacks.layers.total()}
    try:
        return record(run), layers
    except Exception:  # not all of torch runs where ops are seen: higher-order ones do not
        if device.type == "cpu":
            raise
        return _cuda_graph(run), layers


def _cuda_graph(
    run: Callable[[], None], *seen_by: ContextManager, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """seen_by: what ops go through, the last one first. pool: of memory that others have too."""
    graph = torch.cuda.CUDAGraph()
    # A graph that is destroyed while another is recorded spoils that one.
    collects = gc.isenabled()
    gc.disable()
    try:
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
            )
            for each in seen_by:
                contexts.enter_context(each)
            run()
    finally:
        if collects:
            gc.enable()
    return graph


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _changed(outputs: Any, tensor: Callable[[Any], Any], cache: Callable[[Any], Any]) -> Any:
    """A model's outputs, with other tensors and another cache in them."""
    if isinstance(outputs, torch.Tensor):
        return tensor(outputs)
    if outputs is _CACHE or hasattr(outputs, "get_seq_length"):
        return cache(outputs)
    if isinstance(outputs, dict):  # transformers' ModelOutput is one
        items = {name: _changed(value, tensor, cache) for name, value in outputs.items()}
        return type(outputs)(**items)
    if isinstance(outputs, (tuple, list)):
        return type(outputs)([_changed(value, tensor, cache) for value in outputs])
    return outputs


def _is_padding(name: str, value: Any) -> bool:
    return name == "attention_mask" and isinstance(value, torch.Tensor) and value.dim() == 2


def kind_of(value: Any) -> Any:
    """What a recorded step may depend on. Not the columns of integers: those of all tokens so far
    may be among the arguments, and grow."""
    if isinstance(value, dict):
        return tuple((key, kind_of(v)) for key, v in sorted(value.items()))
    if isinstance(value, torch.Tensor):
        may_grow = value.dim() == 2 and not value.is_floating_point()
        return value.dtype, value.dim(), tuple(value.shape[:1] if may_grow else value.shape)
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else type(value)


def kinds_of(kwargs: Dict[str, Any]) -> Tuple[Any, ...]:
    """Those of a call's arguments, by name."""
    return tuple((name, kind_of(value)) for name, value in sorted(kwargs.items()))


def _fits(name: str, value: Any, place: Any) -> bool:
    """Whether an argument is of the kind of the one that a place was made for."""
    if isinstance(place, dict):
        same = isinstance(value, dict) and value.keys() == place.keys()
        return same and all(_fits(key, v, place[key]) for key, v in value.items())
    if not isinstance(place, torch.Tensor):
        return type(value) is type(place) and value == place
    if (
        not isinstance(value, torch.Tensor)
        or value.dtype != place.dtype
        or value.device != place.device
    ):
        return False
    if _is_padding(name, place):
        rows, columns = place.shape
        return value.dim() == 2 and value.shape[0] == rows and value.shape[1] <= columns
    return value.shape == place.shape


def _place(name: str, value: Any, room: int) -> Any:
    if isinstance(value, dict):
        return {key: _place(key, v, room) for key, v in value.items()}
    if _is_padding(name, value):
        return value.new_zeros((value.shape[0], max(room, value.shape[1])))
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return value


def tensors_of(model: nn.Module) -> List[torch.Tensor]:
    return shares([*model.parameters(), *model.buffers()])


def shares(tensors: Iterable[torch.Tensor]) -> List[torch.Tensor]:
    """Of tensors that are divided among processes this one's part: the whole has no address."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def sums_of(module: nn.Module) -> Any:
    """What adds a linear's results over processes: a recorded step reads its memory."""
    return vars(module).get("sums")
