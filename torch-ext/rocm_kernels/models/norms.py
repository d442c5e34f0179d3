"""Which norms are the ``RMSNorm`` layer's formula, and the weights that they multiply by."""

import copy
from typing import Any, Dict, Optional

import torch
from torch import nn

from ..reference import rms_norm


def eps_of(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def weight_of(norm: nn.Module) -> torch.Tensor:
    """What a norm multiplies by: its weight, or 1 + weight where :func:`prepare_norm` left that."""
    return norm.kernel_weight if hasattr(norm, "kernel_weight") else norm.weight


def is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and not module._modules


def prepare_norm(norm: nn.Module) -> None:
    """Gives a norm that multiplies by 1 + weight, as Gemma's do, that sum, in float32.

    Made here and not in each forward, where it would cost a launch. It is no part of the state
    dict, and made anew when a weight is loaded.
    """
    if hasattr(norm, "kernel_weight"):
        _offset_weight(norm)
    elif _weight_offset(norm) == 1.0:
        norm.register_buffer("kernel_weight", None, persistent=False)
        _offset_weight(norm)
        norm.register_load_state_dict_post_hook(_offset_weight)


def computes_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm's own forward is the formula of the ``RMSNorm`` layer, with the weight that
    :func:`weight_of` tells."""
    offset = _weight_offset(norm)
    return offset is not None and (offset == 1.0) == hasattr(norm, "kernel_weight")


def _offset_weight(norm: nn.Module, _: Any = None) -> None:
    norm.kernel_weight = norm.weight.detach().float() + 1


def _weight_offset(norm: nn.Module) -> Optional[float]:
    """0 for a norm that multiplies by its weight, 1 for one that multiplies by 1 + weight, None for
    one that computes something else: asked of it, with numbers, for there are over a hundred such
    classes."""
    weight = norm._parameters.get("weight")
    if set(norm._parameters) != {"weight"} or weight is None or weight.dim() != 1:
        return None
    if not isinstance(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)), float):
        return None
    exactly = {"dtype": torch.float32, "device": "cpu"}
    probe, size = copy.copy(norm), weight.shape[0]
    probe._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, size, **exactly))}
    x = torch.linspace(-3, 4, 2 * size, **exactly).view(2, size)
    try:
        with torch.no_grad():
            computed = type(norm).forward(probe, x)
    except Exception:  # it takes something else: the report names it
        return None
    for offset in (0.0, 1.0):
        if torch.allclose(computed, rms_norm(x, probe.weight + offset, eps_of(norm)), 1e-4, 1e-5):
            return offset
    return None


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
