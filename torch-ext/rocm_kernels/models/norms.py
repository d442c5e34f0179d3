"""Which norms are the ``RMSNorm`` layer's formula."""

import copy
from typing import Dict

import torch
from torch import nn

from ..reference import rms_norm


def eps_of(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and not module._modules


def computes_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm's own forward is the formula of the ``RMSNorm`` layer: asked of it, with
    numbers. There are over a hundred such classes, and some add one to their weight."""
    weight = norm._parameters.get("weight")
    if set(norm._parameters) != {"weight"} or weight is None or weight.dim() != 1:
        return False
    if not isinstance(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)), float):
        return False
    exactly = {"dtype": torch.float32, "device": "cpu"}
    probe, size = copy.copy(norm), weight.shape[0]
    probe._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, size, **exactly))}
    x = torch.linspace(-3, 4, 2 * size, **exactly).view(2, size)
    try:
        with torch.no_grad():
            computed = type(norm).forward(probe, x)
    except Exception:  # it takes something else: the report names it
        return False
    return torch.allclose(computed, rms_norm(x, probe.weight, eps_of(norm)), 1e-4, 1e-5)


def other_norms(model: nn.Module) -> Dict[str, int]:
    """Norms that ``kernelize`` leaves as they are, by class."""
    counts: Dict[str, int] = {}
    for module in model.modules():
        cls = type(module)
        condition = getattr(cls, "kernel_condition", lambda _: True)
        known = getattr(cls, "kernel_layer_name", None) == "RMSNorm" and condition(module)
        if is_norm(module) and not known:
            counts[cls.__name__] = counts.get(cls.__name__, 0) + 1
    return counts
