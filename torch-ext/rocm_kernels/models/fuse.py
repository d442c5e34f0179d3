"""Fusing: projections that share an input become one."""

from typing import Dict, Tuple

import torch
from torch import nn

from .families import BY_DECODER, BY_MLP, Join
from .linear import FP8Linear, FP8LinearPart


def fuse_projections(model: nn.Module) -> Dict[str, Tuple[str, ...]]:
    """Joins what the families of the model's modules say; returns what became of which."""
    fused: Dict[str, Tuple[str, ...]] = {}
    for name, module in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        if family := BY_MLP.get(type(module).__name__):
            fused.update(_join(module, prefix, family.gate_up))
        elif family := BY_DECODER.get(type(module).__name__):
            attention = getattr(module, family.attention)
            fused.update(_join(attention, f"{prefix}{family.attention}.", family.qkv))
    return fused


def has_fused(parent: nn.Module, join: Join) -> bool:
    """Whether ``parent`` has one linear for all parts, which takes a ``Projected``."""
    return isinstance(getattr(parent, join.name, None), FP8Linear)


def _join(parent: nn.Module, prefix: str, join: Join) -> Dict[str, Tuple[str, ...]]:
    """Gives ``parent`` one linear for all parts, unless they are one or do not fit together."""
    if not join.parts:
        return {}
    linears = {part: getattr(parent, part, None) for part in join.parts}
    if not all(isinstance(linear, FP8Linear) for linear in linears.values()):
        return {}
    first = linears[join.parts[0]]
    biases = [linear.bias for linear in linears.values()]
    if len({bias is None for bias in biases}) > 1:
        return {}
    fused = FP8Linear(
        torch.cat([linear.weight for linear in linears.values()]),
        torch.cat([linear.weight_scale_inv for linear in linears.values()]),
        None if first.bias is None else nn.Parameter(torch.cat(biases).detach()),
        first.activation_scheme,
    )
    setattr(parent, join.name, fused)
    start = 0
    for part, linear in linears.items():
        setattr(parent, part, FP8LinearPart(fused, start, start + linear.out_features))
        start += linear.out_features
    return {prefix + join.name: tuple(prefix + part for part in join.parts)}
