"""Answers about a model's modules that hold from one look at it to the next.

The layers ask modules before each op what nobody may have changed: whether one has a hook, who
quantises, which heads there are. ``use_decode_step`` looks at the whole model before each call of
several tokens (model_state.py). Within such a call, and in later ones until something of the model
is another, an answer is given once.
"""

import contextlib
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, Optional, Tuple

import torch
from torch import nn

from .hooks import is_capturing

_here = threading.local()
_NOT_YET = object()


def answers_of(modules: Iterable[nn.Module]) -> Dict[nn.Module, Any]:
    """No answers yet, of modules that have been looked at: others are not asked once."""
    return dict.fromkeys(modules, _NOT_YET)


@contextlib.contextmanager
def asking_once(answers: Optional[Dict[nn.Module, Any]]) -> Iterator[None]:
    """Within, in this thread, :func:`asked_once` has these answers; None: it has none."""
    before = vars(_here).get("answers"), vars(_here).get("of_call")
    _here.answers, _here.of_call = answers, {}
    try:
        yield
    finally:
        _here.answers, _here.of_call = before


def asked_once(module: nn.Module, ask: Callable[[nn.Module], Any]) -> Any:
    """``ask(module)``, of this call of the model or of an earlier one; None where nobody has looked
    at the module, in a graph that torch compiles, and where transformers collects states."""
    if torch.compiler.is_compiling():
        return None
    answers = vars(_here).get("answers")
    if answers is None or is_capturing():
        return None
    answer = answers.get(module)
    if answer is _NOT_YET:
        answer = answers[module] = ask(module)
    return answer


def made_once(things: Tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """``make()``, once in a call of the model for the same things: for what its layers share, such
    as a mask. Things are told by what they are, not by what they are equal to."""
    of_call = vars(_here).get("of_call")
    if of_call is None:  # called by somebody else than use_decode_step
        return make()
    key = tuple(map(id, things))
    made = of_call.get(key)
    if made is None:
        made = of_call[key] = (things, make())  # held, or others could get their places
    return made[1]
