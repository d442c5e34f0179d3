"""Which modules ``kernelize`` gets to see, and as what."""

import inspect
from typing import Callable, Optional, Tuple

from torch import nn

from .families import ACTIVATIONS, BY_DECODER, BY_MLP
from .fuse import has_fused
from .hooks import is_offloaded
from .linear import FP8Linear, FP8LinearPart
from .norms import computes_rms_norm, is_norm, prepare_norm


def make_known(cls: type, layer_name: str, condition: Callable[[nn.Module], bool]) -> None:
    """Lets ``kernelize`` see a class, as ``kernels.replace_kernel_forward_from_hub`` does.

    The condition keeps it from instances that are not prepared, and from subclasses, which inherit
    the name.
    """
    if "kernel_layer_name" not in vars(cls):  # its own, not one that it inherits
        cls.kernel_layer_name = layer_name
        cls.kernel_condition = staticmethod(
            lambda module: type(module) is cls and condition(module)
        )


class KnownAs:
    """Makes a prepared module's class known. Kept on the module and pickled with it, it does so in
    the process that unpickles it too: the condition is a function that pickle finds by name."""

    def __init__(
        self, cls: type, layer_name: str, condition: Callable[[nn.Module], bool]
    ) -> None:
        self._arguments = cls, layer_name, condition
        make_known(*self._arguments)

    def __reduce__(self) -> Tuple:
        return KnownAs, self._arguments


def make_modules_known(model: nn.Module) -> None:
    """Shows a model's MLPs, decoder layers and norms to ``kernelize``, and each of the first two
    its family to the layers, as ``kernel_family``."""
    for module in model.modules():
        name = type(module).__name__
        if name in BY_MLP:
            module.kernel_family = BY_MLP[name]
            module.known_as = KnownAs(type(module), "LlamaMLP", _is_fp8_mlp)
        elif name in BY_DECODER:
            module.kernel_family = BY_DECODER[name]
            layer = _decoder_layer_name(type(module))
            if layer is not None:
                module.known_as = KnownAs(type(module), layer, _is_fused_decoder_layer)
        elif is_norm(module):
            if not is_offloaded(module):
                prepare_norm(module)
            if computes_rms_norm(module):
                # transformers does so too, but only beside the kernels that it was made for.
                module.known_as = KnownAs(type(module), "RMSNorm", computes_rms_norm)


_GEMMA = {"hidden_states", "attention_mask", "position_ids", "past_key_values",
          "position_embeddings", "kwargs"}  # fmt: skip
# By what their forwards take, besides the module.
_DECODER_LAYERS = {"LlamaDecoderLayer": {*_GEMMA, "use_cache"}, "GemmaDecoderLayer": _GEMMA}


def _decoder_layer_name(cls: type) -> Optional[str]:
    """``kernelize`` wants a layer to have as many parameters as what it replaces; None: no layer
    has, as may be in another version of transformers."""
    names = {*inspect.signature(cls.forward).parameters} - {"self"}
    return next((layer for layer, own in _DECODER_LAYERS.items() if own == names), None)


def _is_fp8_mlp(module: nn.Module) -> bool:
    family = getattr(module, "kernel_family", None)  # None: another model's, not prepared
    if family is None or type(getattr(module, family.activation)).__name__ not in ACTIVATIONS:
        return False
    linears = (*family.gate_up.of(module), family.down)
    return all(isinstance(getattr(module, name), (FP8Linear, FP8LinearPart)) for name in linears)


def _is_fused_decoder_layer(module: nn.Module) -> bool:
    family = getattr(module, "kernel_family", None)
    if family is None:
        return False
    norms = [getattr(module, name) for name in family.norms]
    return has_fused(getattr(module, family.attention), family.qkv) and all(
        computes_rms_norm(norm) for norm in norms
    )
