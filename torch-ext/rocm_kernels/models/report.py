"""Reports what ``quantize_model_`` has changed and what ``kernelize`` has replaced."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Dict, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES
from .hooks import function_of, is_layer

_SCALE = re.compile(r"(_scale|_scale_inv)$")


@dataclass(frozen=True)
class QuantizationReport:
    """What :func:`quantize_model_` did.

    Attributes:
        converted: names of the linears whose weights became FP8.
        fused: name of each fused projection, and the linears that became parts of it.
        adopted: names of the linears that held FP8 already, from an FP8 checkpoint.
        instead: name of each module that its FP8 checkpoint wants computed otherwise, such as with
            one scale for all tokens, and what is done instead.
        skipped: name of each linear left as it was, and of what else holds matrices, and why.
        experts: name of each layer's experts, and what their weights have become, or why they stay.
        kept: what did not become FP8: name of each parameter, ``*`` for the numbers in it, and its
            share of ``bytes_after``. Experts come first, then by share.
        norms: class of each norm that no kernel layer replaces, and how many there are of it.
        layers: name of each decoder layer and MLP of a known family that keeps its own forward, its
            linears served all the same, and why.
        bytes_before, bytes_after: of the model's parameters and buffers, shared ones counted once.
        fp8_dtype: the dialect of the weights.
        activations: how the linears take their inputs, ``"dynamic"`` or ``"none"``.
    """

    converted: Tuple[str, ...]
    fused: Dict[str, Tuple[str, ...]]
    adopted: Tuple[str, ...]
    instead: Dict[str, str]
    skipped: Dict[str, str]
    experts: Dict[str, str]
    kept: Dict[str, float]
    norms: Dict[str, int]
    layers: Dict[str, str]
    bytes_before: int
    bytes_after: int
    fp8_dtype: torch.dtype
    activations: str

    def __str__(self) -> str:
        lines = [
            f"{len(self.converted)} linears to {self.fp8_dtype}, activations {self.activations!r}",
            f"{len(self.fused)} fused projections, {len(self.adopted)} linears held FP8 already",
            f"{self.bytes_before / 1e6:.1f} MB before, {self.bytes_after / 1e6:.1f} MB after",
        ]
        experts = Counter((_starred(name), what) for name, what in self.experts.items())
        lines += [f"{count} layers of {name}: {what}" for (name, what), count in experts.items()]
        lines += [f"not FP8: {share:.1%} of the bytes, {name}" for name, share in self.kept.items()]
        instead = Counter((_starred(name), what) for name, what in self.instead.items())
        lines += [f"{name}: {what} ({count})" for (name, what), count in instead.items()]
        skipped = Counter((_starred(name), why) for name, why in self.skipped.items())
        lines += [
            f"skipped {name}: {why}" + (f" ({count})" if count > 1 else "")
            for (name, why), count in skipped.items()
        ]
        layers = Counter((_starred(name), why) for name, why in self.layers.items())
        lines += [f"not whole: {count} {name}: {why}" for (name, why), count in layers.items()]
        lines += [f"not replaced: {count} {name}" for name, count in self.norms.items()]
        return "\n".join(lines)


def kernelized_layers(model: nn.Module) -> Dict[Tuple[str, str], int]:
    """How many modules run a layer of this package: ``{(module class, layer): count}``."""
    counts: Dict[Tuple[str, str], int] = {}
    for module in model.modules():
        forward = function_of(module.__dict__.get("forward"))
        if is_layer(forward):
            key = (type(module).__name__, forward.__qualname__.split(".")[0])
            counts[key] = counts.get(key, 0) + 1
    return counts


def bytes_of(model: nn.Module) -> int:
    """Counts the bytes of a model's parameters and buffers, shared ones once."""
    tensors = list(model.parameters()) + list(model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def kept_bytes(model: nn.Module) -> Dict[str, int]:
    """Counts the bytes of the parameters that are not FP8, MXFP4 or their scales: ``{name:
    bytes}``, one entry for those whose names differ in numbers alone; experts first, then the
    largest."""
    counts: Dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype in (*FP8_DTYPES, torch.uint8) or _SCALE.search(name):
            continue
        name = _starred(name)
        counts[name] = counts.get(name, 0) + parameter.numel() * parameter.element_size()
    return dict(sorted(counts.items(), key=lambda item: ("expert" not in item[0], -item[1])))


def _starred(name: str) -> str:
    """Replaces the numbers in a name by ``*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
