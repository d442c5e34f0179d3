"""``Plan``: decides which linears or experts are converted, and tries the conversion, before
anything in the model changes."""

import fnmatch
from typing import Any, Dict, Optional, Sequence

import torch
from torch import nn

from .hooks import move_hooks


class Plan:
    """A subclass says what is converted, and how; it tries that in :meth:`rehearse`.

    Args:
        activations: as ``quantize_model_`` was asked.
        skip: patterns of names that stay as they are.
        fp8_dtype: the weights' dialect; None: that of the device they are on.
    """

    def __init__(
        self,
        model: nn.Module,
        activations: Optional[str],
        skip: Sequence[str],
        fp8_dtype: Optional[torch.dtype],
    ) -> None:
        self.model, self.activations, self.fp8_dtype = model, activations, fp8_dtype
        self._skip = skip

    def is_skipped(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._skip)

    def rehearse(self) -> None:
        """Converts a row of each weight, and the largest module whole: an error is raised before
        anything has been changed. Keeping each 16-bit weight until the end would be safer still,
        and take half as much memory again."""
        sources = self._sources()
        for name, source in sources.items():
            try:
                self._convert_a_row(source)
            except Exception as failure:
                raise RuntimeError(
                    f"{name} cannot be quantised, and the model is as it was: {failure}; "
                    f"skip=[{name!r}] leaves it alone"
                ) from failure
        if sources:
            self._convert(max(sources.values(), key=self._size))

    def perform(self) -> None:
        raise NotImplementedError

    def _sources(self) -> Dict[str, Any]:
        """What is converted, by name of its module."""
        raise NotImplementedError

    def _convert_a_row(self, source: Any) -> None:
        raise NotImplementedError

    def _convert(self, source: Any) -> Any:
        raise NotImplementedError

    def _size(self, source: Any) -> int:
        raise NotImplementedError


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module in another's place wherever that one is: it may be shared."""
    move_hooks(old, new)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
