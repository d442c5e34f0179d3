"""What a model is at a time: what a recorded step takes for granted, and what a forward leaves in
modules."""

import contextlib
import operator
from itertools import chain
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

from .asked_once import answers_of
from .hooks import is_called
from .recorded_step import shares, sums_of

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
    return _addresses([*model.parameters(), *model.buffers()]), modules, _attention(model)


class LastFingerprint:
    """A model's fingerprint, made anew only where something that it is made of may be another: a
    prompt waits for it. What is the same object is the same, but for lists and dictionaries, where
    a tensor lies, and hooks. With it go what modules have answered (asked_once.py)."""

    def __init__(self) -> None:
        self.made: Optional[Tuple] = None

    def of(self, model: nn.Module) -> Tuple:
        if self.made is None or not self._is_kept(model):
            self.made = fingerprint(model)
            self.modules = [*model.modules()]
            self.answers = answers_of(self.modules)
            self.types = [*map(type, self.modules)]
            self.called = [*map(is_called, self.modules)]
            self.tables = [
                table
                for module in self.modules
                for table in (vars(module), module._parameters, module._buffers, module._modules)
            ]
            self.sizes = [*map(len, self.tables)]
            self.names = [*chain.from_iterable(self.tables)]
            self.values = [*chain.from_iterable(map(dict.values, self.tables))]
            self.lists = [
                (value, _content(value))
                for module in self.modules
                for name, value in vars(module).items()
                if type(value) in (list, tuple, dict) and name not in _OF_TORCH
            ]
            self.tensors = [*model.parameters(), *model.buffers()]
        return self.made

    def _is_kept(self, model: nn.Module) -> bool:
        """Hundreds of modules keep thousands of things: a loop over them must not be Python's."""
        is_same = operator.is_
        addresses, _, attention = self.made
        return (
            model is self.modules[0]
            and attention == _attention(model)
            and self.sizes == [*map(len, self.tables)]
            and all(map(is_same, chain.from_iterable(self.tables), self.names))
            and all(map(is_same, chain.from_iterable(map(dict.values, self.tables)), self.values))
            and self.types == [*map(type, self.modules)]
            and self.called == [*map(is_called, self.modules)]
            and all(_content(value) == content for value, content in self.lists)
            and addresses == _addresses(self.tensors)
        )


def _content(value: Any) -> Any:
    return _as_tuple(value) if _is_plain(value) else None


def _addresses(tensors: List[torch.Tensor]) -> Tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in shares(tensors))


def _attention(model: nn.Module) -> Optional[str]:
    return getattr(model.config, "_attn_implementation", None)


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
