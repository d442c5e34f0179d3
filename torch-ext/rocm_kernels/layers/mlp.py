"""Kernel layers of gated MLPs."""

from typing import Callable, Optional, Tuple, Union

import torch
from torch import nn

from ..functional import quantize_fp8, swiglu, swiglu_fp8
from ..functional.activation import gated
from ..functional.product import gated_linear, joined_rows
from ..models.families import ACTIVATIONS, LLAMA, Family
from ..models.fuse import has_fused
from ..models.hooks import is_unseen, runs_unseen
from ..models.linear import FP8Linear, Projected, Quantized
from .linear import apply, is_fp8, is_plain, is_weight_only, needs_whole_rows, quantization
from .training import for_inference


class SwiGLUMLP(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, Projected):
            return _gated_mlp(x, self)
        if not all(map(runs_unseen, self.children())):  # they see what its own forward gives
            return type(self).forward(self, x)
        if x.dim() == 2:
            return _gated_mlp(x, self)
        out = _gated_mlp(x.reshape(-1, x.shape[-1]), self)
        return out.view(*x.shape[:-1], out.shape[-1])


def _gated_mlp(x: Union[torch.Tensor, Projected], mlp: nn.Module) -> torch.Tensor:
    family = getattr(mlp, "kernel_family", LLAMA)
    gate, up = _gate_and_up(x, mlp, family)
    act_fn, down = getattr(mlp, family.activation), getattr(mlp, family.down)
    activation = ACTIVATIONS.get(type(act_fn).__name__)
    if activation is None:
        return down(gated(act_fn, gate, up))
    apart = not is_fp8(down) or is_weight_only(down) or needs_whole_rows(down)
    if apart or not is_unseen(down):
        return down(swiglu(gate, up, activation=activation))
    q, scale = swiglu_fp8(gate, up, activation=activation, **quantization(down))
    return apply(down, Quantized(q, scale, x.dtype))


def gated_product(
    mlp: nn.Module, family: Family, x: torch.Tensor
) -> Optional[Callable[[Quantized], torch.Tensor]]:
    """For rows as x's: what makes the input of an MLP's down projection of the quantised one of its
    gate and up projection, in that product's kernel; its result is float32, which down quantises in
    its own. None where a kernel between the two does that sooner, or somebody would see less.

    Both are projections of ours, which nobody sees run.
    """
    gate_up, down = getattr(mlp, family.gate_up.name), getattr(mlp, family.down)
    activation = ACTIVATIONS.get(type(getattr(mlp, family.activation)).__name__)
    if type(gate_up) is not FP8Linear or type(down) is not FP8Linear or activation is None:
        return None
    gated = joined_rows(gate_up.weight, gate_up.weight_scale_inv)[1]
    quantized = joined_rows(down.weight, down.weight_scale_inv)[0]
    divided = gate_up.process_group is not None or down.process_group is not None
    in_16_bits = x.dtype in (torch.bfloat16, torch.float16)
    if not 0 < x.shape[0] <= min(gated, quantized) or divided or not in_16_bits:
        return None
    if is_weight_only(gate_up) or not is_plain(down):
        return None

    def gate(normed: Quantized) -> torch.Tensor:
        return gated_linear(
            normed.q, gate_up.weight, gate_up.weight_scale_inv, normed.scale,
            bias=gate_up.bias, activation=activation, dtype=normed.dtype,
        )  # fmt: skip

    return gate


def _gate_and_up(
    x: Union[torch.Tensor, Projected], mlp: nn.Module, family: Family
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Both projections of an MLP; the decoder layer may have made them already."""
    if isinstance(x, Projected):
        return x.result.chunk(2, -1)
    if has_fused(mlp, family.gate_up) or not family.gate_up.parts:
        return getattr(mlp, family.gate_up.name)(x).chunk(2, -1)
    gate, up = [getattr(mlp, name) for name in family.gate_up.of(mlp)]
    alike = is_fp8(gate) and is_fp8(up) and gate.activation_scheme == "dynamic"
    alike = alike and quantization(gate) == quantization(up)
    if not alike or not is_unseen(gate) or not is_unseen(up):
        return gate(x), up(x)
    quantized = Quantized(*quantize_fp8(x, **quantization(gate)), x.dtype)
    return apply(gate, quantized), apply(up, quantized)
