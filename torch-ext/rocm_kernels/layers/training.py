"""Prepares a call of a layer. In training mode the model's own forward runs, because the layers are
for inference; keyword arguments follow the names of the model's own forward."""

import functools
import inspect
from typing import Any, Callable, Dict, Tuple

import torch
from torch import nn

from ..functional.gradients import needs_gradient


def for_inference(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that leaves a module in training mode to the module's own.

    Under no_grad, where nothing trains, the layer runs. So reentrant checkpointing, whose first
    pass is under no_grad, takes its values from the layer and its gradients from the module's own
    forward; checkpointing with ``use_reentrant=False`` takes both from the latter.
    """

    names = _parameters(forward)

    @functools.wraps(forward)
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **_renamed(self, kwargs, names))

    return either


def without_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a layer of one input and nothing else: what wants no gradient is no training.

    Made by itself it has no other forward: then ``forward`` runs, whatever is wanted.
    """

    names = _parameters(forward)

    @functools.wraps(forward)
    def either(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        own = type(self).forward
        if self.training and own is not either and needs_gradient(*args, *kwargs.values()):
            return own(self, *args, **kwargs)
        return forward(self, *args, **_renamed(self, kwargs, names))

    return either


def _renamed(module: nn.Module, kwargs: Dict[str, Any], names: Tuple[str, ...]) -> Dict[str, Any]:
    """Keywords of the module's own forward by the names that the layer has in the same places."""
    if all(name in names for name in kwargs):
        return kwargs
    own = dict(zip(_parameters_of(type(module)), names))
    return {own.get(name, name): value for name, value in kwargs.items()}


@torch.compiler.assume_constant_result
def _parameters_of(cls: type) -> Tuple[str, ...]:
    return _parameters(cls.forward)


def _parameters(forward: Callable[..., Any]) -> Tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
