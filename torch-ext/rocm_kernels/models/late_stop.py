"""Has ``generate`` ask for the next step before it looks whether an answer has ended.

    step t on the device  ──▶ token t ──▶ step t+1 ──▶ token t+1 ──▶ ...
    the host, as it was       waits for token t, looks at it, asks for t+1 while the device idles
    the host, one step late   asks for t+1, waits for token t, looks at it while t+1 runs

transformers can do so by itself (``DeferredStopCheck``, from 5.17 on), and takes back the one step
too many where an answer has ended: its token, its logits, and its place in a cache that is handed
out. It does so on Apple's GPUs alone. Here it is told to, if nobody would see the step too many: no
function of the caller's looks at each token, and what the step drew from the device's random
numbers is put back.
"""

import contextlib
import functools
import importlib
import threading
from typing import Any, Iterable, Iterator, Optional

import torch

_here = threading.local()


class _Answer:
    """One of this thread's that has not ended, and what looks at its tokens late, if anything.
    Also the random state behind the last step's numbers, and behind those of the step before: here,
    as another copy of the package may have taught the same check."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.check: Any = None
        self.drawn: Optional[torch.Tensor] = None
        self.drawn_before: Optional[torch.Tensor] = None


@contextlib.contextmanager
def looking_late(allowed: bool) -> Iterator[None]:
    """Within, an answer of this thread may be looked at late, or not."""
    before = _answer()
    _here.answer = _Answer(allowed)
    try:
        yield
    finally:
        _here.answer = before


def _answer() -> Optional[_Answer]:
    return getattr(_here, "answer", None)


def goes_on_with(cache: Any) -> None:
    """This thread's answer has let go of its cache for another: of that the one step too many is
    taken back."""
    answer = _answer()
    if answer is not None and answer.check is not None and answer.check.cache is not None:
        answer.check.cache = cache


def are_theirs(watchers: Iterable[Any]) -> bool:
    """Whether all that looks at each token is transformers' own, which keeps nothing of what it has
    seen, and asks no function of the caller's."""
    return all(
        type(watcher).__module__.startswith("transformers.")
        and not hasattr(watcher, "_prefix_allowed_tokens_fn")
        for watcher in watchers
    )


def runs_ahead(device: torch.device) -> bool:
    """Whether the host can ask for a step while the device still runs the one before."""
    return device.type == "cuda"


@functools.cache
def teach_transformers() -> None:
    """Does nothing where a version has no such check. Of other models' caches it asks as before."""
    utils = importlib.import_module("transformers.generation.utils")
    theirs = getattr(utils, "DeferredStopCheck", None)
    if theirs is None:
        return

    class LateStopCheck(theirs):
        """Also for caches that grow in place; and takes back the random numbers of a step too
        many, which the one step before has not drawn yet."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):  # its tensors are the host's, on any default device
                super().__init__(*args, **kwargs)
            answer = _answer()
            if answer is not None:  # nobody forgets it else, nor the cache that it holds
                answer.check = self

        @staticmethod
        def is_supported(
            device: torch.device, cache: Any, cache_is_returned: bool = True, **kwargs: Any
        ) -> bool:
            answer = _answer()
            allowed = answer is not None and answer.allowed
            if allowed and hasattr(cache, "grow") and runs_ahead(device):
                may_go_on = cache.is_croppable or not cache_is_returned
                return may_go_on and not kwargs.get("is_assistant", False)
            return theirs.is_supported(device, cache, cache_is_returned, **kwargs)

        def __call__(self, unfinished_sequences: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
            answer = _answer()
            if answer is not None and answer.check is self:
                self.device = unfinished_sequences.device
                answer.drawn_before, answer.drawn = answer.drawn, _random_state(self.device)
            return super().__call__(unfinished_sequences, *args, **kwargs)

        def finish(self) -> int:
            count = super().finish()
            answer = _answer()
            if count and answer is not None and answer.check is self:
                _set_random_state(self.device, answer.drawn_before)
            return count

    utils.DeferredStopCheck = LateStopCheck


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
