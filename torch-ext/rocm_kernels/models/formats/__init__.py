"""FP8 checkpoints as their ``quantization_config`` describes them: which linears are FP8, and how.
Each expert's are linears too, and may be MXFP4. One record a format.

Files call a weight's scale ``weight_scale``, a static one of the input ``input_scale``; in
transformers' finegrained FP8 they are ``weight_scale_inv`` and ``activation_scale``.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Union

from torch import nn

from . import compressed_tensors, modelopt, others, quark
from .layout import BLOCK, MX_BLOCK, Layout, LayoutOf, NotServed, Unknown
from .loaded import Stored, Unreadable

__all__ = [
    "BLOCK",
    "BY_METHOD",
    "FINEGRAINED",
    "FORMATS",
    "MX_BLOCK",
    "Format",
    "Layout",
    "LayoutOf",
    "NotServed",
    "Stored",
    "describe",
    "layout_of_linear",
    "layouts_of",
    "read_stored",
]


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint that is loaded here.

    Attributes:
        method: its ``quant_method``.
        read_config: of a ``quantization_config``, which linears are FP8 and how; None: transformers
            alone loads this format, or it loads what this config says.
        read_linear: what a linear holds that transformers has loaded; None: it is none of these.
        weight_scale, input_scale: names of a linear's tensors in files of this format.
        has_modules: transformers has a quantizer for it that keeps FP8 on every device, once
            nothing tests the machine.
    """

    method: str
    read_config: Optional[Callable[[Dict[str, Any]], Optional[LayoutOf]]]
    read_linear: Optional[Callable[[nn.Module], Optional[Stored]]] = None
    weight_scale: str = "weight_scale"
    input_scale: str = "input_scale"
    has_modules: bool = False


_INVERSE = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
FINEGRAINED = Format("fp8", others.read_fp8, others.read_fp8_linear, **_INVERSE, has_modules=True)
FORMATS = (
    Format("compressed-tensors", compressed_tensors.read, compressed_tensors.read_linear),
    Format("quark", quark.read, quark.read_linear),
    Format("modelopt", modelopt.read),
    FINEGRAINED,
    Format("mxfp8", others.read_fp8, **_INVERSE, has_modules=True),
    Format("fbgemm_fp8", others.read_fbgemm, others.read_fbgemm_linear),
    Format("mxfp4", others.read_mxfp4),
    Format("torchao", None, others.read_torchao_linear),
)
BY_METHOD = {format.method: format for format in FORMATS}


def read_stored(module: nn.Module) -> Union[Stored, str, None]:
    """What a checkpoint's FP8 linear holds; why it cannot be read; or None, if it is no such
    linear."""
    try:
        for format in FORMATS:
            stored = None if format.read_linear is None else format.read_linear(module)
            if stored is not None:
                return stored
    except (Unknown, Unreadable) as reason:
        return str(reason)
    return None


def layouts_of(config: Dict[str, Any]) -> Optional[LayoutOf]:
    """Which linears a ``quantization_config`` says to be FP8, and how; None: it says something
    else, or something that is not known here. Raises :class:`NotServed` for what would be computed
    wrongly."""
    format = BY_METHOD.get(config.get("quant_method", ""))
    return None if format is None or format.read_config is None else format.read_config(config)


def describe(layouts: Dict[str, Layout], ignored: List[str]) -> Dict[str, Any]:
    """A checkpoint's ``quantization_config``: compressed-tensors', or where all scales are blocks'
    and inputs dynamic, as DeepSeek's and Qwen's checkpoints have them, finegrained FP8's.

    Args:
        layouts: of each target: the name of an FP8 linear, or ``re:`` and a pattern of names.
        ignored: the same, of what could be FP8, and is not.
    """
    all_alike = set(layouts.values())
    for scale_fmt in (None, "ue8m0"):
        if all_alike == {Layout("block", "dynamic", scale_fmt=scale_fmt)}:
            return {
                "quant_method": FINEGRAINED.method,
                "activation_scheme": "dynamic",
                "weight_block_size": [*BLOCK],
                "modules_to_not_convert": [name.removeprefix("re:") for name in ignored],
                **({} if scale_fmt is None else {"scale_fmt": scale_fmt}),
            }
    targets: Dict[Layout, List[str]] = {}
    for target, layout in layouts.items():
        targets.setdefault(layout, []).append(target)
    return compressed_tensors.describe(targets, ignored)


def layout_of_linear(linear: nn.Module) -> Layout:
    scale = linear.weight_scale_inv
    by = "tensor" if scale.numel() == 1 else "channel" if scale.shape[1] == 1 else "block"
    return Layout(by, linear.activation_scheme, scale_fmt=linear.scale_fmt)
