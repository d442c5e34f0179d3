"""What a step's own Python code makes of its cache's length, which a recorded step has on the
device alone.

    torch.arange(length, length + 1)   is as long in each step: torch.arange(1) + length
    length + 2 > 1024                  is the same in many steps, whose lengths the host knows

Both would take numbers out of a tensor, and wait for the device. Here the first is computed
without, and the second is answered; the recorded step is for lengths with the same answers.
"""

import math
import operator
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode

_T = torch.Tensor
# With a number beside it: how often it and the number count.
_SUMS = {_T.add: (1, 1), _T.sub: (1, -1), _T.__rsub__: (-1, 1)}
_IN_PLACE = {_T.add_: 1, _T.sub_: -1}
# How much more than the number beside it a length is where the answer turns.
_TURNS = {"gt": (1,), "le": (1,), "ge": (0,), "lt": (0,), "eq": (0, 1), "ne": (0, 1)}
_COMPARES = {
    getattr(_T, form): (getattr(operator, name), turns)
    for name, turns in _TURNS.items()
    for form in (name, f"__{name}__")
}


class _Known(NamedTuple):
    """A tensor that is ``sign * length + more``."""

    tensor: torch.Tensor
    length: int  # whose id
    sign: int
    more: int


class Lengths(TorchFunctionMode):
    """Within, a cache's length may be asked as if it were a number. ``bounds`` are the least that
    the answers hold for, and the least beyond that they do not."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.bounds: Tuple[float, float] = (0, math.inf)
        # By id; and what comparisons gave.
        self.known: Dict[int, _Known] = {}
        self.answers: Dict[int, Tuple[torch.Tensor, bool, Tuple[float, float]]] = {}
        for length in _lengths_of(cache):
            self.known[id(length)] = _Known(length, id(length), 1, 0)
        # What the host knows of it: the growing cache's one length.
        self.tokens: Optional[int] = getattr(cache, "tokens", None)

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and len(args) == 2:
            begin, end = map(self._of, args)
            if begin is not None and end is not None and begin[1:3] == end[1:3]:
                options = {**kwargs, "device": kwargs.get("device") or args[0].device}
                return torch.arange(end.more - begin.more, **options) + args[0]
        if func is _T.__bool__:
            if id(args[0]) in self.answers:
                return self._narrowed(*self.answers[id(args[0])][1:])
            if self._of(args[0]) is not None and self.tokens is not None:
                return self._narrowed(*self._compared(_T.ne, self._of(args[0]), 0))
        result = func(*args, **kwargs)
        first, other = (*args, None, None)[:2]
        length = self._of(first)
        if func in _IN_PLACE and length is not None and type(other) is int and not kwargs:
            self.known[id(first)] = length._replace(more=length.more + _IN_PLACE[func] * other)
        elif _changes(func):
            self._forget(first)
        elif length is not None and type(other) is int and not kwargs:
            if func in _SUMS:
                its, others = _SUMS[func]
                sign, more = its * length.sign, its * length.more + others * other
                self.known[id(result)] = _Known(result, length.length, sign, more)
            elif func in _COMPARES and self.tokens is not None:
                self.answers[id(result)] = (result, *self._compared(func, length, other))
        return result

    def _of(self, value: Any) -> Optional[_Known]:
        return self.known.get(id(value)) if isinstance(value, torch.Tensor) else None

    def _compared(
        self, func: Callable, known: _Known, number: int
    ) -> Tuple[bool, Tuple[float, float]]:
        compare, turns = _COMPARES[func]
        turns = turns if known.sign > 0 else [1 - turn for turn in turns]
        ends = [known.sign * (number - known.more) + turn for turn in turns]
        low = max((end for end in ends if 0 < end <= self.tokens), default=0)
        high = min((end for end in ends if end > self.tokens), default=math.inf)
        return compare(known.sign * self.tokens + known.more, number), (low, high)

    def _narrowed(self, answer: bool, bounds: Tuple[float, float]) -> bool:
        self.bounds = max(self.bounds[0], bounds[0]), min(self.bounds[1], bounds[1])
        return answer

    def _forget(self, changed: Any) -> None:
        """Of what was written in place, through a view too."""
        if not isinstance(changed, torch.Tensor):
            return
        memory = changed.untyped_storage()._cdata
        for table in (self.known, self.answers):
            for key in [k for k, v in table.items() if v[0].untyped_storage()._cdata == memory]:
                del table[key]


def _lengths_of(cache: Any) -> Iterator[torch.Tensor]:
    if hasattr(cache, "grow"):
        yield cache.length
        return
    for layer in cache.layers:
        if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            yield layer.cumulative_length


def _changes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
