"""Training: the layers are for inference, so there the model's own forward runs."""

import functools
from typing import Any, Callable

import torch
from torch import nn


def for_inference(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that leaves a module in training mode to the module's own."""

    @functools.wraps(forward)
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return either
