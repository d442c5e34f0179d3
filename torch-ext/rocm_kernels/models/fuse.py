"""Joins projections that share an input into one weight."""

from typing import Dict, List, Optional, Tuple

import torch
from torch import nn

from ..functional import SCALE_BLOCK
from .families import BY_DECODER, Join
from .hooks import is_hooked, is_unseen, move_hooks
from .linear import FP8Linear, FP8LinearPart


def fuse_projections(model: nn.Module) -> Dict[str, Tuple[str, ...]]:
    """Joins what the families of the model's modules say; returns what became of which. Of an MLP
    that computes something else, by the name of a family, nothing is joined."""
    fused: Dict[str, Tuple[str, ...]] = {}
    for name, module in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        family = vars(module).get("kernel_family")
        if is_gated_mlp(module):
            fused.update(_join(module, prefix, family.gate_up))
        elif family is not None and hasattr(module, "kernel_attention"):
            fused.update(_join(module, prefix, family.qkv))
        elif family := family or BY_DECODER.get(type(module).__name__):
            attention = module._modules.get(family.attention)
            if attention is not None and family.qkv is not None:
                fused.update(_join(attention, f"{prefix}{family.attention}.", family.qkv))
    return fused


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether it has been asked, and is one: decoder layers and attentions have families too."""
    facts = vars(module)
    return "kernel_family" in facts and not {"kernel_call", "kernel_attention"} & facts.keys()


def has_fused(parent: nn.Module, join: Optional[Join]) -> bool:
    """Whether ``parent`` has one linear for all parts, which takes a ``Projected``, as it is now:
    an adapter may have come between, or a hook that wants to see each part."""
    if join is None or not isinstance(parent._modules.get(join.name), FP8Linear):
        return False
    return all(
        type(linear) in (FP8LinearPart, FP8Linear) and is_unseen(linear)
        for linear in (parent._modules[name] for name in join.of(parent))
    )


def why_not_fused(parent: nn.Module, join: Join) -> Optional[str]:
    """Why :func:`has_fused` is false; None: it is true."""
    if has_fused(parent, join):
        return None
    names = join.of(parent)
    for name in names:
        linear = parent._modules.get(name)
        if linear is None:
            return f"{name} is missing"
        if type(linear) not in (FP8LinearPart, FP8Linear):
            return f"{name} is a {type(linear).__name__}"
        if not is_unseen(linear):
            return f"{name} has a hook"
    return f"{', '.join(names)} are not joined"


def _join(parent: nn.Module, prefix: str, join: Join) -> Dict[str, Tuple[str, ...]]:
    """Gives ``parent`` one linear for all parts, unless they are one or do not fit together."""
    if not join.parts or join.name in parent._modules:
        return {}
    names = join.of(parent)
    linears = [parent._modules.get(name) for name in names]
    joined = _joined(linears)
    if joined is None:
        return {}
    joined.joins = tuple(names)
    setattr(parent, join.name, joined)
    start = 0
    for name, linear in zip(names, linears):
        part = FP8LinearPart(joined, start, start + linear.out_features)
        move_hooks(linear, part)  # hooks of its backward; those of a forward keep it apart
        setattr(parent, name, part)
        start += linear.out_features
    return {prefix + join.name: tuple(prefix + name for name in names)}


def _joined(linears: List[Optional[nn.Module]]) -> Optional[FP8Linear]:
    """One linear for several of the same input; None: their scales, biases or hooks forbid it."""
    if not all(type(linear) is FP8Linear and not is_hooked(linear) for linear in linears):
        return None
    first = linears[0]
    alike = {
        (
            linear.bias is None,
            linear.activation_scheme,
            linear.scale_ub,
            linear.scale_fmt,
            linear.process_group,
            linear.weight.device,
            linear.weight.dtype,
            None if linear.activation_scale is None else linear.activation_scale.item(),
        )
        for linear in linears
    }
    scale = _joined_scale(linears)
    if len(alike) > 1 or scale is None:
        return None
    bias = None
    if first.bias is not None:
        bias = nn.Parameter(torch.cat([linear.bias for linear in linears]).detach())
        bias.requires_grad_(first.bias.requires_grad)
    joined = FP8Linear(
        torch.cat([linear.weight for linear in linears]),
        scale,
        bias,
        first.activation_scheme,
        activation_scale=first.activation_scale,
        scale_ub=first.scale_ub,
        scale_fmt=first.scale_fmt,
        process_group=first.process_group,
    )
    joined.is_shard = first.is_shard
    joined.train(first.training)
    return joined


def _joined_scale(linears: List[nn.Module]) -> Optional[torch.Tensor]:
    """Scales by block join where each block lies in one linear; one scale a tensor becomes one a
    row, unless it is the same for all."""
    scales = [linear.weight_scale_inv for linear in linears]
    blocks = [scale.dim() == 2 and scale.shape[1] > 1 for scale in scales]
    if any(blocks):
        whole = all(linear.out_features % SCALE_BLOCK == 0 for linear in linears[:-1])
        return torch.cat(scales) if all(blocks) and whole else None
    if all(scale.numel() == 1 and torch.equal(scale, scales[0]) for scale in scales):
        return scales[0].detach()
    rows = [s.reshape(-1, 1).expand(linear.out_features, 1) for s, linear in zip(scales, linears)]
    return torch.cat(rows)
