"""Gated activations as modules, by the names of the Hub's ``activation`` package."""

import torch
from torch import nn

from ..functional import swiglu


class SiluAndMul(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x)


class MulAndSilu(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = x.chunk(2, -1)
        return swiglu(gate, up)


class GeluAndMul(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x, activation="gelu")


class GeluTanhAndMul(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x, activation="gelu_tanh")
