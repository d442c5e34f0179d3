"""Where recorded steps are kept: with the cache whose tensors they read."""

import contextlib
import functools
import inspect
import operator
from itertools import chain
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch import nn

from .hooks import is_called
from .model_state import States
from .recorded_step import RecordedStep, first_line, tensors_of
from .step_arguments import shape_of_tokens
from .tensor_parallel import is_divided

NAMES_OF_CACHE = ("past_key_values", "cache")  # 5.24 renames the argument
_keys_of, _values_of = map(operator.attrgetter, ("keys", "values"))


class Storage:
    """A cache, and the steps recorded with its tensors.

    A growing cache's storage serves one answer after the other: each has a cache of its own to
    hold, which is :meth:`lent` the storage's, and when that is gone the storage is free.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.autocast: Any = None  # under which its keys and values were made
        self.steps: Dict[Any, Any] = {}  # by kind of call: a RecordedStep, or why there is none
        self.prompts: Dict[Any, Any] = {}  # likewise; None: one of the kind has run
        self.last: Optional[RecordedStep] = None  # of them, the one that was replayed last
        self.choose_apart = False  # for steps that choose cannot be recorded here
        self.has_gaps = False  # its answer's padding lies between tokens
        self.read: List[Any] = []
        self.give_back: Optional[Callable[[], Any]] = None  # for who holds the cache lets go of it
        self.model_was: Optional[Tuple] = None

    def serves(self, batch: int, tokens: int, device: torch.device) -> bool:
        """Whether another answer may have it, of so many sequences that begins with room for so
        many tokens."""
        cache = self.cache
        alike = cache.batch == batch and self.autocast == autocast_dtype(device)
        return alike and cache.room >= tokens and cache.is_whole

    def end(self) -> None:
        """Gives back its memory at once: it and its cache name each other, and Python's collector,
        which counts objects, would let gigabytes wait."""
        self.forget()
        self.read = []
        vars(self.cache).pop("storage", None)

    def lend_to(self, cache: Any) -> None:
        """An empty dynamic cache becomes the storage's. It stays the object that its maker may
        hold, with what that has put into it, and whose end can be told from the storage's."""
        mine, had = vars(self.cache), vars(cache)
        for name in mine.keys() - self.cache.names:  # of who held it before
            del mine[name]
        mine.update((name, value) for name, value in had.items() if name not in mine)
        mine.update(served=False, has_kinds=bool(had["layers"]), is_taken_out=False)
        cache.__class__, cache.__dict__ = type(self.cache), mine

    def forget_others(self, cache: Any, model_is: Optional[Tuple]) -> None:
        """What was recorded with tensors that the cache has no more, or of another state of the
        model."""
        if not self.has(cache):
            self.forget()
            layers = vars(cache)["layers"]
            self.read = [*map(_keys_of, layers), *map(_values_of, layers)]
        if self.model_was is not model_is:
            self.forget()
            self.model_was = model_is

    def record(
        self,
        forward: Callable[..., Any],
        model: nn.Module,
        cache: Any,
        cache_name: str,
        kwargs: Dict[str, Any],
        prompts: Optional[Tuple[Dict[Any, Any], Optional[Dict[str, Any]]]] = None,
    ) -> Union[RecordedStep, str]:
        """A call of ``forward`` with these arguments and the cache recorded, or why it cannot be.

        prompts: it is one, and these have been recorded; and the arguments of the longest that may
        be. Their graphs share memory, of which the first takes as much as that one: had each longer
        one to take its own, they would have all that they need in sum.
        """
        for name, module in model.named_modules():
            if is_called(module) and module is not model:
                return f"{name} has a hook, which a replayed step would not call"
        if model.device.type == "cpu" and is_divided(model):
            return "a step recorded on a CPU would not exchange with other processes"
        # With the storage's own cache: what is recorded outlives the one that was lent.
        lasting = cache if self.cache is None else self.cache
        beside = None
        if prompts is not None:
            beside = [step for step in prompts[0].values() if isinstance(step, RecordedStep)]
        states = States(model)
        record = functools.partial(RecordedStep, forward, model, lasting, cache_name)
        try:
            if beside == [] and prompts[1] is not None and model.device.type != "cpu":
                with contextlib.suppress(Exception):  # there is not so much memory, say
                    beside = [record(prompts[1], [])]
                states.put_back()
                lasting.idle = True  # as before: a prompt's code asks for its length
            step = record(kwargs, beside)
        except Exception as error:  # what cannot be recorded says so in many ways
            states.put_back()
            step = (
                self._record_with_mask(record, model, lasting, kwargs) if prompts is None else None
            )
            if step is None:
                states.put_back()
                return f"it cannot be recorded: {first_line(error)}"
        kept = next(states.changed(), None)
        if kept is not None:
            states.put_back()
            return f"{kept[0] or 'the model'} keeps a {kept[1]} from step to step in itself"
        return step

    def _record_with_mask(
        self, record: Callable[..., Any], model: nn.Module, cache: Any, kwargs: Dict[str, Any]
    ) -> Optional[RecordedStep]:
        """A step whose code looks whether its tokens are padding, or makes a mask as long as the
        host says, where nobody gives it one. None: it cannot be recorded with one either."""
        takes = "attention_mask" in inspect.signature(type(model).forward).parameters
        if not hasattr(cache, "grow") or not takes or kwargs.get("attention_mask") is not None:
            return None
        cache.asks_mask = True
        try:
            return record(kwargs, None)
        except Exception:  # the first says more
            cache.asks_mask = False
            return None

    def has(self, cache: Any) -> bool:
        """Whether the steps were recorded with a cache's tensors. A step asks it of all layers, so
        that the loop over them is not Python's."""
        layers = vars(cache)["layers"]
        now = chain(map(_keys_of, layers), map(_values_of, layers))
        return 2 * len(layers) == len(self.read) and all(map(operator.is_, now, self.read))

    def forget(self) -> None:
        self.steps.clear()
        self.prompts.clear()
        self.last = None
        self.choose_apart = False


class FreeStorages:
    """Those that no answer holds, for answers to come. The last one was held last."""

    def __init__(self) -> None:
        self.storages: List[Storage] = []

    def take(self, batch: int, tokens: int, device: torch.device) -> Optional[Storage]:
        """One that serves such an answer; None: none does, and those for as many sequences end."""
        for storage in reversed(self.storages):
            if storage.serves(batch, tokens, device):
                self.storages.remove(storage)
                return storage
        self._keep([s for s in self.storages if s.cache.batch != batch])
        return None

    def give(self, storage: Storage) -> None:
        if storage.cache.batch is None:  # its prompt failed: nobody has written to it
            storage.end()
        else:
            self.storages.append(storage)

    def make_way(self, tokens: int, model: nn.Module) -> None:
        """For a new one with room for so many tokens of all sequences. Those that were held last
        stay, if with it they have no more than half of the model's bytes, and of what its GPU has
        for them."""
        sizes = [storage.cache.nbytes for storage in self.storages]
        if not sizes:
            return
        most = sum(tensor.nbytes for tensor in tensors_of(model)) // 2
        if model.device.type == "cuda":
            unused, _ = torch.cuda.mem_get_info(model.device)
            unused += torch.cuda.memory_reserved(model.device)
            unused -= torch.cuda.memory_allocated(model.device)
            most = min(most, (unused + sum(sizes)) // 2)
        last = self.storages[-1].cache
        bytes_wanted = sizes[-1] * tokens // (last.batch * last.room)
        # From each on: how much it has with those behind it and the new one.
        sums = [bytes_wanted + sum(sizes[i:]) for i in range(len(sizes))]
        self._keep([s for s, bytes_then in zip(self.storages, sums) if bytes_then <= most])

    def clear(self) -> None:
        self._keep([])

    def _keep(self, storages: List[Storage]) -> None:
        ended = [storage for storage in self.storages if storage not in storages]
        self.storages = storages
        for storage in ended:
            storage.end()


def make_ready(cache: Any, rows: int) -> None:
    """Has a growing cache have room for some more tokens, and a place for recorded steps."""
    if "storage" not in vars(cache):  # a copy of one of ours
        cache.storage = Storage(None)
    if not cache.idle:  # it was written to behind our back, or a call was cut off
        cache.tokens, cache.idle = int(cache.length), True
    if cache.tokens + rows > cache.room:
        cache.grow(cache.tokens + rows)


def name_of_cache(kwargs: Dict[str, Any]) -> Optional[str]:
    """Of a call's arguments the one that is a cache."""
    for name in NAMES_OF_CACHE:
        if kwargs.get(name) is not None:
            return name
    return None


def wants_mask(cache: Any, kwargs: Dict[str, Any]) -> bool:
    """Whether a step without a mask is to have one, to be recorded."""
    alone = getattr(cache, "asks_mask", False) and kwargs.get("attention_mask") is None
    return alone and (shape_of_tokens(kwargs) or (0, 0))[1] == 1


def with_padded_mask(kwargs: Dict[str, Any], device: torch.device) -> Dict[str, Any]:
    """A call's arguments, its mask of padding with a column for each row of a growing cache, and if
    it has none one of no padding: for models that make biases as long as their mask, or else of as
    many tokens as the host knows of."""
    cache, mask = kwargs.get(name_of_cache(kwargs) or ""), kwargs.get("attention_mask")
    shape = shape_of_tokens(kwargs)
    if not hasattr(cache, "grow"):
        return kwargs
    if mask is None and shape is not None:
        # Of the length, which in a recorded step the device alone knows.
        end = cache.length.to(device) + shape[1]
        mask = (torch.arange(cache.room, device=device) < end).long().expand(shape[0], -1)
        return {**kwargs, "attention_mask": mask}
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return kwargs
    more = max(0, cache.room - mask.shape[1])
    return {**kwargs, "attention_mask": nn.functional.pad(mask, (0, more))}


def autocast_dtype(device: torch.device) -> Optional[torch.dtype]:
    """What says of which type keys and values of the same model are."""
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None
