"""What a call's arguments say of whether, and how, it may be a recorded step."""

import sys
from typing import Any, Dict, Optional, Tuple

import torch


def shape_of_tokens(kwargs: Dict[str, Any]) -> Optional[Tuple[int, int]]:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), torch.Tensor):
            return kwargs[name].shape[:2]
    return None


def has_gaps(mask: Any) -> bool:
    """Whether padding lies behind a token: a recorded step, which cannot be asked, would stop at
    it."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return False
    real = mask != 0
    return bool(((real.cumsum(1) > 0) & ~real).any())


def is_unwritten(cache: Any) -> bool:
    """A dynamic cache, of generate's or the caller's, that nobody has written to yet."""
    return (
        type(cache).__name__ == "DynamicCache"
        and not getattr(cache, "offloading", False)
        and not any(getattr(layer, "is_initialized", False) for layer in cache.layers)
        and not any(_has_states(layer) for layer in cache.layers)
    )


def _has_states(layer: Any) -> bool:
    """Whether a layer that keeps states of all tokens has some, or is to take tokens back."""
    if not hasattr(layer, "conv_states"):
        return False
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return layer.record_past or any(each is not None for each in states)


def stays_in_place(cache: Any) -> bool:
    """Whether a cache of the caller's keeps its tensors, and all that it counts in them."""
    theirs = sys.modules["transformers.cache_utils"]
    return isinstance(cache, theirs.StaticCache) and all(
        isinstance(layer, theirs.StaticLayer)
        and not isinstance(layer, theirs.StaticSlidingWindowLayer)  # counts on the host
        and not hasattr(layer, "conv_states")
        for layer in cache.layers
    )


class Unread:
    """Stands for an argument that no graph can be given while a step is recorded. A forward may
    hand it on, as transformers does with a tokenizer; one that asks it anything is not recorded."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "name", name)


def _is_read(self: Unread, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"the model reads {object.__getattribute__(self, 'name')}")


for _name in (
    "__getattribute__", "__setattr__", "__bool__", "__call__", "__contains__", "__eq__",
    "__getitem__", "__hash__", "__iter__", "__len__", "__repr__", "__str__",
):  # fmt: skip
    setattr(Unread, _name, _is_read)


def can_be_given(value: Any, device: torch.device) -> bool:
    if isinstance(value, dict):
        return all(v is None or can_be_given(v, device) for v in value.values())
    if isinstance(value, torch.Tensor):
        return value.device == device
    return value is None or isinstance(value, (bool, int, float, str))
