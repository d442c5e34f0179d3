"""NVIDIA ModelOpt: ``quantization_config`` in config.json, or hf_quant_config.json beside it."""

from typing import Any, Dict, Optional, Tuple

from .layout import LINEAR, MX_BLOCK, ONE_FOR_32, Layout, LayoutOf, NotServed, is_listed, is_within

# By quant_algo. Weights of blocks alone (PB_WO): inputs stay as they are.
_ALGORITHMS = {
    "FP8": Layout("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout("channel", "dynamic"),
    "FP8_PB_WO": Layout("block", "none"),
    "MXFP8": Layout("block", "dynamic", block=MX_BLOCK, instead=ONE_FOR_32),
}


def read(config: Dict[str, Any]) -> LayoutOf:
    said = config.get("quantization") or config
    excluded = said.get("exclude_modules") or said.get("ignore") or []
    layers = said.get("quantized_layers") or {}
    if _algorithm(said) == "MIXED_PRECISION":
        named, default = {name: _layout(layer) for name, layer in layers.items()}, None
    else:
        named, default = {}, _layout(said)

    def layout_of(*names: str, classes: Tuple[str, ...] = LINEAR) -> Optional[Layout]:
        if is_listed(excluded, names) or is_within(excluded, names):
            return None
        if "Linear" not in classes:
            return None
        return next((named[name] for name in names if name in named), default)

    return layout_of


def _algorithm(said: Dict[str, Any]) -> str:
    return str(said.get("quant_algo")).upper()


def _layout(said: Dict[str, Any]) -> Layout:
    layout = _ALGORITHMS.get(_algorithm(said))
    if layout is None:
        raise NotServed(
            f"ModelOpt's quant_algo must be one of {', '.join(_ALGORITHMS)}, got "
            f"{said.get('quant_algo')}, which nothing here computes"
        )
    return layout
