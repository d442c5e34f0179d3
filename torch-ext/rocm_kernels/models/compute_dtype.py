"""Keeps ``model.dtype`` of a transformers model with FP8 linears at the dtype that it computes in.

transformers returns the dtype of the first parameter. If that is an FP8 weight, inputs would be
cast to FP8, and a config saved with such a dtype cannot be loaded.
"""

import inspect
import sys
from typing import Any, Tuple

import torch
from torch import nn

_SCALES = ("_scale_inv", "activation_scale", "weight_scale", "input_scale")


class KnownDtype:
    """Gives a model's class such a ``dtype``. Kept on the model and pickled with it, it does so in
    the process that unpickles it too."""

    def __init__(self, cls: type) -> None:
        cls.dtype = property(_dtype)
        self._cls = cls

    def __reduce__(self) -> Tuple:
        return KnownDtype, (self._cls,)


def keep_dtype(model: nn.Module) -> None:
    """Has a model, and models in it such as a vision tower, name the dtype that they compute in,
    where transformers would name another."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    theirs = inspect.getattr_static(modeling.PreTrainedModel, "dtype").fget
    for module in model.modules():
        if not isinstance(module, modeling.PreTrainedModel) or not [*module.parameters()]:
            continue
        present = getattr(inspect.getattr_static(module, "dtype"), "fget", None)
        if present in (theirs, _dtype) and theirs(module) != _dtype(module):
            module.known_dtype = KnownDtype(type(module))


def _dtype(model: Any) -> torch.dtype:
    for name, parameter in model.named_parameters():
        is_scale = name.endswith(_SCALES)
        if parameter.is_floating_point() and parameter.element_size() > 1 and not is_scale:
            return parameter.dtype
    return model.config.dtype or torch.get_default_dtype()  # it has FP8 and scales alone
