"""FP8 checkpoints as their ``quantization_config`` describes them: which linears are FP8, and how.
Each expert's are linears too, and may be MXFP4. One record a format.

Files call a weight's scale ``weight_scale``, a static one of the input ``input_scale``; in
transformers' finegrained FP8 they are ``weight_scale_inv`` and ``activation_scale``.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

from torch import nn

from . import compressed_tensors, modelopt, others, quark
from .layout import BLOCK, MX_BLOCK, Layout, LayoutOf, NotServed

__all__ = [
    "BLOCK",
    "FINEGRAINED",
    "FORMATS",
    "MX_BLOCK",
    "Format",
    "Layout",
    "LayoutOf",
    "NotServed",
    "describe",
    "layout_of_linear",
    "layouts_of",
]

FINEGRAINED = "fp8"


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint that is loaded here.

    Attributes:
        method: its ``quant_method``.
        read: of a ``quantization_config``, which linears are FP8 and how; None: transformers, or
            its makers' package, loads what this one says.
    """

    method: str
    read: Callable[[Dict[str, Any]], Optional[LayoutOf]]


FORMATS = (
    Format("compressed-tensors", compressed_tensors.read),
    Format("quark", quark.read),
    Format("modelopt", modelopt.read),
    Format(FINEGRAINED, others.read_fp8),
    Format("mxfp8", others.read_fp8),
    Format("fbgemm_fp8", others.read_fbgemm),
    Format("mxfp4", others.read_mxfp4),
)
_READERS = {format.method: format.read for format in FORMATS}


def layouts_of(config: Dict[str, Any]) -> Optional[LayoutOf]:
    """Which linears a ``quantization_config`` says to be FP8, and how; None: it says something
    else, or something that is not known here. Raises :class:`NotServed` for what would be computed
    wrongly."""
    reader = _READERS.get(config.get("quant_method", ""))
    return None if reader is None else reader(config)


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
                "quant_method": FINEGRAINED,
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
