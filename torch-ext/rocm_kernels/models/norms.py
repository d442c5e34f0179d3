"""Finds norms that compute the formula of the ``RMSNorm`` layer, by running them on test inputs."""

import copy
import inspect
from typing import Dict, NamedTuple, Optional

import torch
from torch import nn

from ..reference import rmsnorm
from .hooks import is_wrapped


class NormFormula(NamedTuple):
    """What a norm computes: ``x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)``.

    ``quantize_model_`` leaves it on each norm that it has asked, as ``kernel_norm``. The offset is
    1 in Gemma's; ``eps`` is the name of the attribute.
    """

    weight_offset: float
    eps: str


def weight_offset_of(norm: nn.Module) -> float:
    formula = getattr(norm, "kernel_norm", None)
    return 0.0 if formula is None else formula.weight_offset


def eps_of(norm: nn.Module) -> float:
    formula = getattr(norm, "kernel_norm", None)
    if formula is not None:
        return getattr(norm, formula.eps)
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def formula_of(norm: nn.Module) -> Optional[NormFormula]:
    """Returns what a norm computes, or None if that is no :class:`NormFormula`. Asked by numbers
    that the module is given, for there are over a hundred such classes, and the next may have any
    name."""
    weight = norm._parameters.get("weight")
    if norm._modules or set(norm._parameters) != {"weight"} or weight is None or weight.dim() != 1:
        return None
    if len(inspect.signature(type(norm).forward).parameters) != 2:
        return None  # what else it may be given, such as a gate, is in no formula
    exactly = {"dtype": torch.float32, "device": "cpu"}
    probe, size = copy.copy(norm), weight.shape[0]
    probe._parameters = {"weight": nn.Parameter(torch.linspace(-0.5, 1.5, size, **exactly))}
    rows = torch.linspace(-3, 4, 2 * size, **exactly).view(2, size)
    names = [name for name, value in vars(norm).items() if isinstance(value, float)]
    for name in sorted(names, key=lambda name: "eps" not in name):
        eps = getattr(norm, name)
        # Rows of which eps is nothing, rows that it is half of, and some that a limit would meet.
        x = torch.cat([rows, rows * (abs(eps) ** 0.5 or 1.0), rows * 1e3])
        try:
            with torch.no_grad():
                computed = type(norm).forward(probe, x)
            for offset in (0.0, 1.0):
                expected = rmsnorm(x, probe.weight, eps, weight_offset=offset)
                if torch.allclose(computed, expected, 1e-4, 1e-5):
                    return NormFormula(offset, name)
        except Exception:  # it takes something else: the report names it
            return None
    return None


def computes_rmsnorm(norm: nn.Module) -> bool:
    """Whether a norm's own forward is still what ``quantize_model_`` has seen."""
    formula = getattr(norm, "kernel_norm", None)
    return formula is not None and formula == formula_of(norm) and not is_wrapped(norm)


def other_norms(model: nn.Module) -> Dict[str, int]:
    """Norms that ``kernelize`` leaves as they are, by class."""
    counts: Dict[str, int] = {}
    for module in model.modules():
        cls = type(module)
        is_norm = "Norm" in cls.__name__ and not module._modules
        if is_norm and not hasattr(module, "kernel_norm"):
            counts[cls.__name__] = counts.get(cls.__name__, 0) + 1
    return counts
