"""A decode step as one: ``generate`` of transformers, with a whole step replayed: as a CUDA
graph, and on the CPU as what cpu_recording.py makes of it.

    rocm_kernels.models.use_decode_step(model)
    model.generate(...)                             # as before, any number of times
    print(rocm_kernels.models.decode_steps(model))  # what was replayed, and what was not and why

The model's ``forward`` gets something before it, which knows three kinds of calls:

prompt
    A call with an empty dynamic cache, as ``generate`` makes one. That becomes a cache that grows
    in place (growing_cache.py), and the call runs as it did.
step
    One token a sequence behind a cache that stays in place: ours, or a static cache. The first
    step runs as it did, which also prepares whatever is made at a first use. The second is
    recorded, and all later ones are replayed: inputs are copied to where the graph reads them, and
    the results out of where it leaves them.
anything else
    Goes through, and :func:`decode_steps` says why.

On a GPU ``generate`` looks whether an answer has ended while the next step runs (late_stop.py).
What a graph has read stays alive with it. Whether the model is still what was recorded (its
tensors, its modules and their hooks) is compared whenever a call has more than one token.
"""

import inspect
import operator
import sys
import threading
import weakref
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .attention import use_attention
from .cpu_recording import NotAsRecorded
from .growing_cache import growing_cache
from .hooks import is_called
from .late_stop import LateGenerate
from .recorded_step import RecordedStep, kind_of, sums_of, tensors_of
from .tensor_parallel import is_divided

_CACHES = ("past_key_values", "cache")  # 5.24 renames the argument
_SPARE = 512  # tokens that a new cache has room for beyond its prompt


class DecodeSteps(NamedTuple):
    """What :func:`use_decode_step` has done with a model's calls so far."""

    recorded: int  # graphs
    replayed: int  # steps
    passed_on: Dict[str, int]  # other calls by the reason, which ran as without it


def use_decode_step(
    model: nn.Module, *, max_cache_len: Optional[int] = None, kv_cache_dtype: str = "auto"
) -> None:
    """Has a transformers decoder replay its decode steps, through its own ``generate``.

    The attention becomes this package's (:func:`use_attention`). Call it after ``quantize_model_``
    and ``kernelize``. Results are those of the same model without it; in a fused decoder layer but
    for a rounding, since one op turns queries and keys and writes them (layers/attention.py), and
    on a CPU but for the order of sums in 16-bit products of a row (cpu_recording.py).

    Args:
        model: a causal language model of transformers, on one device.
        max_cache_len: tokens of a sequence, prompt and answer, that a cache has room for from the
            beginning. None: the prompt and 512 more, and twice the room whenever it is used up.
        kv_cache_dtype: ``"auto"``, the model's, or ``"fp8"``, for caches that are made here.

    Raises:
        ValueError: the model cannot be served, and is left as it was.
        NotImplementedError: likewise; a layer keeps other states than keys and values.
    """
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ValueError(f"kv_cache_dtype must be 'auto' or 'fp8', got {kv_cache_dtype!r}")
    if max_cache_len is not None and max_cache_len < 1:
        raise ValueError(f"max_cache_len must be at least 1, got {max_cache_len}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", True):
        raise ValueError(
            f"model must be a decoder of transformers, got {type(model).__name__}, which is not"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(
            f"model must be on one device, got {', '.join(sorted(map(str, devices))) or 'none'}"
        )
    growing_cache(model, 1, in_fp8=False)
    stop_decode_step(model)
    use_attention(model)
    model.forward = _DecodeStep(model, max_cache_len, kv_cache_dtype == "fp8")
    if "generate" not in vars(model):
        model.generate = LateGenerate(model)


def stop_decode_step(model: nn.Module) -> None:
    """Takes back what :func:`use_decode_step` has put before a model's forward. The attention
    stays."""
    step = vars(model).get("forward")
    if isinstance(step, _DecodeStep):
        step.put_back()


def decode_steps(model: nn.Module) -> DecodeSteps:
    """What became of a model's calls since :func:`use_decode_step`."""
    step = vars(model).get("forward")
    if not isinstance(step, _DecodeStep):
        raise ValueError(f"use_decode_step was not called with this {type(model).__name__}")
    return DecodeSteps(step.recorded, step.replayed, dict(step.passed_on))


_keys_of = operator.attrgetter("keys")


class _Storage:
    """A cache, and the steps recorded with its tensors.

    A growing cache's storage serves one answer after the other: each has a cache of its own to
    hold, which is :meth:`lent` the storage's, and when that is gone the storage is free.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.steps: Dict[Any, Any] = {}  # by kind of call: a RecordedStep, or why there is none
        self.last: Optional[RecordedStep] = None  # of them, the one that was replayed last
        self.read: List[Any] = []
        self.model_was: Optional[Tuple] = None

    def lend_to(self, cache: Any) -> None:
        """An empty dynamic cache becomes the storage's. It stays the object that its maker may
        hold, and whose end can be told from the storage's."""
        cache.__class__ = type(self.cache)
        cache.__dict__ = vars(self.cache)

    def forget_if_moved(self, cache: Any) -> None:
        """What was recorded with tensors that the cache has no more."""
        if not self.has(cache):
            self.forget()
            self.read = [layer.keys for layer in cache.layers]

    def has(self, cache: Any) -> bool:
        """Whether the steps were recorded with a cache's tensors. A step asks it of all layers, so
        that the loop over them is not Python's."""
        layers = cache.layers
        return len(layers) == len(self.read) and all(
            map(operator.is_, map(_keys_of, layers), self.read)
        )

    def forget(self) -> None:
        self.steps.clear()
        self.last = None


class _DecodeStep:
    """What stands before a model's forward."""

    def __init__(self, model: nn.Module, max_cache_len: Optional[int], in_fp8: bool) -> None:
        self.model, self.max_cache_len, self.in_fp8 = model, max_cache_len, in_fp8
        self.before = vars(model).get("forward")  # None: its class's own
        self.__signature__ = inspect.signature(model.forward)
        # generate would compile a step with a static cache.
        config = model.generation_config
        self.compiled_before = config.disable_compile
        config.disable_compile = True
        self._forget()

    def _forget(self) -> None:
        self.recorded = self.replayed = 0
        self.passed_on: Counter = Counter()
        self.model_was: Optional[Tuple] = None
        self.device: Optional[torch.device] = None  # kept: to ask the model walks its modules
        self.free: Optional[_Storage] = None
        self.of_static: Any = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()  # a cache may end, and come back, anywhere

    def __getstate__(self) -> Dict[str, Any]:
        names = (
            "model", "max_cache_len", "in_fp8", "before", "__signature__", "compiled_before",
        )  # fmt: skip
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def put_back(self) -> None:
        self.model.generation_config.disable_compile = self.compiled_before
        if isinstance(vars(self.model).get("generate"), LateGenerate):
            del self.model.generate
        if self.before is None:
            del self.model.forward
        else:
            self.model.forward = self.before

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is None:
            return type(self.model).forward(self.model, *args, **kwargs)
        return self.before(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        if args:
            kwargs.update(zip(self.__signature__.parameters, args))
        name = _name_of_cache(kwargs)
        if name is not None:
            result = self._once_more(name, kwargs)
            if result is not None:
                return result
        shape = _shape_of_tokens(kwargs)
        if name is None or shape is None:
            return self._pass_on("it has no cache, or no tokens", kwargs)
        batch, rows = shape
        cache = kwargs[name]
        is_prompt = self._is_fresh(cache)
        if is_prompt or rows != 1 or self.device is None:
            with self.lock:
                self._look_at_model()
        if is_prompt:
            with self.lock:
                self._give_storage(cache, batch, rows)
        grows = hasattr(cache, "grow")
        if grows:
            if "storage" not in vars(cache):  # a copy of one of ours
                cache.storage = _Storage(None)
            if cache.tokens + rows > cache.room:
                cache.grow(cache.tokens + rows)
            # A recorded step asks the device for the length. A prompt cannot: it is not there yet.
            cache.idle = is_prompt
        storage = vars(cache).get("storage")
        result = self._run(storage, name, kwargs, rows, is_prompt)
        if grows:
            cache.tokens += rows
            cache.idle = True
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
            or (grows and cache.tokens >= cache.room)
            or not step.fits(kwargs)
            or self._why_run() is not None
            or not storage.has(cache)
        ):
            return None
        if not grows:
            return self._replay(step, name, kwargs)
        cache.idle = False
        result = self._replay(step, name, kwargs)
        cache.tokens += 1
        cache.idle = True
        return result

    def _run(
        self, storage: Any, name: str, kwargs: Dict[str, Any], rows: int, is_prompt: bool
    ) -> Any:
        why = "a prompt" if is_prompt else self._why_not(kwargs, name, rows)
        if why is not None:
            return self._pass_on(why, kwargs)
        if storage is None:
            storage = self.of_static.setdefault(kwargs[name], _Storage(None))
        return self._step(storage, name, kwargs)

    def _pass_on(self, why: str, kwargs: Dict[str, Any]) -> Any:
        self.passed_on[why] += 1
        return self.inner(**kwargs)

    # ---- caches

    def _is_fresh(self, cache: Any) -> bool:
        """A dynamic cache that generate has made, and nobody has written to yet."""
        return (
            type(cache).__name__ == "DynamicCache"
            and not getattr(cache, "_is_user_defined", False)
            and not getattr(cache, "offloading", False)
            and not any(getattr(layer, "is_initialized", False) for layer in cache.layers)
            and not torch.is_grad_enabled()
            and not self.model.training
        )

    def _look_at_model(self) -> None:
        """What was recorded with another state of the model is not replayed any more."""
        self.device = self.model.device
        model_is = _fingerprint(self.model)
        if model_is != self.model_was:
            self.model_was, self.free = model_is, None

    def _give_storage(self, cache: Any, batch: int, rows: int) -> None:
        """Has an empty cache be a storage's that nobody holds, or a new one's."""
        storage, self.free = self.free, None
        if storage is not None and storage.cache.batch == batch and storage.cache.room > rows:
            storage.cache.reset()
        else:
            del storage  # its memory is wanted
            room = max(rows + _SPARE, self.max_cache_len or 0)
            storage = _Storage(growing_cache(self.model, room, self.in_fp8))
            storage.cache.storage = storage
        storage.lend_to(cache)
        weakref.finalize(cache, self._take_back, storage, self.model_was)

    def _take_back(self, storage: _Storage, model_was: Tuple) -> None:
        with self.lock:
            if model_was == self.model_was:
                self.free = storage

    # ---- steps

    def _why_not(self, kwargs: Dict[str, Any], cache: str, rows: int) -> Optional[str]:
        """Why a call cannot be replayed; None: it can."""
        if rows != 1:
            return "more than one token a sequence"
        if "storage" not in vars(kwargs[cache]) and not _stays(kwargs[cache]):
            return "a cache whose tensors do not stay in place"
        if not _has_graphs(self.device):
            return f"there are no graphs on {self.device.type}"
        why = self._why_run()
        if why is not None:
            return why
        for name, value in kwargs.items():
            if name != cache and not _can_be_given(value, self.device):
                return f"a graph cannot be given {name} as {type(value).__name__}"
        return None

    def _why_run(self) -> Optional[str]:
        """Why nothing can be replayed at this time; None: it can."""
        if self.model.training or torch.is_grad_enabled():
            return "a gradient may be wanted"
        if torch.is_autocast_enabled(self.device.type):
            return "autocast"
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "its caller records it"
        return None

    def _step(self, storage: _Storage, cache_name: str, kwargs: Dict[str, Any]) -> Any:
        cache = kwargs[cache_name]
        storage.forget_if_moved(cache)
        if storage.model_was is not self.model_was:
            storage.forget()
            storage.model_was = self.model_was
        others = {name: value for name, value in kwargs.items() if name != cache_name}
        kind = tuple((name, kind_of(name, value)) for name, value in sorted(others.items()))
        kind += (self.device.type == "cpu" and torch.is_inference_mode_enabled(),)
        if kind not in storage.steps:
            storage.steps[kind] = None
            return self._pass_on("the first step of its kind", kwargs)
        step = storage.steps[kind]
        if step is None:
            # With the storage's own cache: what is recorded outlives the one that was lent.
            lasting = cache if storage.cache is None else storage.cache
            step = storage.steps[kind] = self._record(lasting, cache_name, others)
        if isinstance(step, str):
            return self._pass_on(step, kwargs)
        storage.last = step
        return self._replay(step, cache_name, kwargs)

    def _replay(self, step: RecordedStep, cache_name: str, kwargs: Dict[str, Any]) -> Any:
        try:
            result = step.replay(kwargs, cache_name)
        except NotAsRecorded as why:
            return self._pass_on(str(why), kwargs)
        self.replayed += 1
        return result

    def _record(self, cache: Any, cache_name: str, others: Dict[str, Any]) -> Any:
        """The recorded step, or why there is none."""
        for name, module in self.model.named_modules():
            if is_called(module) and module is not self.model:
                return f"{name} has a hook, which a replayed step would not call"
        if self.device.type == "cpu" and is_divided(self.model):
            return "a step recorded on a CPU would not exchange with other processes"
        try:
            step = RecordedStep(self.inner, self.model, cache, cache_name, others)
        except Exception as error:  # what cannot be recorded says so in many ways
            return f"it cannot be recorded: {str(error).splitlines()[0]}"
        self.recorded += 1
        return step


def _has_graphs(device: torch.device) -> bool:
    return device.type in ("cuda", "cpu")


def _name_of_cache(kwargs: Dict[str, Any]) -> Optional[str]:
    for name in _CACHES:
        if kwargs.get(name) is not None:
            return name
    return None


def _shape_of_tokens(kwargs: Dict[str, Any]) -> Optional[Tuple[int, int]]:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), torch.Tensor):
            return kwargs[name].shape[:2]
    return None


def _stays(cache: Any) -> bool:
    """Whether a cache of the caller's keeps its tensors, and all that it counts in them."""
    theirs = sys.modules["transformers.cache_utils"]
    return isinstance(cache, theirs.StaticCache) and all(
        isinstance(layer, theirs.StaticLayer)
        and not isinstance(layer, theirs.StaticSlidingWindowLayer)  # counts on the host
        and not hasattr(layer, "conv_states")
        for layer in cache.layers
    )


def _can_be_given(value: Any, device: torch.device) -> bool:
    if isinstance(value, dict):
        return all(v is None or _can_be_given(v, device) for v in value.values())
    if isinstance(value, torch.Tensor):
        return value.device == device
    return value is None or isinstance(value, (bool, int, float, str))


def _fingerprint(model: nn.Module) -> Tuple:
    """What a recorded step would not notice: other tensors, modules and hooks."""
    modules = tuple(
        (type(module), vars(module).get("forward"), is_called(module), sums_of(module))
        for module in model.modules()
    )
    attention = getattr(model.config, "_attn_implementation", None)
    return tuple(tensor.data_ptr() for tensor in tensors_of(model)), modules, attention
