"""A CUDA graph's like on the CPU: what a run computes is recorded once, and run again.

The run goes through torch's dispatcher, where each op is seen with its tensors:

ours
    are put into a program, a list of launches with their arguments checked and bound. Those that
    follow each other are one call, without Python or the dispatcher between. 16-bit products of a
    row become ours too, whose sums are then of another order; late_sums.py does as much for sums
    between layers.
views
    need nothing: they look at memory that stays.
torch's
    are called again with the same tensors, and their results copied to where the first ones lay.
    What depends on nothing from outside the run stays as it is.

Recording changes no tensor that was there before: what would be written is only noted. Whatever
asks a tensor for a number, and would go another way with another, cannot be recorded.
"""

import contextlib
import os
import sys
import threading
import weakref
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._ops import add_op_namespace_prefix, ops
from .late_sums import LateSums
from .seen_ops import EMPTY, storages_of, tensors_in, written_by

_aten = torch.ops.aten
_OURS = add_op_namespace_prefix("").rstrip(":")
_GUARDS = (_aten._assert_async.default, _aten._assert_async.msg)
_here = threading.local()
# Programs whose graphs are gone. A finalizer runs amid whatever this thread does: an op that it
# calls would get into what torch.compile traces. So they are freed before the next is made.
_ended: List[int] = []
_freeing = threading.Lock()


class NotAsRecorded(Exception):
    """What a recorded run takes for granted is not so this time. Nothing was written yet."""


def is_recording() -> bool:
    """Whether this thread records a run on the CPU."""
    return getattr(_here, "records", False)


class CpuGraph:
    """What ``run`` computes, to be computed again by :meth:`replay`, in inference mode or not as
    this is: the tensors are of that mode. Ops are ``seen_by`` others before, sums by LateSums."""

    def __init__(self, run: Callable[[], None], *seen_by: ContextManager) -> None:
        with _freeing:
            while _ended:
                ops.record_program(_ended.pop(), "free")
        program = ops.record_program(0, "new")
        weakref.finalize(self, _ended.append, program)
        recorder = _Recorder(program)
        _here.records = True
        try:
            with contextlib.ExitStack() as contexts:
                for each in (torch.no_grad(), recorder, *seen_by, LateSums()):
                    contexts.enter_context(each)
                run()
        finally:
            _here.records = False
        self.kept = recorder.calls
        self.steps = _steps(recorder.repeated(), program)

    def replay(self) -> None:
        for function, args, kwargs, results in self.steps:
            if function in _GUARDS:
                _ask(function, args, kwargs)
                continue
            computed = function(*args, **kwargs)
            if len(results) == 1:
                results[0].copy_(computed)
            elif results:
                for old, new in zip(results, tree_leaves(computed)):
                    old.copy_(new)


_run_program = ops.run_program.default


class _Step(NamedTuple):
    function: Any
    args: Tuple
    kwargs: Dict[str, Any]
    results: Tuple[torch.Tensor, ...]  # to be overwritten by those of a new call


class _Call(NamedTuple):
    """An op that was called, with its tensors, which must live as long as it may be repeated."""

    function: Any
    args: Tuple
    kwargs: Dict[str, Any]
    results: Tuple[torch.Tensor, ...]
    read: Set[int]  # storages
    written: Set[int]
    launches: Optional[Tuple[int, int]] = None  # of the program


def _steps(calls: List[_Call], program: int) -> List[_Step]:
    """Launches in a row are one step. A call that has nothing to do with them comes before."""
    steps: List[_Step] = []
    read: Set[int] = set()  # by the launches that are the last step
    written: Set[int] = set()
    for call in calls:
        follows = bool(steps) and steps[-1].function is _run_program
        if call.launches is not None:
            begin, end = call.launches
            if follows:
                begin = steps.pop().args[1]
            else:
                read, written = set(), set()
            read |= call.read
            written |= call.written
            steps.append(_Step(_run_program, (program, begin, end), {}, ()))
            continue
        apart = not (call.read | call.written) & written and not call.written & read
        step = _Step(call.function, call.args, call.kwargs, call.results)
        steps.insert(len(steps) - int(follows and apart), step)
    return steps


class _Recorder(TorchDispatchMode):
    def __init__(self, program: int) -> None:
        super().__init__()
        self.program = program
        self.calls: List[_Call] = []
        self.made: Set[int] = set()  # storages that are the run's own
        self.fixed: Dict[int, torch.Tensor] = {}  # those whose numbers stand in the model's code

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        written = written_by(func, args, kwargs)
        if func.namespace == _OURS:
            if written:
                self._launch(func, args, kwargs)
                return None
            return func(*args, **kwargs)
        for storage in storages_of(written):
            self.fixed.pop(storage, None)
        is_fixed = func is _aten.lift_fresh.default or (
            storages_of(tensors) <= self.fixed.keys()
            and torch.Tag.nondeterministic_seeded not in func.tags
        )
        if not storages_of(_numbers_asked(func, args)) <= self.fixed.keys():
            raise NotImplementedError(
                f"{place_of_caller()} takes numbers out of a tensor, or a shape, by {func}"
            )
        if func in _GUARDS:
            if any(call.written - self.made for call in self.calls):
                raise NotImplementedError("it asks whether numbers are right after it has written")
            self._note(func, args, kwargs)
            return None
        if written:
            if storages_of(written) <= self.made:
                func(*args, **kwargs)
            self._note(func, args, kwargs, written=storages_of(written))
            returned = len(func._schema.returns)
            return written[0] if returned == 1 else tuple(written[:returned]) or None
        if _is_product_of_few_rows(func, args):
            return self._product(args[0], args[1] if func is _aten.linear.default else args[1].t())
        results = func(*args, **kwargs)
        new = tensors_in(results)
        if is_fixed:
            self.fixed.update((tensor.untyped_storage()._cdata, tensor) for tensor in new)
        if not storages_of(new) <= storages_of(tensors):
            self.made |= storages_of(new)
            self._note(func, args, kwargs, tuple(new), written=storages_of(new))
        return results

    def _note(
        self,
        func: Any,
        args: Tuple,
        kwargs: Dict[str, Any],
        results: Tuple[torch.Tensor, ...] = (),
        written: Set[int] = frozenset(),  # type: ignore[assignment]
        launches: Optional[Tuple[int, int]] = None,
    ) -> None:
        read = storages_of(tensors_in((args, kwargs)))
        self.calls.append(_Call(func, args, kwargs, results, read, written, launches))

    def _launch(self, func: Any, args: Tuple, kwargs: Dict[str, Any]) -> None:
        """Of one of our ops."""
        begin = ops.record_program(self.program, "on")
        try:
            func(*args, **kwargs)
        finally:
            end = ops.record_program(self.program, "off")
        written = storages_of(written_by(func, args, kwargs))
        self._note(func, args, kwargs, written=written, launches=(begin, end))

    def _product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """``x @ w.T`` by an op of ours, which takes two thirds of the time of torch's for a row."""
        out = torch.empty((*x.shape[:-1], w.shape[0]), dtype=x.dtype, device=x.device)
        self.made |= storages_of([out])
        rows = out.view(-1, w.shape[0]), x.reshape(-1, x.shape[-1])
        self._launch(ops.gemm.default, (*rows, w, None, None, None, ""), {})
        return out

    def repeated(self) -> List[_Call]:
        """The calls without those that give the same each time."""
        changing: Set[int] = set()
        chosen: Set[int] = set()
        before = -1
        while len(chosen) != before:
            before = len(chosen)
            for i, call in enumerate(self.calls):
                touched = call.read | call.written
                if i not in chosen and (
                    call.launches is not None
                    or call.function in _GUARDS
                    or not touched <= self.made
                    or touched & changing
                    or torch.Tag.nondeterministic_seeded in call.function.tags
                ):
                    chosen.add(i)
                    changing |= call.written
        return [
            call for i, call in enumerate(self.calls) if i in chosen and not _does_nothing(call)
        ]


def _ask(function: Any, args: Tuple, kwargs: Dict[str, Any]) -> None:
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        raise NotAsRecorded(str(error).splitlines()[0]) from None


def _numbers_asked(func: Any, args: Tuple) -> List[torch.Tensor]:
    """The tensors whose numbers become one of Python's, or tell a shape."""
    if func is _aten.index.Tensor:
        chosen = (torch.bool, torch.uint8)
        return [index for index in args[1] if index is not None and index.dtype in chosen]
    asks = (
        torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
        or func is _aten.is_nonzero.default  # seen in inference mode alone
    )
    return tensors_in(args) if asks else []


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def place_of_caller() -> str:
    """The line of a model's code that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").split(".")[0] == "torch"
        or frame.f_code.co_filename.startswith(_PACKAGE)
    ):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _does_nothing(call: _Call) -> bool:
    if call.launches is not None:
        return call.launches[0] == call.launches[1]
    return call.function.overloadpacket in EMPTY


def _is_product_of_few_rows(func: Any, args: Tuple) -> bool:
    """Of one or two rows, in 16 bits, by a weight that lies as checkpoints hold it: reading that is
    the time. An output embedding's, where it is not in FP8."""
    if func is _aten.mm.default:
        x, w = args[0], args[1].t()
    elif func is _aten.linear.default and (len(args) == 2 or args[2] is None):
        x, w = args[:2]
    else:
        return False
    return (
        x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.numel() <= 2 * x.shape[-1]
        and x.is_contiguous()
        and w.is_contiguous()
        and w.numel() > 0
    )
