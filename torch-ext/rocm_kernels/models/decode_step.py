"""A decode step as one: ``generate`` of transformers, with a whole step replayed: as a CUDA
graph, and on the CPU as what cpu_recording.py makes of it.

    rocm_kernels.models.use_decode_step(model)
    model.generate(...)                             # as before, any number of times
    print(rocm_kernels.models.decode_steps(model))  # what was replayed, and what was not and why

The model's ``forward`` gets something before it, which knows three kinds of calls:

prompt
    A call with an empty dynamic cache, as ``generate`` makes one, or a caller, or answers.py in
    place of a static one. That becomes a cache that grows in place (growing_cache.py). The call
    runs as it did, or replayed (recorded_prompt.py).
step
    One token a sequence behind a cache that stays in place: ours, or a static cache. The first
    step runs as it did, which also prepares whatever is made at a first use. The second is
    recorded, and all later ones are replayed: inputs are copied to where the graph reads them, and
    the results out of where it leaves them.
anything else
    Goes through, and :func:`decode_steps` says why.

What an answer is beyond its calls: answers.py. What a graph has read stays alive with it. Whether
the model is still what was recorded (its tensors, its modules and their hooks) is compared whenever
a call has more than one token, and where ``generate`` begins an answer.

Longer than 500 lines, because one class decides of each call, by a state that all of it shares.
"""

import contextlib
import inspect
import sys
import threading
import weakref
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from . import greedy, recorded_prompt
from .answers import Answers
from .asked_once import asking_once
from .attention import use_attention
from .cpu_recording import NotAsRecorded
from .growing_cache import OtherRows, growing_cache, room_for, serving
from .model_state import Attentions, LastFingerprint, buffers_kept
from .probe_step import buffers_made_anew, why_not_in_place
from .recorded_step import RecordedStep, kinds_of
from .step_arguments import can_be_given, has_gaps, is_unwritten, shape_of_tokens, stays_in_place
from .step_storage import (
    FreeStorages,
    Storage,
    autocast_dtype,
    make_ready,
    name_of_cache,
    wants_mask,
    with_padded_mask,
)

_GAPS = "padding lies between tokens"
_SPARE = 512  # tokens that a new cache has room for beyond its prompt


class DecodeSteps(NamedTuple):
    """What :func:`use_decode_step` has done with a model's calls so far."""

    recorded: int  # graphs
    replayed: int  # steps
    passed_on: Dict[str, int]  # other calls by the reason, which ran as without it
    # On AMD and Hopper, how the decoder layers of the graph that was recorded last run: in
    # "decode_layers", many a launch, or why their ops run one by one: 0 of them where none can.
    layers: Dict[str, int]
    prompts: int  # short ones on a GPU that were replayed, as those of a length are from the second


def use_decode_step(
    model: nn.Module, *, max_cache_len: Optional[int] = None, kv_cache_dtype: str = "auto"
) -> None:
    """Has ``generate`` of a transformers decoder replay steps, and on a GPU short prompts.

    The attention becomes this package's (:func:`use_attention`). Call it after ``quantize_model_``
    and ``kernelize``. Results are those of the same model without it; in a fused decoder layer but
    for a rounding, since one op turns queries and keys and writes them (layers/attention.py), on a
    GPU but for the order of sums in products of short prompts (recorded_prompt.py), and on a CPU
    in 16-bit products of a row (cpu_recording.py).

    Args:
        model: a causal language model of transformers, on one device. One of peft's may be around.
        max_cache_len: tokens of a sequence, prompt and answer, that a cache has room for from the
            beginning. None: the prompt and 512 more, and twice the room whenever it is used up.
            No more than the model has positions for, until more are needed.
        kv_cache_dtype: ``"auto"``, the model's, or ``"fp8"``, for caches that are made here: in
            place of dynamic ones, and of static ones that ``generate`` makes and does not return.

    Raises:
        ValueError: the model cannot be served, and is left as it was.
        NotImplementedError: likewise; a layer's cache is of a kind that is not known here, or
            transformers is older than 5.22.
    """
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ValueError(f"kv_cache_dtype must be 'auto' or 'fp8', got {kv_cache_dtype!r}")
    if max_cache_len is not None and max_cache_len < 1:
        raise ValueError(f"max_cache_len must be at least 1, got {max_cache_len}")
    model = _stepped(model)
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", True) or not hasattr(model, "generation_config"):
        raise ValueError(
            f"model must have generate, and be a decoder of transformers, got "
            f"{type(model).__name__}, which is not"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(
            f"model must be on one device, got {', '.join(sorted(map(str, devices))) or 'none'}"
        )
    theirs = sys.modules["transformers"]
    if not hasattr(theirs.cache_utils.DynamicCache, "get_conv_state"):
        raise NotImplementedError(
            f"transformers must be 5.22 or newer, whose caches are known here, got "
            f"{theirs.__version__}"
        )
    growing_cache(model, 1, in_fp8=False)
    earlier, attention_before = _step_of(model), Attentions(model)
    stop_decode_step(model)
    try:
        use_attention(model)
        step = _DecodeStep(model, max_cache_len, kv_cache_dtype == "fp8")
        why = why_not_in_place(model, step.inner, step.new_cache)
        step.pads_masks = why is not None
        if step.pads_masks and why_not_in_place(model, step.inner, step.new_cache, pads_masks=True):
            raise ValueError(
                f"model must take a cache that stays in place and has room, got "
                f"{type(model).__name__}, which cannot: {why}"
            )
        step.why_not_padded = recorded_prompt.why_not_padded(model, step.inner, step.new_cache)
        # Behind that: what is made of a prompt's positions would be made of those of padding too.
        step.made_anew = buffers_made_anew(model, step.inner, step.new_cache)
    except BaseException:
        attention_before.put_back()
        if earlier is not None:
            earlier.stand_before()
        raise
    step.stand_before()


def stop_decode_step(model: nn.Module) -> None:
    """Takes back what :func:`use_decode_step` has put before a model's forward. The attention
    stays."""
    step = _step_of(_stepped(model))
    if step is not None:
        step.put_back()


def decode_steps(model: nn.Module) -> DecodeSteps:
    """What became of a model's calls since :func:`use_decode_step`."""
    step = _step_of(_stepped(model))
    if step is None:
        raise ValueError(f"use_decode_step was not called with this {type(model).__name__}")
    return DecodeSteps(
        step.recorded, step.replayed, dict(step.passed_on), dict(step.layers), step.prompts
    )


def _stepped(model: nn.Module) -> nn.Module:
    """The model whose forward ``generate`` calls: where peft's is around it, its own."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _step_of(model: nn.Module) -> Optional["_DecodeStep"]:
    """What stands before a model's forward, where something of another's may stand before it."""
    return vars(model).get(_DecodeStep.ATTRIBUTE)


class _DecodeStep:
    """What stands before a model's forward."""

    ATTRIBUTE = "_decode_step"  # by which a model keeps it
    stopped = False
    is_wrapped = False  # by code of another's

    def __init__(self, model: nn.Module, max_cache_len: Optional[int], in_fp8: bool) -> None:
        self.model, self.max_cache_len, self.in_fp8 = model, max_cache_len, in_fp8
        self.before = vars(model).get("forward")  # None: its class's own
        self.pads_masks = False  # to a column for each row of the cache
        self.why_not_padded: Optional[str] = None  # prompts, by tokens behind theirs
        self.made_anew: List[Tuple[nn.Module, str]] = []  # buffers that are no states
        self.attentions = Attentions(model)
        self.__signature__ = inspect.signature(model.forward)
        self._forget()

    def _forget(self) -> None:
        self.recorded = self.replayed = self.prompts = 0
        self.passed_on: Counter = Counter()
        self.layers: Dict[str, int] = {}
        self.model_was: Optional[Tuple] = None
        self.fingerprint = LastFingerprint()
        self.device: Optional[torch.device] = None  # kept: to ask the model walks its modules
        self.free = FreeStorages()
        self.other_rows = False  # its layers have been seen to keep other rows than its tokens'
        self.of_static: Any = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()  # a cache may end, and come back, anywhere
        self.answers = Answers(self)

    def __getstate__(self) -> Dict[str, Any]:
        names = (
            "model", "max_cache_len", "in_fp8", "before", "pads_masks", "why_not_padded",
            "made_anew", "attentions", "__signature__", "stopped",
        )  # fmt: skip
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def stand_before(self) -> None:
        self.stopped = False
        vars(self.model)[self.ATTRIBUTE] = self
        if not self.is_wrapped:
            self.model.forward = self

    def put_back(self) -> None:
        """Where another's code calls it by now, it stays there and does nothing."""
        self.stopped = True
        vars(self.model).pop(self.ATTRIBUTE, None)
        self.is_wrapped = vars(self.model).get("forward") is not self
        if self.is_wrapped:
            return
        if self.before is None:
            vars(self.model).pop("forward", None)
        else:
            self.model.forward = self.before

    def new_cache(self, room: int) -> Any:
        return growing_cache(self.model, room, self.in_fp8)

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(name_of_cache(kwargs) or "")
        if self.pads_masks or wants_mask(cache, kwargs):
            kwargs = with_padded_mask(kwargs, self.device or self.model.device)
        with buffers_kept(self.made_anew), serving(cache):
            if self.before is None:
                return type(self.model).forward(self.model, *args, **kwargs)
            return self.before(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.stopped or torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        if args:
            names = self.__signature__.parameters
            if any(each.kind is each.VAR_POSITIONAL for each in [*names.values()][: len(args)]):
                self.passed_on["its arguments have no names"] += 1
                return self.inner(*args, **kwargs)
            kwargs.update(zip(names, args))
        name = name_of_cache(kwargs) or self.answers.begin_anew(kwargs)
        if name is not None:
            result = self._once_more(name, kwargs)
            if result is not None:
                return result
        shape = shape_of_tokens(kwargs)
        if name is None or shape is None:
            return self._pass_on("it has no cache, or no tokens", kwargs)
        batch, rows = shape
        cache = kwargs[name]
        is_prompt = self._is_fresh(cache, kwargs)
        answers = None
        if is_prompt or rows != 1 or self.device is None:
            with self.lock:
                self.look_at_model()
            answers = self.fingerprint.answers if self._why_run() is None else None
        if is_prompt:
            with self.lock:
                self._give_storage(cache, batch, rows)
        elif hasattr(cache, "grow") and not self._may_grow(kwargs):
            cache.let_go()
        grows = hasattr(cache, "grow")
        if grows:
            make_ready(cache, rows)
            if rows != 1 or is_prompt:
                cache.storage.has_gaps = has_gaps(kwargs.get("attention_mask"))
            # A recorded step asks the device for the length. A prompt cannot: it is not there yet.
            cache.idle = is_prompt
        storage = vars(cache).get("storage")
        try:
            with asking_once(answers):
                result = self._run(storage, name, kwargs, rows, is_prompt)
            if grows and is_prompt and not cache.is_whole:
                raise OtherRows("a hook has put other keys in its cache")
        except BaseException as error:
            has_other_rows = isinstance(error, OtherRows)
            if grows and (is_prompt or has_other_rows):  # as it came: its caller may try again
                cache.idle = True
                cache.let_go()
            if not has_other_rows:
                raise
            self.other_rows = True
            return self._pass_on("its layers keep other rows than its tokens'", kwargs)
        if grows:
            cache.tokens += cache.rows if is_prompt else rows
            cache.idle = True
            if not cache.is_whole:
                cache.let_go()
        return result

    def _once_more(self, name: str, kwargs: Dict[str, Any]) -> Any:
        """The result of a step that is of the same kind as the last one with its cache; None: the
        call must be looked at. A GPU waits for all that is asked here."""
        cache = kwargs[name]
        storage = vars(cache).get("storage") or self.of_static.get(cache)
        if storage is None or storage.last is None:
            return None
        step = storage.last
        grows = hasattr(cache, "grow")
        if (
            storage.model_was is not self.model_was
            or storage.has_gaps
            or (grows and not (cache.idle and cache.tokens < cache.room))
            or not step.fits(kwargs)
            or self._why_run() is not None
            or not storage.has(cache)
        ):
            return None
        if not grows:
            return self._replay(storage, step, name, kwargs, self.inner)
        cache.idle = False
        result = self._replay(storage, step, name, kwargs, self.inner)
        cache.tokens += 1
        cache.idle = True
        return result

    def _run(
        self, storage: Any, name: str, kwargs: Dict[str, Any], rows: int, is_prompt: bool
    ) -> Any:
        if is_prompt:
            return self._prompt(storage, name, kwargs)
        why = self._why_not(kwargs, name, rows)
        if why is not None:
            return self._pass_on(why, kwargs)
        if storage is None:
            storage = self.of_static.setdefault(kwargs[name], Storage(None))
        return self._step(storage, name, kwargs)

    def _pass_on(self, why: str, kwargs: Dict[str, Any], forward: Any = None) -> Any:
        self.passed_on[why] += 1
        return (forward or self.inner)(**kwargs)

    def _prompt(self, storage: Storage, name: str, kwargs: Dict[str, Any]) -> Any:
        cache, given, why = kwargs[name], None, self._why_as_it_is(storage)
        if why is None:
            handed_on = {
                key: value
                for key, value in kwargs.items()
                if key != name and self._is_handed_on(key, value)
            }
            own = {key: value for key, value in kwargs.items() if key not in handed_on}
            given = recorded_prompt.padded_prompt(own, name, self.device, cache.room)
        if given is None:
            return self._pass_on(f"a prompt: {why}" if why else "a prompt", kwargs)
        given.update(handed_on)
        storage.forget_others(cache, self.model_was)
        kind = (given["input_ids"].shape, *kinds_of(given), torch.is_inference_mode_enabled())
        step = storage.prompts.get(kind)
        if step is None and kind in storage.prompts:
            longest = recorded_prompt.padded_prompt(own, name, self.device, cache.room, True)
            prompts = storage.prompts, longest and {**longest, **handed_on}
            step = storage.record(self.inner, self.model, cache, name, given, prompts)
            storage.prompts[kind] = step
            cache.idle = True  # as before: a prompt's code asks for its length
        given[name], result = cache, None
        if isinstance(step, RecordedStep) and step.fits(given):
            with contextlib.suppress(NotAsRecorded):
                result = step.replay(given, name)
                self.prompts += 1
        if result is None:
            why = f"a prompt: {step}" if isinstance(step, str) else "a prompt"
            result = self._pass_on(why, given)
            if not recorded_prompt.says_logits_alone(result):
                self.why_not_padded = "the model says more than logits"
                cache.begin_anew()
                return self._pass_on(f"a prompt: {self.why_not_padded}", kwargs)
            storage.forget_others(cache, self.model_was)  # a new cache's tensors are there now
            storage.prompts.setdefault(kind)
        recorded_prompt.kept_of(cache, kwargs["input_ids"].shape[1])
        return result

    def _why_as_it_is(self, storage: Storage) -> Optional[str]:
        """Why a prompt runs as it is; None: it may have tokens behind its own."""
        if self.why_not_padded is not None:
            return self.why_not_padded
        return self.who_watches or (_GAPS if storage.has_gaps else self._why_run())

    # ---- greedy answers

    def serves(self, kwargs: Dict[str, Any]) -> bool:
        """Whether the cache that ``generate`` begins with is one that grows, or will be."""
        cache = kwargs.get(name_of_cache(kwargs))
        if hasattr(cache, "grow"):
            return self._may_grow(kwargs)
        return cache is not None and self._is_fresh(cache, kwargs)

    def choose(self, kwargs: Dict[str, Any]) -> Dict[str, Any]:
        """Runs a step that ends with its choice, and returns the arguments of the next one."""
        name = name_of_cache(kwargs)
        cache = kwargs[name]
        make_ready(cache, 1)
        if kwargs.get("attention_mask") is not None:
            mask = greedy.with_room(kwargs["attention_mask"], cache.room, cache.tokens)
            kwargs = {**kwargs, "attention_mask": mask}
        cache.idle = False
        storage = cache.storage
        why = self._why_not(kwargs, name, 1)
        if why is not None:
            storage.last = None
            self._pass_on(why, kwargs, self._choose)
        elif storage.choose_apart:
            greedy.choose_in_place(
                lambda **inputs: self._step(storage, name, inputs), kwargs, cache.length
            )
            storage.last = None  # its arguments are others
        else:
            self._step(storage, name, kwargs, self._choose)
            storage.choose_apart = any(isinstance(step, str) for step in storage.steps.values())
        cache.tokens += 1
        cache.idle = True
        return kwargs if storage.last is None else {**kwargs, **storage.last.inputs}

    def _choose(self, **kwargs: Any) -> None:
        greedy.choose_in_place(self.inner, kwargs, kwargs[name_of_cache(kwargs)].length)

    # ---- caches

    def _is_fresh(self, cache: Any, kwargs: Dict[str, Any]) -> bool:
        """An empty cache, which may become a growing one."""
        return is_unwritten(cache) and not self.other_rows and self._may_grow(kwargs)

    def _may_grow(self, kwargs: Dict[str, Any]) -> bool:
        """Where a call asks for the attention's probabilities its cache may not: they have a column
        for each row of it. Nor where a caller's own mask has a column for each token, nor where a
        gradient goes through rows, nor where another attention than was asked about would not know
        of the room."""
        mask = kwargs.get("attention_mask")
        is_of_tokens = mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2)
        return is_of_tokens and not (
            kwargs.get("output_attentions") or torch.is_grad_enabled() or self.model.training
            or self.attentions.other()
        )  # fmt: skip

    def look_at_model(self) -> None:
        """What was recorded with another state of the model is not replayed any more."""
        self.device = self.model.device
        model_is = self.fingerprint.of(self.model)
        if model_is is not self.model_was and model_is != self.model_was:
            self.model_was = model_is
            self.free.clear()
            self.is_hooked = self.fingerprint.has_hooks_within
            self.who_watches = recorded_prompt.who_watches(self.model)
            if self.before is not None:
                self.who_watches = "another's forward stands before the model's"

    def _give_storage(self, cache: Any, batch: int, rows: int) -> None:
        """Has an empty cache be a storage's that nobody holds, or a new one's."""
        least = max(rows + 1, vars(cache).get("room_wanted", 0))
        storage = self.free.take(batch, least, self.device)
        if storage is not None:
            storage.cache.begin_anew()
        else:
            config = self.model.config.get_text_config(decoder=True)
            most = max(rows + _SPARE, least, self.max_cache_len or 0)
            room = room_for(config, least, most)
            self.free.make_way(batch * room, self.model)
            storage = Storage(self.new_cache(room))
            storage.cache.storage = storage
            storage.autocast = autocast_dtype(self.device)
        storage.lend_to(cache)
        storage.give_back = weakref.finalize(cache, self._take_back, storage, self.model_was)

    def _take_back(self, storage: Storage, model_was: Tuple) -> None:
        with self.lock:
            # What a hook saw of the cache it may have kept.
            is_held = storage.cache.is_taken_out or self.is_hooked
            if is_held or model_was != self.model_was:
                storage.end()
            else:
                self.free.give(storage)

    # ---- steps

    def _why_not(self, kwargs: Dict[str, Any], cache: str, rows: int) -> Optional[str]:
        """Why a call cannot be replayed; None: it can."""
        other = self.attentions.other()
        if other is not None:
            return other
        if rows != 1:
            return "more than one token a sequence"
        if "storage" not in vars(kwargs[cache]) and not stays_in_place(kwargs[cache]):
            return "a cache whose tensors do not stay in place"
        if getattr(vars(kwargs[cache]).get("storage"), "has_gaps", False):
            return _GAPS
        if not _has_graphs(self.device):
            return f"there are no graphs on {self.device.type}"
        why = self._why_run()
        if why is not None:
            return why
        for name, value in kwargs.items():
            may_be = can_be_given(value, self.device) or self._is_handed_on(name, value)
            if name != cache and not may_be:
                return f"a graph cannot be given {name} as {type(value).__name__}"
        return None

    def _is_handed_on(self, name: str, value: Any) -> bool:
        """Whether an argument that no graph can be given is one that the model does not name: then
        it may be one that nobody reads, as generate's tokenizer, which recording shows."""
        names = self.__signature__.parameters
        return (
            name not in names
            and not can_be_given(value, self.device)
            and any(each.kind is each.VAR_KEYWORD for each in names.values())
        )

    def _why_run(self) -> Optional[str]:
        """Why nothing can be replayed at this time; None: it can."""
        if self.model.training or torch.is_grad_enabled():
            return "a gradient may be wanted"
        if torch.is_autocast_enabled(self.device.type):
            return "autocast"
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "its caller records it"
        return None

    def _step(
        self, storage: Storage, cache_name: str, kwargs: Dict[str, Any], forward: Any = None
    ) -> Any:
        """forward: what a step runs, in place of the model's own."""
        forward = forward or self.inner
        cache = kwargs[cache_name]
        storage.last = None
        storage.forget_others(cache, self.model_was)
        others = {name: value for name, value in kwargs.items() if name != cache_name}
        kind = kinds_of(others)
        kind += (self.device.type == "cpu" and torch.is_inference_mode_enabled(),)
        if kind not in storage.steps:
            storage.steps[kind] = None
            return self._pass_on("the first step of its kind", kwargs, forward)
        step = storage.steps[kind]
        if step is None or not (isinstance(step, str) or step.is_for_length_of(kwargs)):
            step = storage.record(forward, self.model, cache, cache_name, others)
            storage.steps[kind] = step
            if not isinstance(step, str):
                self.recorded += 1
                self.layers = step.layers
        if isinstance(step, str):
            return self._pass_on(step, kwargs, forward)
        if not step.fits(kwargs):
            return self._pass_on(
                "it reads a tensor that has another size each time", kwargs, forward
            )
        return self._replay(storage, step, cache_name, kwargs, forward)

    def _replay(
        self, storage: Storage, step: RecordedStep, name: str, kwargs: Dict[str, Any], forward: Any
    ) -> Any:
        try:
            result = step.replay(kwargs, name)
        except NotAsRecorded as why:
            return self._pass_on(str(why), kwargs, forward)
        self.replayed += 1
        storage.last = step
        return result


def _has_graphs(device: torch.device) -> bool:
    return device.type in ("cuda", "cpu")
