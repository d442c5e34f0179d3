"""Sums of a recorded step that are left to the norms behind them.

    layer i      ... down ─▶ h = residual + down        a launch of its own, which a norm can do
    layer i+1                norm(h), FP8 ─▶ qkv ...    in the same pass: it leaves h as well

A layer ends with its sum, and what is behind it is another module's. But while a step is recorded
each op is seen: a sum waits, and a norm of ours that reads it takes its place. Before anything else
reads it, or writes what it adds up, the sum is made, and at the end those that nobody has read.
"""

from typing import Any, Dict, NamedTuple, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._ops import ops
from .seen_ops import EMPTY, is_plain_sum, may_be_a_view, storages_of, tensors_in, written_by

_norm = ops.rmsnorm_fp8.default
_X, _RESIDUAL, _ADDEND = 2, 3, 11  # of its arguments
_DEFAULTS = [argument.default_value for argument in _norm._schema.arguments]  # are left out


class _Sum(NamedTuple):
    h: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor


class LateSums(TorchDispatchMode):
    """Sums made within wait for their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Dict[int, _Sum] = {}  # by the storage of h

    def __exit__(self, *error: Any) -> Any:
        result = super().__exit__(*error)
        if error[0] is None:
            self._make(list(self.waiting))
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_plain_sum(func, args, kwargs) and args[0].device == args[1].device:
            self._make_for(func, args, kwargs)
            h = torch.empty_like(args[0])
            self.waiting[_storage(h)] = _Sum(h, *args)
            return h
        if func is _norm and self._is_left_to(args):
            h, x, y = self.waiting.pop(_storage(args[_X]))
            shape = args[_X].shape
            new = [*args, *_DEFAULTS[len(args) :]]
            new[_X], new[_RESIDUAL], new[_ADDEND] = x.view(shape), h.view(shape), y.view(shape)
            self._make_for(func, new, kwargs)
            return func(*new)
        if not self.waiting or func.overloadpacket in EMPTY:
            return func(*args, **kwargs)
        if may_be_a_view(func):
            seen = func(*args, **kwargs)
            if storages_of(tensors_in(seen)) <= storages_of(tensors_in((args, kwargs))):
                return seen
        self._make_for(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_left_to(self, args: Tuple) -> bool:
        """Whether a norm reads a sum that waits, all of it, adds nothing itself, and writes to none
        of what would be added."""
        x = args[_X]
        waits = self.waiting.get(_storage(x))
        return (
            waits is not None
            and args[_RESIDUAL] is None
            and (len(args) <= _ADDEND or args[_ADDEND] is None)
            and x.data_ptr() == waits.h.data_ptr()
            and x.numel() == waits.h.numel()
            and x.is_contiguous()
            and not storages_of(waits[1:]) & storages_of(tensors_in(args[:_X]))
        )

    def _make_for(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
        """Before an op: what it reads, and what it would spoil."""
        touched = storages_of(tensors_in((args, kwargs)))
        written = storages_of(written_by(func, args, kwargs))
        self._make(
            [
                key
                for key, (_, x, y) in self.waiting.items()
                if key in touched or storages_of((x, y)) & written
            ]
        )

    def _make(self, keys: Any) -> None:
        for key in keys:
            h, x, y = self.waiting.pop(key)
            if h.device.type == "cpu":
                # As cpu_recording.py sums: lest a program end there. The norm is nobody's.
                rows = [tensor.view(-1, h.shape[-1]) for tensor in (x, h, y)]
                weight = torch.ones(h.shape[-1], dtype=h.dtype, device=h.device)
                unread = torch.empty_like(rows[0])
                _norm(unread, None, *rows[:2], weight, None, 1.0, 0, 0.0, False, 0.0, rows[2])
            else:
                torch.add(x, y, out=h)


def _storage(tensor: torch.Tensor) -> int:
    return next(iter(storages_of([tensor])))
