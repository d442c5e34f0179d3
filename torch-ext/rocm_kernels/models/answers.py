"""What stands before the loops in which ``generate`` makes an answer.

Each answer looks at the model, is looked at late where nobody sees that (late_stop.py), and chooses
its tokens within its steps where it is greedy (greedy.py). A static cache that ``generate`` makes
for itself would be another one each time, with which each answer's step were recorded anew: in its
place comes one that grows, with as much room from the beginning.
"""

import functools
import importlib
import threading
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import nn

from . import greedy
from .late_stop import are_theirs, goes_on_with, looking_late, teach_transformers
from .step_arguments import is_unwritten
from .step_storage import name_of_cache


class Answers:
    """Those of the model of a step."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.here = threading.local()  # what an answer of this thread calls its cache
        teach_transformers()
        _stand_before(type(step))

    def begin(self, config: Any, kwargs: Dict[str, Any]) -> None:
        """Looks at the model, whose first call may have one token: one that goes on with a cache. A
        call with an empty dynamic cache looks by itself."""
        name = name_of_cache(kwargs)
        if name is None:
            return
        if _is_of_generate(kwargs[name], config):
            grows = self._dynamic_cache()
            rooms = (layer.max_cache_len for layer in kwargs[name].layers)  # or windows
            grows.room_wanted = max(config.max_length or 0, *rooms)
            if self.step.serves({**kwargs, name: grows}):
                kwargs[name] = grows
        if not is_unwritten(kwargs[name]):
            with self.step.lock:
                self.step.look_at_model()

    def sample(
        self,
        theirs: Callable[..., Any],
        input_ids: torch.Tensor,
        logits_processor: List[Any],
        stopping_criteria: List[Any],
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """An answer of one token after the other, greedy or sampled."""
        self.begin(generation_config, model_kwargs)
        unseen = not synced_gpus and are_theirs([*logits_processor, *stopping_criteria])
        rules = (logits_processor, stopping_criteria, generation_config)
        if unseen and greedy.answers(self.step, input_ids, *rules, model_kwargs):
            with looking_late(unseen):
                return greedy.answer(self.step, input_ids, *rules[1:], streamer, model_kwargs)
        before = vars(self.here).get("cache_name")
        # Of calls without a cache that a processor makes, as for guidance, it knows itself.
        asks_too = any(isinstance(getattr(p, "model", None), nn.Module) for p in logits_processor)
        begins_anew = self.step.serves(model_kwargs) and not asks_too
        self.here.cache_name = name_of_cache(model_kwargs) if begins_anew else None
        try:
            with looking_late(unseen):
                return theirs(
                    self.step.model, input_ids, logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria, generation_config=generation_config,
                    synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
                )  # fmt: skip
        finally:
            self.here.cache_name = before

    def begin_anew(self, kwargs: Dict[str, Any]) -> Optional[str]:
        """Of an answer that began with a cache a call may have none: Phi-3 lets go of it where its
        rotation turns, and with each prompt that is longer. Then it gets the one that the model
        would make by itself. Gives its name; None: the call is to have none."""
        name = vars(self.here).get("cache_name")
        if name is None or not kwargs.get("use_cache"):
            return None
        kwargs[name] = self._dynamic_cache()
        goes_on_with(kwargs[name])
        return name

    def _dynamic_cache(self) -> Any:
        cache_utils = importlib.import_module("transformers.cache_utils")
        config = self.step.model.config.get_text_config(decoder=True)
        return cache_utils.DynamicCache(config=config)


def _is_of_generate(cache: Any, config: Any) -> bool:
    """Whether a static cache is of ``generate``, for this answer, and shown to nobody."""
    cache_utils = importlib.import_module("transformers.cache_utils")
    return (
        type(cache) is cache_utils.StaticCache
        and not cache.offloading
        and not getattr(cache, "_is_user_defined", False)
        and not getattr(config, "return_dict_in_generate", True)
    )


@functools.cache
def _stand_before(kind: type) -> None:
    """Has ``generate``, which looks for its loops in a model's class, take that of a model's
    forward where it is of this kind, and tell the forward of each answer."""
    mixin = importlib.import_module("transformers.generation.utils").GenerationMixin
    theirs = mixin._sample

    @functools.wraps(theirs)
    def sample(model: Any, *args: Any, **kwargs: Any) -> Any:
        step = vars(model).get("forward")
        if isinstance(step, kind) and not step.stopped:
            return step.answers.sample(theirs, *args, **kwargs)
        return told(theirs)(model, *args, **kwargs)

    def told(theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def answer(model: Any, *args: Any, **kwargs: Any) -> Any:
            step = vars(model).get(kind.ATTRIBUTE)
            if step is not None:
                step.answers.begin(kwargs.get("generation_config"), kwargs)
            return theirs(model, *args, **kwargs)

        return answer

    theirs_compile = mixin._valid_auto_compile_criteria

    @functools.wraps(theirs_compile)
    def may_compile(model: Any, *args: Any, **kwargs: Any) -> bool:
        """A step with a static cache is not compiled: it is recorded."""
        return kind.ATTRIBUTE not in vars(model) and theirs_compile(model, *args, **kwargs)

    mixin._sample = sample
    mixin._valid_auto_compile_criteria = may_compile
    for name in ("_beam_search", "_assisted_decoding"):
        setattr(mixin, name, told(getattr(mixin, name)))
