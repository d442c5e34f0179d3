"""Gated activations as modules, by the names of the Hub's ``activation`` package.

In the place of a model's own module they leave training to it, as all layers do. One that is made
by itself, ``SiluAndMul()``, computes by the definition in ``reference`` there, whose gradient torch
has.
"""

from typing import Any, Optional

import torch
from torch import nn

from .. import reference
from ..functional import swiglu
from ..functional.gradients import needs_gradient
from .training import without_weights


class SiluAndMul(nn.Module):
    has_backward = False
    can_torch_compile = True

    @without_weights
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _swiglu(self, x)


class MulAndSilu(nn.Module):
    has_backward = False
    can_torch_compile = True

    @without_weights
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = x.chunk(2, -1)
        return _swiglu(self, gate, up)


class GeluAndMul(nn.Module):
    has_backward = False
    can_torch_compile = True

    @without_weights
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _swiglu(self, x, activation="gelu")


class GeluTanhAndMul(nn.Module):
    has_backward = False
    can_torch_compile = True

    @without_weights
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _swiglu(self, x, activation="gelu_tanh")


def _swiglu(
    module: nn.Module, x: torch.Tensor, up: Optional[torch.Tensor] = None, **activation: Any
) -> torch.Tensor:
    trains = module.training and needs_gradient(x)
    return (reference.swiglu if trains else swiglu)(x, up, **activation)
