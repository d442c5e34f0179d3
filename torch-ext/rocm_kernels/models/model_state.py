"""What a model is at a time: what a recorded step takes for granted, and what a forward leaves in
modules."""

import contextlib
from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from torch import nn

from .hooks import is_called
from .recorded_step import sums_of, tensors_of

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))  # what torch keeps in each module, but for training


def fingerprint(model: nn.Module) -> Tuple:
    """What a recorded step would not notice: other tensors, modules and hooks."""
    modules = tuple(
        (
            type(module),
            vars(module).get("forward"),
            is_called(module),
            sums_of(module),
            plain_attributes(module),
        )
        for module in model.modules()
    )
    attention = getattr(model.config, "_attn_implementation", None)
    return tuple(tensor.data_ptr() for tensor in tensors_of(model)), modules, attention


def attentions_of(model: nn.Module) -> Callable[[], None]:
    """Gives what puts the attention that a model has now back into its configurations."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    name = "_attn_implementation_internal"
    before = [(config, getattr(config, name)) for config in configs if hasattr(config, name)]

    def put_back() -> None:
        for config, attention in before:
            setattr(config, name, attention)

    return put_back


def plain_attributes(module: nn.Module) -> Tuple[Any, ...]:
    """Of what a module keeps in itself all that is a number, a text, or a list of such: switches of
    adapters, factors."""
    found = []
    for name, value in vars(module).items():  # of hundreds of modules, before each prompt
        if type(value) in _PLAIN:
            if name not in _OF_TORCH:
                found.append((name, value))
        elif type(value) in (list, tuple, dict) and name not in _OF_TORCH and _is_plain(value):
            found.append((name, _as_tuple(value)))
    return tuple(found)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


def _as_tuple(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(map(_as_tuple, value))
    return tuple(zip(value, map(_as_tuple, value.values()))) if type(value) is dict else value


class States:
    """Numbers and tensors that modules of a model keep as attributes, and its buffers: those that a
    forward puts others in the place of are a state from call to call."""

    def __init__(self, model: nn.Module) -> None:
        self.held = [(name, module, *_states(module)) for name, module in model.named_modules()]

    def changed(self) -> Iterator[Tuple[str, str]]:
        for name, module, attributes, buffers in self.held:
            now, buffers_now = _states(module)
            for before, after in ((attributes, now), (buffers, buffers_now)):
                for key in {**before, **after}:
                    one, other = before.get(key, _MISSING), after.get(key, _MISSING)
                    is_same = type(one) is type(other) and isinstance(one, _PLAIN) and one == other
                    if one is not other and not is_same:
                        yield name, key

    def put_back(self) -> None:
        for _, module, attributes, buffers in self.held:
            now, buffers_now = _states(module)
            for held, new, old in (
                (vars(module), now, attributes), (module._buffers, buffers_now, buffers),
            ):  # fmt: skip
                for key in set(new) - set(old):
                    del held[key]
                held.update(old)


_MISSING = object()


def _states(module: nn.Module) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and isinstance(value, (torch.Tensor, *_PLAIN))
    }
    return attributes, dict(module._buffers)


@contextlib.contextmanager
def states_kept(model: nn.Module) -> Iterator[None]:
    """Whatever runs within, modules have the states of before behind it."""
    states = States(model)
    try:
        yield
    finally:
        states.put_back()
