"""What a model is at a time: what a recorded step takes for granted, and what a forward leaves in
modules."""

import contextlib
import operator
from itertools import chain
from typing import Any, Collection, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

from .asked_once import answers_of
from .hooks import is_called
from .recorded_step import shares, sums_of

_PLAIN = (bool, int, float, str, type(None))
# What torch keeps in each module, and generate in a model. A dropout alone may be in training.
_NOT_ITS_OWN = frozenset(vars(nn.Module()).keys() - {"training"} | {"_previous_max_cache_length"})
# Of a configuration what changes no result, or what generate switches on its way: the experts of a
# prompt, and of steps, are another's code.
_NOT_READ = frozenset(
    ("_experts_implementation_internal", "_name_or_path", "id2label", "label2id", "architectures")
)
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_COPIED = (*_HOOKS, "_modules")  # dictionaries that stay the same objects when they change
_TENSORS = operator.itemgetter("_parameters", "_buffers")


def fingerprint(model: nn.Module) -> Tuple:
    """What a recorded step would not notice: other tensors, modules and hooks, and other numbers in
    a configuration, the attention's name among them."""
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
    configs = tuple(map(_plain_of, configs_of(model)))
    return _addresses([*model.parameters(), *model.buffers()]), modules, configs


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
            self.attributes = [*map(vars, self.modules)]
            self.copies = [
                {**attributes, **{name: dict(attributes[name]) for name in _COPIED}}
                for attributes in self.attributes
            ]
            self.of_all = [*map(dict, _hooks_of_all())]
            self.sizes, self.names, self.values = self._tensors()
            self.hooked = [(m, is_called(m)) for m in self.modules if any(map(vars(m).get, _HOOKS))]
            self.has_hooks_within = any(called for m, called in self.hooked if m is not model)
            self.configs = [(vars(config), _read_of(config)) for config in configs_of(model)]
            self.lists = [
                (value, _content(value))
                for attributes in (*self.attributes, *(read for _, read in self.configs))
                for name, value in attributes.items()
                if name not in _NOT_ITS_OWN and _may_change(value)
            ]
            self.tensors = [*model.parameters(), *model.buffers()]
        return self.made

    def _is_kept(self, model: nn.Module) -> bool:
        """Hundreds of modules keep thousands of things: a loop over them must not be Python's."""
        if model is not self.modules[0]:
            return False
        try:
            # Of what is the same object a comparison of dictionaries asks no more.
            if self.attributes != self.copies or _hooks_of_all() != self.of_all:
                return False
        except Exception:  # one is another that cannot be compared, as a tensor
            return False
        sizes, names, values = self._tensors()
        return (
            sizes == self.sizes
            and names == self.names
            and all(map(operator.is_, values, self.values))
            and self.types == [*map(type, self.modules)]
            and all(is_called(module) == called for module, called in self.hooked)
            and all(_content(value) == content for value, content in self.lists)
            and all(_is_as_read(held, read) for held, read in self.configs)
            and self.made[0] == _addresses(self.tensors)
        )

    def _tensors(self) -> Tuple[List[int], List[str], List[Any]]:
        """How many parameters and buffers each module has, and those of all modules by name. Equal
        ones are not the same."""
        tables = [*chain.from_iterable(map(_TENSORS, self.attributes))]
        full = [*filter(None, tables)]
        names, values = chain.from_iterable(full), chain.from_iterable(map(dict.values, full))
        return [*map(len, tables)], [*names], [*values]


def _hooks_of_all() -> List[Dict]:
    """Hooks that torch calls around each module."""
    every = torch.nn.modules.module
    return [every._global_forward_hooks, every._global_forward_pre_hooks]


def _may_change(value: Any) -> bool:
    """Whether it may have another content and be the same object."""
    if type(value) is tuple:
        return any(map(_may_change, value))
    return type(value) in (list, dict)


def _content(value: Any) -> Any:
    return _as_tuple(value) if _is_plain(value) else None


def _addresses(tensors: List[torch.Tensor]) -> Tuple[int, ...]:
    return tuple(map(torch.Tensor.data_ptr, shares(tensors)))


def configs_of(model: nn.Module) -> List[Any]:
    """The configurations of a model's modules, and those within, each once."""
    waiting = [vars(module).get("config") for module in model.modules()]
    found: Dict[int, Any] = {}
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found and hasattr(config, "to_dict") and hasattr(config, "__dict__"):
            found[id(config)] = config
            waiting.extend(vars(config).values())
    return [*found.values()]


def _read_of(config: Any) -> Dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name not in _NOT_READ}


def _plain_of(config: Any) -> Tuple[Any, ...]:
    return _plain_in(_read_of(config), ())


def _is_as_read(held: Dict[str, Any], read: Dict[str, Any]) -> bool:
    """Whether a configuration holds the very values that were read."""
    is_same = map(operator.is_, map(held.get, read), read.values())
    return len(held.keys() - _NOT_READ) == len(read) and all(is_same)


class Attentions:
    """Which attention each configuration of a model names."""

    def __init__(self, model: nn.Module) -> None:
        self.named = [
            (config, vars(config)[_ATTENTION])
            for config in configs_of(model)
            if _ATTENTION in vars(config)
        ]

    def put_back(self) -> None:
        for config, attention in self.named:
            setattr(config, _ATTENTION, attention)

    def other(self) -> Optional[str]:
        """How one that is named now is another; None: none is."""
        for config, attention in self.named:
            now = getattr(config, _ATTENTION)
            if now != attention:
                return f"the attention is {now} now, and was {attention} for use_decode_step"
        return None


_ATTENTION = "_attn_implementation_internal"


def plain_attributes(module: nn.Module) -> Tuple[Any, ...]:
    """Of what a module keeps in itself all that is a number, a text, or a list of such: switches of
    adapters, factors."""
    return _plain_in(vars(module), _NOT_ITS_OWN)


def _plain_in(held: Dict[str, Any], but: Collection[str]) -> Tuple[Any, ...]:
    found = []
    for name, value in held.items():  # of hundreds of modules, before each prompt
        if type(value) in _PLAIN:
            if name not in but:
                found.append((name, value))
        elif type(value) in (list, tuple, dict) and name not in but and _is_plain(value):
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
        if name not in _NOT_ITS_OWN and isinstance(value, (torch.Tensor, *_PLAIN))
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


@contextlib.contextmanager
def buffers_kept(buffers: List[Tuple[nn.Module, str]]) -> Iterator[None]:
    """Likewise of some buffers: they stay the tensors that a recorded step was recorded with."""
    before = [(module._buffers, name, module._buffers[name]) for module, name in buffers]
    try:
        yield
    finally:
        for table, name, value in before:
            table[name] = value
