"""A decode step that was recorded: a graph, with the tensors that it reads and writes.

A call's arguments are copied to where the graph reads them, and its results out of where it leaves
them, so that nobody's results are overwritten. A replay serves calls of the same kind: arguments of
the same names, values or shapes; but a mask of padding grows with its sequence.
"""

import contextlib
import gc
from typing import Any, Callable, ContextManager, Dict, Iterable, List, Optional, Tuple

import torch
from torch import nn

from ..functional.product import settled
from .ahead import asking_ahead
from .aside import Aside, may_branch
from .cpu_recording import CpuGraph
from .late_sums import LateSums
from .layer_stacks import LayerStacks, handed_out, takes_stacks
from .probe_stacks import why_no_stacks

_CACHE = object()  # stands in a recorded result for the cache of the call


class RecordedStep:
    """A step as a graph, with the tensors that it reads and writes."""

    def __init__(
        self,
        forward: Callable[..., Any],
        model: nn.Module,
        cache: Any,
        cache_name: str,
        kwargs: Dict[str, Any],
    ) -> None:
        room = cache.layers[0].max_cache_len
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = {name: _place(name, value, room) for name, value in kwargs.items()}
        self.mask_length = 0
        self.in_inference = torch.is_inference_mode_enabled()
        self._copy_in(kwargs)
        weights = _shares(model.parameters())
        with settled(weights), asking_ahead(model.device) as self.asked:
            self.graph, self.layers = _record(
                model.device,
                lambda: self._run(forward, cache, cache_name),
                weights if may_branch(model) else None,
            )
        self.kept = [*tensors_of(model), *map(sums_of, model.modules())]

    def _run(self, forward: Callable[..., Any], cache: Any, cache_name: str) -> None:
        outputs = forward(**self.inputs, **{cache_name: cache})
        self.outputs = _changed(outputs, handed_out, lambda _: _CACHE)

    def fits(self, kwargs: Dict[str, Any]) -> bool:
        """Whether a call's arguments, a cache among them, are of the kind that was recorded."""
        if len(kwargs) != len(self.inputs) + 1:
            return False
        for name, place in self.inputs.items():
            value = kwargs.get(name, _CACHE)
            if value is not place and not _fits(name, value, place):
                return False
        return self.in_inference == torch.is_inference_mode_enabled()

    def _copy_in(self, kwargs: Dict[str, Any]) -> None:
        for name, place in self.inputs.items():
            value = kwargs[name]
            if value is place:
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

    def replay(self, kwargs: Dict[str, Any], cache_name: str) -> Any:
        self._copy_in(kwargs)
        self.graph.replay()
        return _changed(self.outputs, torch.clone, lambda _: kwargs[cache_name])


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


def _cuda_graph(run: Callable[[], None], *seen_by: ContextManager) -> torch.cuda.CUDAGraph:
    """seen_by: what ops go through, the last one first."""
    graph = torch.cuda.CUDAGraph()
    # A graph that is destroyed while another is recorded spoils that one.
    collects = gc.isenabled()
    gc.disable()
    try:
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.cuda.graph(graph, capture_error_mode="thread_local"))
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


def kind_of(name: str, value: Any) -> Any:
    """What a recorded step depends on."""
    if isinstance(value, dict):
        return tuple((key, kind_of(key, v)) for key, v in sorted(value.items()))
    if isinstance(value, torch.Tensor):
        shape = value.shape[:1] if _is_padding(name, value) else value.shape
        return value.dtype, tuple(shape)
    return value


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
        return value.new_zeros((value.shape[0], room))
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return value


def tensors_of(model: nn.Module) -> List[torch.Tensor]:
    return _shares([*model.parameters(), *model.buffers()])


def _shares(tensors: Iterable[torch.Tensor]) -> List[torch.Tensor]:
    """Of tensors that are divided among processes this one's part: the whole has no address."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def sums_of(module: nn.Module) -> Any:
    """What adds a linear's results over processes: a recorded step reads its memory."""
    return vars(module).get("sums")
