"""Checkpoints of AMD Quark."""

from typing import Any, Dict, Optional, Tuple

from torch import nn

from .layout import LINEAR, ONE_A_TENSOR, Layout, LayoutOf, Unknown, is_listed
from .loaded import Stored, Unreadable, static_input, stored, text


def read(config: Dict[str, Any]) -> Optional[LayoutOf]:
    """What a layer's name says goes before its class, and that before what holds for all."""
    by_name, by_class = (
        config.get(field) or {} for field in ("layer_quant_config", "layer_type_quant_config")
    )
    try:
        default = _layout(config.get("global_quant_config"))
        named = {pattern: _layout(layer) for pattern, layer in by_name.items()}
        # As "Linear", or as "<class 'torch.nn.modules.linear.Linear'>".
        classed = {
            name.strip("<>'").rpartition(".")[2]: _layout(layer) for name, layer in by_class.items()
        }
    except Unknown:
        return None
    if not any((default, *named.values(), *classed.values())):
        return None
    excluded = config.get("exclude") or []

    def layout_of(*names: str, classes: Tuple[str, ...] = LINEAR) -> Optional[Layout]:
        if is_listed(excluded, names):
            return None
        for pattern, layout in named.items():
            if is_listed([pattern], names):
                return layout
        for name, layout in classed.items():
            if name in classes:
                return layout
        return default if "Linear" in classes else None

    return layout_of


def _layout(config: Optional[Dict[str, Any]]) -> Optional[Layout]:
    """Returns the layout that a layer's config says; None: 16 bits. Output tensors may be
    quantised: those are keys and values, for a cache in FP8."""
    weight, inputs = ((config or {}).get(field) for field in ("weight", "input_tensors"))
    if weight is None and inputs is None:
        return None
    if not isinstance(weight, dict) or isinstance(inputs, list) or config.get("bias"):
        raise Unknown
    by = {"per_tensor": "tensor", "per_channel": "channel"}.get(weight["qscheme"])
    if weight["dtype"] != "fp8_e4m3" or by is None or weight.get("is_dynamic"):
        raise Unknown
    if by == "channel" and weight.get("ch_axis") not in (None, 0):
        raise Unknown
    if inputs is None:
        return Layout(by, "none")
    if inputs["dtype"] != "fp8_e4m3":
        raise Unknown
    if not inputs.get("is_dynamic"):
        if inputs["qscheme"] != "per_tensor":
            raise Unknown
        return Layout(by, "static")
    if inputs["qscheme"] == "per_tensor":
        return Layout(by, "dynamic", instead=ONE_A_TENSOR)
    # Of inputs [tokens, K] a scale for each of axis 1, as Quark counts it: a scale a token.
    if inputs["qscheme"] not in ("per_channel", "per_token"):
        raise Unknown
    return Layout(by, "dynamic")


def read_linear(module: nn.Module) -> Optional[Stored]:
    """Reads an FP8 linear of Quark's; None for any other module."""
    if type(module).__name__ != "QParamsLinear":
        return None
    # An output_quantizer is that of keys and values: a cache's business, here they are as computed.
    inputs = module.input_quantizer
    if module.weight_quantizer is None:
        raise Unreadable("has no quantised weight")
    if inputs is None:
        rest: Dict[str, Any] = {"scheme": "none"}
    elif not inputs.qspec.is_dynamic:
        rest = static_input(inputs.scale)
    else:
        per_tensor = text(inputs.qspec.qscheme).endswith("per_tensor")
        rest = {"scheme": "dynamic", "instead": ONE_A_TENSOR if per_tensor else None}
    return stored(module.weight, module.weight_quantizer.scale, **rest)
