"""What a recorded step computes of positions and masks alone, beside what it computes of tokens.

    tokens      embedding ─▶ norm ─▶ qkv ─▶ rotate q and k ─▶ attention ─▶ ... ─▶ choice
    positions   cos and sin ────────────────▲                 ▲
    the mask    the ends of the keys ─────────────────────────┘

Some fifteen kernels of torch's run before the first layer of a step, and thirty where there is
padding, each of less work than its launch. Little of a model needs them, and that not at once. So
while a step is recorded each op is seen, and those that read no weight, and nothing of what others
write, go to streams of their own: branches of the graph. What reads their results waits for them.

A kernel that is launched past torch's dispatcher would not wait, such as a rotation in Triton that
a library has put into a model. So it is done where each attention of a model has shown, on the CPU,
that its code is torch's alone (probe_attention.py).
"""

from typing import Any, Dict, Iterable, List, NamedTuple, Set, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .seen_ops import EMPTY, storages_of, tensors_in, written_by
from .tensor_parallel import is_divided

_BRANCHES = 3


def may_branch(model: nn.Module) -> bool:
    """Whether all that reads positions and masks in a model is seen. On AMD's GPUs, where layers
    are put together (layer_stacks.py), nobody has measured branches."""
    config = model.config.get_text_config(decoder=True)
    asked = sum(getattr(m, "kernel_attention", None) is not None for m in model.modules())
    return asked == getattr(config, "num_hidden_layers", None) and not (
        is_divided(model) or torch.version.hip
    )


class _Use(NamedTuple):
    """Of a memory, by an op aside: its number among all, its stream, and what tells its end."""

    number: int
    branch: Any
    event: Any


class Aside(TorchDispatchMode):
    """Ops called within are recorded on the current stream, which captures, or beside it.

    weights: what tells tokens from positions.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.weights = storages_of(weights)
        self.last = [-1] * _BRANCHES  # op of each branch
        self.count = 0
        self.begun = False  # whether an op of ours has run
        self.read: Set[int] = set()  # memory that an op of the main stream has read
        self.written: Set[int] = set()
        self.writes: Dict[int, _Use] = {}  # of memory written aside, the last
        self.reads: Dict[int, List[_Use]] = {}  # by ops aside, since then
        self.seen: Dict[Tuple[Any, Any], int] = {}  # up to which op a stream has waited for another
        self.kept: List[Any] = []  # or memory of a branch might be given to another op of it

    def __enter__(self) -> Any:
        self.main = torch.cuda.current_stream()
        self.begin = self._event(self.main)
        self.branches = [torch.cuda.Stream(self.main.device) for _ in range(_BRANCHES)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        for branch, last in zip(self.branches, self.last):
            if last >= 0:
                self.main.wait_stream(branch)
        return super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = storages_of(tensors_in((args, kwargs)))
        written = storages_of(written_by(func, args, kwargs))
        before = self._before(touched, written)
        if self._is_aside(func, touched, written):
            return self._run_aside(func, args, kwargs, touched, written, before)
        self.begun |= func.namespace != "aten"
        self._wait(self.main, before)
        made = func(*args, **kwargs)
        self.read |= touched
        self.written |= written | storages_of(tensors_in(made)) - touched
        return made

    def _is_aside(self, func: Any, touched: Set[int], written: Set[int]) -> bool:
        return (
            func.namespace == "aten"
            and func.overloadpacket not in EMPTY
            and torch.Tag.nondeterministic_seeded not in func.tags
            and not touched & self.weights
            and not touched & self.written
            and not written & self.read
            and bool(touched or not self.begun)
        )

    def _before(self, touched: Set[int], written: Set[int]) -> List[_Use]:
        """The ops aside that must have ended."""
        uses = [self.writes[memory] for memory in touched if memory in self.writes]
        for memory in written:
            uses += self.reads.get(memory, [])
        return uses

    def _wait(self, stream: Any, before: List[_Use]) -> None:
        for use in sorted(before, reverse=True):
            if stream != use.branch and self.seen.get((stream, use.branch), -1) < use.number:
                stream.wait_event(use.event)
                self.seen[stream, use.branch] = use.number

    @staticmethod
    def _event(stream: Any) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _run_aside(
        self,
        func: Any,
        args: Tuple,
        kwargs: Any,
        touched: Set[int],
        written: Set[int],
        before: List[_Use],
    ) -> Any:
        # Behind what it reads, if that is the end of a branch; else on the one that has waited
        # for longest.
        latest = max(before, default=None)
        place = self.last.index(min(self.last))
        if latest is not None and latest.number in self.last:
            place = self.last.index(latest.number)
        branch = self.branches[place]
        if self.last[place] < 0:
            branch.wait_event(self.begin)  # joins what is recorded
        self._wait(branch, before)
        with torch.cuda.stream(branch):
            made = func(*args, **kwargs)
        new = storages_of(tensors_in(made)) - touched
        if not new and not written and func._schema.returns:
            return made  # a view
        use = _Use(self.count, branch, self._event(branch))
        self.last[place] = self.count
        self.count += 1
        self.kept.append(made)
        self.read -= new  # of what has been at its address before
        self.written -= new
        for memory in touched - written:
            self.reads.setdefault(memory, []).append(use)
        for memory in written | new:
            self.writes[memory], self.reads[memory] = use, []
        return made
