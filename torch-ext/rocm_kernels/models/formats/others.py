"""Formats that one or two fields describe: AutoFP8, finegrained FP8 in small blocks, FBGEMM,
GPT-OSS's own; and torchao's linears."""

import re
from typing import Any, Dict, Optional, Sequence, Tuple

from torch import nn

from ...functional import SCALE_BLOCK
from ..linear import scale_fmt_of
from .layout import LINEAR, MX_BLOCK, ONE_A_TENSOR, ONE_FOR_32, Layout, LayoutOf, is_listed
from .loaded import Stored, Unreadable, static_input, stored


def read_fp8(config: Dict[str, Any]) -> Optional[LayoutOf]:
    """AutoFP8's, which says nothing of blocks, and finegrained FP8 whose blocks are small. All
    others transformers loads: None."""
    scheme = config.get("activation_scheme", "dynamic")
    is_mxfp8 = config["quant_method"] == "mxfp8"
    block = config.get("weight_block_size", MX_BLOCK if is_mxfp8 else ())
    if block == ():
        layout = Layout("tensor", scheme, instead=ONE_A_TENSOR if scheme == "dynamic" else None)
    elif block is None or tuple(block) not in (MX_BLOCK, (32, 32)) or scheme != "dynamic":
        return None
    else:
        scale_fmt = "ue8m0" if is_mxfp8 or config.get("scale_fmt") == "ue8m0" else None
        layout = Layout("block", scheme, None, scale_fmt, tuple(block), ONE_FOR_32)
    left = config.get("ignored_layers") or config.get("modules_to_not_convert") or []
    return _of_linears(layout, left)


def read_fbgemm(config: Dict[str, Any]) -> LayoutOf:
    layout = Layout("channel", "dynamic", config["activation_scale_ub"])
    return _of_linears(layout, config.get("modules_to_not_convert") or [])


def _of_linears(layout: Layout, left: Sequence[str]) -> LayoutOf:
    def layout_of(*names: str, classes: Tuple[str, ...] = LINEAR) -> Optional[Layout]:
        return None if "Linear" not in classes or is_left_out(left, names) else layout

    return layout_of


def is_left_out(left: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a list as transformers takes it has one of the names: an entry is a name, its
    beginning or its end, up to a dot, or an expression of its beginning. AutoFP8 marks expressions
    by ``re:``."""
    expressions = [entry for entry in left if not entry.startswith(("re:", "*"))]
    patterns = [re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))") for entry in expressions]
    return (
        is_listed(left, names)
        or any(name.endswith(entry) for entry in left for name in names)
        or any(pattern.match(name) for pattern in patterns for name in names)
    )


def read_mxfp4(_: Dict[str, Any]) -> LayoutOf:
    def layout_of(*names: str, classes: Tuple[str, ...] = LINEAR) -> Optional[Layout]:
        return Layout("mxfp4", "none") if any(".experts." in name for name in names) else None

    return layout_of


# ---- linears that transformers has loaded; None: it is none of that format's


def read_fp8_linear(module: nn.Module) -> Optional[Stored]:
    if type(module).__name__ != "FP8Linear":
        return None
    blocks = module.block_size
    if blocks is not None and tuple(blocks) != (SCALE_BLOCK, SCALE_BLOCK):
        raise Unreadable(f"has scale blocks of {tuple(blocks)}, not {(SCALE_BLOCK, SCALE_BLOCK)}")
    if module.activation_scale is not None:
        inputs = static_input(module.activation_scale)
    else:
        inputs = {"scale_fmt": scale_fmt_of(module)}
    return stored(module.weight, module.weight_scale_inv, blocks is not None, **inputs)


def read_fbgemm_linear(module: nn.Module) -> Optional[Stored]:
    if type(module).__name__ != "FbgemmFp8Linear":
        return None
    return stored(module.weight, module.weight_scale, scale_ub=float(module.input_scale_ub))


def read_torchao_linear(module: nn.Module) -> Optional[Stored]:
    if type(module) is not nn.Linear or type(module.weight).__name__ != "Float8Tensor":
        return None
    weight = module.weight
    block, (n, k) = tuple(weight.block_size), tuple(weight.shape)
    blocks = block == (SCALE_BLOCK, SCALE_BLOCK)
    if not blocks and block not in ((1, k), (n, k)):
        raise Unreadable(f"has scale blocks of {block}")
    inputs = weight.act_quant_kwargs
    if inputs is None:
        return stored(weight.qdata, weight.scale, blocks, scheme="none")
    per_tensor = type(inputs.granularity).__name__ == "PerTensor"
    rest = {"scale_ub": inputs.hp_value_ub, "instead": ONE_A_TENSOR if per_tensor else None}
    return stored(weight.qdata, weight.scale, blocks, **rest)
