"""Lets accelerate offload FP8 modules.

``cpu_offload``, ``disk_offload`` and ``dispatch_model`` load a module's tensors from the model's
state dict for each call, under the names of the module's own tensors, and cast them to the dtypes
there. But a state dict holds the parts of a joined linear instead of the whole, and OCP's dialect
on any device.
"""

import re
from collections.abc import Mapping
from typing import Any, Dict, Iterator

import torch
from torch import nn

from ..functional import FP8_DTYPES, native_fp8_dtype, to_native_fp8
from .hooks import parts_of_hook


class Offloadable(nn.Module):
    """A module that learns of accelerate's hooks: they are set as an attribute, after the weights
    have moved."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_hf_hook":
            _settle(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "_hf_hook":
            _settle(self)


def _settle(module: Any) -> None:
    """Has the weights in the dialect of their device, or of the one that they are brought to."""
    for hook in parts_of_hook(module):
        if not getattr(hook, "offload", False):
            continue
        if not isinstance(hook.weights_map, Stored):
            hook.weights_map = Stored(module, hook.weights_map)
        if hook.execution_device is None:
            continue
        native = native_fp8_dtype(torch.device(hook.execution_device))
        for name, form in module._parameters.items():
            if form is not None and form.dtype in FP8_DTYPES and form.device.type == "meta":
                form = torch.empty_like(form, dtype=native)
                module._parameters[name] = nn.Parameter(form, requires_grad=False)
    owner = getattr(module, "fused", module)
    if all(p.device.type != "meta" for p in owner._parameters.values() if p is not None):
        owner.convert_dialect()


# A weight, or a scale that goes with it.
_OF_FP8 = re.compile(r"(weight|gate_up_proj|down_proj)(_scale_inv)?$|activation_scale$")


class Stored(Mapping):
    """What a hook is to bring, by the names and in the dialect that the module has."""

    def __init__(self, module: nn.Module, source: Any) -> None:
        self._module, self._source = module, source
        self._dialects: Dict[str, torch.dtype] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, found = self._whole(name), _OF_FP8.match(name)
        if found is None:
            return tensor
        weight = found[1] or "weight"
        own = getattr(self._module, weight).dtype
        if own not in FP8_DTYPES:
            return tensor
        if name == weight:
            self._dialects[weight] = tensor.dtype
            return to_native_fp8(tensor, tensor.new_ones(1, dtype=torch.float32), fp8_dtype=own)[0]
        if weight not in self._dialects:
            self._dialects[weight] = self._whole(weight).dtype
        none = torch.empty(0, dtype=self._dialects[weight], device=tensor.device)
        return to_native_fp8(none, tensor.float(), fp8_dtype=own)[1]

    def _whole(self, name: str) -> torch.Tensor:
        joined = getattr(self._module, "joins", ())
        if not joined or name in self._source:
            return self._source[name]
        parent = self._source.prefix[:-1].rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        parts = [self._source.dataset[f"{prefix}{part}.{name}"] for part in joined]
        is_one_for_all = getattr(self._module, name).shape == parts[0].shape
        return parts[0] if is_one_for_all else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return (name for name, p in self._module._parameters.items() if p is not None)

    def __len__(self) -> int:
        return len([*self])
