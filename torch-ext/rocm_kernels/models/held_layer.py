"""A growing cache's layers as who holds the cache sees them: without the room behind the tokens."""

from typing import Any

OF_STATES = (
    "conv_states", "recurrent_states", "is_conv_states_initialized",
    "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size",
)  # fmt: skip
# By which a cache's holder may change a layer, and the tensors that may be put in others' places.
_OF_HOLDERS = (
    "update", "update_indexer", "crop", "reset", "lazy_initialization", "reorder_cache",
    "batch_repeat_interleave", "batch_select_indices",
)  # fmt: skip
_TENSORS = ("keys", "values", "indexer_keys", *OF_STATES)


class HeldLayer:
    """One of them: its keys and values are those of the tokens. Where others are put in their
    place, the cache becomes a dynamic one first."""

    __slots__ = ("_cache", "_index")

    def __init__(self, cache: Any, index: int) -> None:
        object.__setattr__(self, "_cache", cache)
        object.__setattr__(self, "_index", index)

    @property
    def __class__(self) -> type:
        return type(vars(self._cache)["layers"][self._index])

    def __getattr__(self, name: str) -> Any:
        if name in _OF_HOLDERS and hasattr(self._cache, "grow"):
            self._cache.let_go()
        layer = vars(self._cache)["layers"][self._index]
        if not hasattr(self._cache, "grow") or name not in layer.held():
            return getattr(layer, name)
        self._cache.is_taken_out = True
        rows = layer.held()[name][:, :, : int(self._cache.tokens_held())]
        return rows[:, 0] if name == "indexer_keys" else rows

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TENSORS and hasattr(self._cache, "grow"):
            self._cache.let_go()
        setattr(vars(self._cache)["layers"][self._index], name, value)
