"""Gated MLPs."""

from typing import Tuple, Union

import torch
from torch import nn

from ..functional import quantize_fp8, swiglu, swiglu_fp8
from ..functional.activation import gated
from ..models.families import ACTIVATIONS, LLAMA, Family
from ..models.linear import Projected
from .linear import is_fp8, is_weight_only, linear, product, quantization


class SwiGLUMLP(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        family = getattr(self, "kernel_family", LLAMA)
        gate, up = _gate_and_up(x, self, family)
        act_fn, down = getattr(self, family.activation), getattr(self, family.down)
        activation = ACTIVATIONS.get(type(act_fn).__name__)
        if activation is None:
            return down(gated(act_fn, gate, up))
        if not is_fp8(down) or is_weight_only(down):
            return down(swiglu(gate, up, activation=activation))
        q, scale = swiglu_fp8(gate, up, activation=activation, **quantization(down))
        return product(q, scale, down, x.dtype)


def _gate_and_up(
    x: Union[torch.Tensor, Projected], mlp: nn.Module, family: Family
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Both projections of an MLP; the decoder layer may have made them already."""
    if isinstance(x, Projected):
        return x.result.chunk(2, -1)
    if family.gate_up.name in mlp._modules:
        return linear(x, getattr(mlp, family.gate_up.name)).chunk(2, -1)
    gate, up = [getattr(mlp, name) for name in family.gate_up.parts]
    if not (is_fp8(gate) and is_fp8(up)) or gate.activation_scheme != "dynamic":
        return gate(x), up(x)
    q, scale = quantize_fp8(x, **quantization(gate))
    return product(q, scale, gate, x.dtype), product(q, scale, up, x.dtype)
