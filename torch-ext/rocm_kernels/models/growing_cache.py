"""A cache of keys and values whose tensors stay where they are from step to step, and grow.

transformers has a static cache, which a graph can be recorded with and which cannot grow, and a
dynamic one, which makes new tensors at each step. A decode step that is recorded once needs the
first, and ``generate`` makes the second where nobody says how long the answer may be. This one has
room for some more tokens than it holds; when they are used up it moves into twice the room, and
what was recorded with the old tensors is recorded again. Who runs a model must know of the room: in
other hands it becomes a dynamic one.
"""

import contextlib
import copy
import copyreg
import functools
import importlib
from typing import Any, Callable, Dict, Iterator, Optional, Set, Tuple

import torch

from .attention import widened
from .attention_traits import PLAIN
from .cache import Place, hold_in_fp8
from .held_layer import OF_STATES, HeldLayer

# What a forward asks of a cache before it reads or writes rows or states.
_OF_FORWARDS = (
    "get_mask_sizes", "update", "update_indexer", "get_conv_state", "update_conv_state",
    "get_recurrent_state", "update_recurrent_state",
)  # fmt: skip


class OtherRows(RuntimeError):
    """A layer keeps other rows than the model has tokens: an image's, or a prompt of its own."""


def growing_cache(model: torch.nn.Module, room: int, in_fp8: bool) -> Any:
    """An empty transformers ``Cache`` with room for as many tokens a sequence.

    Raises:
        NotImplementedError: a layer of the model keeps what is not known here, or none counts
            tokens.
    """
    cache = _classes()[0](model.config.get_text_config(decoder=True), room)
    if in_fp8:
        hold_in_fp8(cache, model)
    return cache


def room_for(config: Any, tokens: int, room: int) -> int:
    """The room of a cache that gets so many tokens: no more than a model has positions for, as long
    as they suffice. Some add biases to all rows of a cache, out of a table that is no longer."""
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    positions = next((most for most in named if isinstance(most, int)), 0)
    return max(tokens, min(room, positions) if tokens <= positions else room)


@functools.cache
def _classes() -> Tuple[type, type]:
    theirs = importlib.import_module("transformers.cache_utils")

    class GrowingCache(theirs.DynamicCache):
        """``length`` is how many tokens the device has in it; whoever runs the model keeps
        ``tokens`` equal to it, since reading it would wait for the device, and says by ``idle``
        that it is. A forward that is cut off makes it untrue.

        ``served`` is whether who runs the model now knows of the room behind the tokens. To a
        forward that does not, such as another model's, it becomes a dynamic cache."""

        is_compileable = False  # or generate would compile the step, and make masks for it

        def __init__(self, config: Any, room: int) -> None:
            kinds, options = theirs.get_layer_types_and_kwargs(config)
            # Windows too have all their keys: what a query sees is the mask's.
            known = dict.fromkeys(PLAIN, GrowingLayer)
            known["indexed_attention"] = GrowingIndexedLayer
            known["hybrid"] = HybridLayer
            rows = set(known)
            known.update(dict.fromkeys(("linear_attention", "conv", "mlp", "moe"), StatesLayer))
            if not set(kinds) <= known.keys():
                raise NotImplementedError(
                    f"layers must be of kinds that are known here ({', '.join(sorted(known))}), "
                    f"got {', '.join(sorted(set(kinds) - known.keys()))}"
                )
            if not rows & {*kinds}:
                raise NotImplementedError(
                    f"layers must count tokens, some of them ({', '.join(sorted(rows))}), got "
                    f"{', '.join(sorted({*kinds}))} alone"
                )
            given = zip(kinds, options)
            layers = [known[kind](room, **others) for kind, others in given]
            theirs.Cache.__init__(self, layers=layers)
            self.config = config
            self.tokens = 0
            self.idle = True
            self.positions = None
            self.first = None  # the layer, and of it what is written first in each forward
            self.rows = 0  # that the last forward has written
            self.written: Optional[Set[int]] = None  # layers, by this forward; None: no row yet
            self.length = _lasting(lambda: torch.zeros((), dtype=torch.int64, device="cpu"))
            self.served = True
            self.asks_mask = False  # of its steps: see Storage
            self.has_kinds = True  # as a dynamic one, layers of the model's kinds
            self.is_taken_out = False  # tensors of it, by who holds it: another answer writes them
            self.names = {*vars(self), "names", "storage"}  # others are its holder's

        @property
        def layers(self) -> Any:
            held = vars(self)["layers"]
            if self.served:
                return held
            return tuple(HeldLayer(self, i) for i in range(len(held)))

        @layers.setter
        def layers(self, layers: Any) -> None:
            if vars(self).get("served", True):
                vars(self)["layers"] = layers
            else:
                self.let_go()
                self.layers = layers

        @property
        def is_whole(self) -> bool:
            """Whether nobody, such as a hook, has put tensors of another size in its place."""
            return all(
                states.shape[0] == getattr(layer, "batch_size", states.shape[0])
                and states.shape[2] == layer.max_cache_len
                for layer in vars(self)["layers"]
                for states in layer.held().values()
            )

        @property
        def room(self) -> int:
            return vars(self)["layers"][0].max_cache_len

        @property
        def nbytes(self) -> int:
            """Of its keys and values, with the room behind them."""
            layers = vars(self)["layers"]
            return sum(s.nbytes for layer in layers for s in layer.held().values())

        @property
        def is_initialized(self) -> bool:
            """By which models tell a prompt: False again where another answer begins."""
            return super().is_initialized and not (self.idle and self.tokens == 0)

        @property
        def is_sliding(self) -> Any:
            """By which forwards choose the layer that they ask for the size of a mask."""
            if not self.served:
                self.let_go()
                return self.is_sliding
            return super().is_sliding

        def update(
            self,
            keys: torch.Tensor,
            values: torch.Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> Tuple[torch.Tensor, torch.Tensor]:
            self._begin(layer_idx, "keys", keys.shape[-2], keys.device)
            layer = self.layers[layer_idx]
            layer.cumulative_length, layer.positions = self.length, self.positions
            return layer.update(keys, values)

        def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
            rows = indexer_key_states.shape[1]
            self._begin(layer_idx, "indexer_keys", rows, indexer_key_states.device)
            self.layers[layer_idx].positions = self.positions
            return self.layers[layer_idx].update_indexer(indexer_key_states)

        def _begin(self, layer_idx: int, what: str, count: int, device: torch.device) -> None:
            """Once in each forward: all layers write at the same places."""
            self.idle = False
            if self.first is None:
                self.first = layer_idx, what
                self.length = _lasting(lambda: self.length.to(device))
            if (layer_idx, what) == self.first:
                if self.tokens + count > self.room:
                    raise OtherRows(f"it writes {count} rows where {self.room - self.tokens} are")
                self.rows = count
                if count == 1:
                    self.positions = self.length.clone()[None]
                else:
                    self.positions = torch.arange(count, device=device) + self.length
                self.length.add_(count)
                self.written = set()
            elif count != self.rows:
                raise OtherRows(f"layer {layer_idx} writes {count} rows, the first {self.rows}")
            if what == "keys" and self.written is not None:
                self.written.add(layer_idx)

        def place(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> Place:
            """Where another op may write keys and values ``[batch, rows, KV heads, D]``, in place
            of ``update``."""
            self._begin(layer_idx, "keys", keys.shape[1], keys.device)
            layer = self.layers[layer_idx]
            if not layer.is_initialized:
                layer.cumulative_length = self.length
                layer.lazy_initialization(keys.transpose(1, 2), values.transpose(1, 2))
            return Place.of(layer, self.positions)

        def get_seq_length(self, layer_idx: int = 0) -> Any:
            """What a dynamic cache says: a layer that this forward has yet to reach has the rows of
            those before."""
            layers = vars(self)["layers"]
            if layer_idx == 0:  # or the first that counts
                rows = (i for i, layer in enumerate(layers) if isinstance(layer, GrowingLayer))
                layer_idx = next(rows)
            if layer_idx >= len(layers) or not layers[layer_idx].is_initialized:
                return 0
            if self.idle or self.written is None or layer_idx in self.written:
                return self.tokens_held()
            return self.length - self.rows

        def tokens_held(self) -> Any:
            """Of the layer that has most."""
            return self.tokens if self.idle else self.length

        def __deepcopy__(self, memo: Any) -> Any:
            """Without what was recorded with the tensors of this one."""
            new = object.__new__(type(self))
            mine = {name: value for name, value in vars(self).items() if name != "storage"}
            new.__dict__ = copy.deepcopy(mine, memo)
            return new

        @property
        def batch(self) -> Optional[int]:
            """How many sequences it holds; None: nobody has written to it."""
            layer = vars(self)["layers"][self.first[0] if self.first else 0]
            return getattr(layer, "batch_size", None)

        def takes(self, layer_idx: int, dtype: torch.dtype) -> bool:
            """Whether a layer holds keys and values of a type, or in FP8, or none yet."""
            if not self.served:
                self.let_go()
                return False
            layer = self.layers[layer_idx]
            return not layer.is_initialized or layer.keys.dtype in (dtype, torch.uint8)

        def __iter__(self) -> Any:
            """What a dynamic cache gives: keys and values without the room behind them."""
            self.is_taken_out = True
            return self._tokens_of_layers()

        def _tokens_of_layers(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor, None]]:
            for layer in vars(self)["layers"]:
                keys, values = (s[:, :, : int(self.tokens_held())] for s in _states_of(layer))
                yield keys, values, None

        def __reduce_ex__(self, protocol: Any) -> Any:
            """It is pickled as a dynamic cache, which needs nothing of this package."""
            made = (theirs.DynamicCache, object, None)
            return copyreg._reconstructor, made, vars(self.as_dynamic())  # type: ignore[attr-defined]

        def as_dynamic(self) -> Any:
            layers = vars(self)["layers"]
            beside = any(isinstance(x, (GrowingIndexedLayer, WithStates)) for x in layers)
            new = theirs.DynamicCache(config=self.config if self.has_kinds or beside else None)
            held = vars(self).items()
            vars(new).update((name, value) for name, value in held if name not in self.names)
            if int(self.tokens_held()) == 0:
                return new
            for i, (keys, values, _) in enumerate(self._tokens_of_layers()):
                layer = layers[i]
                if "keys" in layer.held():
                    new.update(keys.clone(), values.clone(), i)
                choosing = vars(layer).get("indexer_keys")
                if choosing is not None:
                    tokens = int(self.tokens_held())
                    new.update_indexer(choosing[:, 0, :tokens].clone(), i)
                for name in OF_STATES if isinstance(layer, WithStates) else ():
                    setattr(new.layers[i], name, copy.deepcopy(getattr(layer, name)))
            return new

        def let_go(self) -> None:
            """Becomes a dynamic cache; its place is free for another answer."""
            new, storage = self.as_dynamic(), vars(self).get("storage")
            self.__class__, self.__dict__ = type(new), vars(new)
            if storage is not None and storage.give_back is not None:
                storage.give_back()

        def grow(self, tokens: int) -> None:
            """Has room for as many tokens, and for twice what there was, or all that may come."""
            room = room_for(self.config, tokens, max(tokens, 2 * self.room))
            for layer in vars(self)["layers"]:
                layer.grow(room, self.tokens)

        def crop(self, tokens_to_remove: int) -> None:
            # From 5.22 on, a negative number of tokens to remove; before, the length that is left.
            count = -tokens_to_remove if tokens_to_remove <= 0 else self.tokens - tokens_to_remove
            count = max(0, min(count, self.tokens))
            if count == 0:  # which generate asks for at each step, looking late
                return
            if not self.is_croppable:
                raise RuntimeError(
                    "layers must keep rows of tokens alone where tokens are taken back, and some "
                    "of these keep a state of all tokens"
                )
            self.tokens -= count
            self.length.sub_(count)

        def reset(self) -> None:
            self.begin_anew()
            if not self.served:
                self.let_go()  # other sequences may come, as many as like

        def begin_anew(self) -> None:
            self.tokens, self.idle = 0, True
            self.length.zero_()
            for layer in vars(self)["layers"]:
                layer.begin_anew()

        def reorder_cache(self, beam_idx: torch.Tensor) -> None:
            self._replace_rows(lambda states: states.index_select(0, beam_idx.to(states.device)))

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            self._replace_rows(lambda states: states[indices])

        def batch_repeat_interleave(self, repeats: int) -> None:
            self._replace_rows(lambda states: states.repeat_interleave(repeats, 0))

        def _replace_rows(self, change: Any) -> None:
            """The tensors stay, unless there are more or fewer sequences than before."""
            for layer in vars(self)["layers"]:
                layer.replace(change)

    class GrowingLayer(theirs.StaticLayer):
        grows = is_croppable = True
        positions = None

        def begin_anew(self) -> None:
            """Rows need not: a mask hides those of another answer."""

        def held(self) -> Dict[str, torch.Tensor]:
            """``[batch, heads, rows, D]`` by the name of each. One that shares another layer's keys
            and values may hold those to choose by alone."""
            names = ("keys", "values", "indexer_keys")
            return {n: vars(self)[n] for n in names if vars(self).get(n) is not None}

        def lazy_initialization(self, keys: torch.Tensor, values: torch.Tensor) -> None:
            length = self.cumulative_length
            # Not inference tensors: the next call may not be in inference mode.
            with torch.inference_mode(False):
                super().lazy_initialization(keys, values)
                if values.dtype != keys.dtype:  # under autocast keys are in float32
                    self.values = self.values.to(values.dtype)
            self.cumulative_length = length

        def update(
            self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            self.keys.index_copy_(2, self.positions, keys.to(self.keys.dtype))
            self.values.index_copy_(2, self.positions, values.to(self.values.dtype))
            return self.keys, self.values

        def grow(self, room: int, tokens: int) -> None:
            def larger(states: torch.Tensor) -> torch.Tensor:
                new = states.new_zeros((*states.shape[:2], room, states.shape[3]))
                new[:, :, :tokens].copy_(states[:, :, :tokens])
                return new

            self.max_cache_len = room
            vars(self).update(_lasting(lambda: {n: larger(old) for n, old in self.held().items()}))

        def replace(self, change: Any) -> None:
            for name, old in self.held().items():
                setattr(self, name, _changed(old, change))
                self.batch_size = vars(self)[name].shape[0]

    class GrowingIndexedLayer(GrowingLayer):
        """Also keeps a key of each token by which others are chosen."""

        indexer_keys: Optional[torch.Tensor] = None

        def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
            states = indexer_key_states[:, None]
            if self.indexer_keys is None:
                shape = (states.shape[0], 1, self.max_cache_len, states.shape[3])
                self.indexer_keys = _lasting(lambda: states.new_zeros(shape))
            self.indexer_keys.index_copy_(2, self.positions, states)
            return self.indexer_keys[:, 0]

    class WithStates(theirs.LinearAttentionLayer):
        """Keeps states of all tokens so far, which do not grow: of convolutions and recurrences."""

        is_croppable = False

        def _tables(self) -> Tuple[Dict[int, Any], Dict[int, Any]]:
            return self.conv_states, self.recurrent_states

        def lazy_initialization(self, **given: Any) -> None:
            _lasting(lambda: theirs.LinearAttentionLayer.lazy_initialization(self, **given))

        def begin_anew(self) -> None:
            theirs.LinearAttentionLayer.reset(self)

        def replace(self, change: Any) -> None:
            for table in self._tables():
                for i, old in table.items():
                    if old is not None:
                        table[i] = _changed(old, change)

    class StatesLayer(WithStates):
        is_initialized = False  # with rows of tokens

        def __init__(self, room: int, **options: Any) -> None:
            super().__init__(**options)
            self.max_cache_len = room

        @property
        def keys(self) -> Any:
            """What tells whether a recorded step knows where they lie."""
            states = (each for table in self._tables() for each in table.values())
            return next((each for each in states if each is not None), None)

        @property
        def values(self) -> Any:
            states = [each for table in self._tables() for each in table.values()]
            return next((each for each in states[::-1] if each is not None), None)

        def held(self) -> Dict[str, torch.Tensor]:
            return {}

        def grow(self, room: int, tokens: int) -> None:
            self.max_cache_len = room

    class HybridLayer(WithStates, GrowingLayer):
        def __init__(self, room: int, **options: Any) -> None:
            GrowingLayer.__init__(self, room)
            WithStates.__init__(self, **options)

        def lazy_initialization(self, *rows: torch.Tensor, **given: Any) -> None:
            if rows:
                GrowingLayer.lazy_initialization(self, *rows)
            else:
                WithStates.lazy_initialization(self, **given)

        def replace(self, change: Any) -> None:
            GrowingLayer.replace(self, change)
            WithStates.replace(self, change)

    for name in _OF_FORWARDS:
        setattr(GrowingCache, name, _if_served(getattr(GrowingCache, name)))
    return GrowingCache, GrowingLayer


def _if_served(method: Callable[..., Any]) -> Callable[..., Any]:
    """A growing cache's method, or where a forward calls it that does not know of the room, the
    method of the dynamic cache that it becomes."""

    @functools.wraps(method)
    def called(cache: Any, *args: Any, **kwargs: Any) -> Any:
        if cache.served:
            return method(cache, *args, **kwargs)
        cache.let_go()
        return getattr(cache, method.__name__)(*args, **kwargs)

    return called


@contextlib.contextmanager
def serving(cache: Any) -> Iterator[None]:
    """Within, a forward knows that a cache has room behind its tokens, if it grows."""
    if not hasattr(cache, "grow"):
        yield
        return
    before, cache.served = cache.served, True
    cache.written = None
    try:
        yield
    finally:
        cache.served = before


def _states_of(layer: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values; those in FP8 as the numbers that they mean."""
    if not layer.is_initialized:
        return (torch.empty(0, 0, 0, dtype=torch.float32, device="cpu"),) * 2
    if not hasattr(layer, "fp8_dtype"):
        return layer.keys, layer.values
    return tuple(
        widened(states.view(layer.fp8_dtype), scale, torch.bfloat16)
        for states, scale in zip((layer.keys, layer.values), layer.scales)
    )


def _changed(old: torch.Tensor, change: Any) -> torch.Tensor:
    """Where it was, unless there are more or fewer sequences than before."""
    new = _lasting(lambda: change(old))
    return old.copy_(new) if new.shape == old.shape else new


def _lasting(make: Any) -> Any:
    """What ``make`` gives, no inference tensor."""
    with torch.inference_mode(False), torch.no_grad():
        return make()
