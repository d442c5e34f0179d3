"""Training: the layers are for inference, so there the model's own forward runs."""

import functools
from typing import Any, Callable

import torch
from torch import nn

from ..functional.gradients import needs_gradient


def for_inference(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that leaves a module in training mode to the module's own.

    Under no_grad, where nothing trains, the layer runs. So reentrant checkpointing, whose first
    pass is under no_grad, takes its values from the layer and its gradients from the module's own
    forward; checkpointing with ``use_reentrant=False`` takes both from the latter.
    """

    @functools.wraps(forward)
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return either


def without_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a layer of one input and nothing else: what wants no gradient is no training.

    Made by itself it has no other forward: then ``forward`` runs, whatever is wanted.
    """

    @functools.wraps(forward)
    def either(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        own = type(self).forward
        if self.training and own is not either and needs_gradient(x):
            return own(self, x)
        return forward(self, x)

    return either
