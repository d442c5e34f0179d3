"""compressed-tensors, which llm-compressor and others write, and in which quantised models are
saved here."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from torch import nn

from ...functional import SCALE_BLOCK
from .layout import (
    BLOCK,
    LINEAR,
    MX_BLOCK,
    ONE_A_TENSOR,
    ONE_A_TOKEN,
    ONE_FOR_32,
    Layout,
    LayoutOf,
    NotServed,
    Unknown,
    matches,
)
from .loaded import Stored, Unreadable, static_input, stored, text


class _Group(NamedTuple):
    targets: List[str]
    layout: Optional[Layout]  # None: it has no weights, as an attention's


def read(config: Dict[str, Any]) -> Optional[LayoutOf]:
    for field, none in (("transform_config", ()), ("sparsity_config", ("dense",))):
        said = config.get(field) or {}
        if said and said.get("format") not in none:
            raise NotServed(
                f"quantization_config has a {field}, {_short(said)}, and nothing here computes "
                "with one: load this model without fp8_checkpoints"
            )
    try:
        groups = [_read_group(group) for group in (config.get("config_groups") or {}).values()]
    except Unknown:
        return None
    if not any(group.layout for group in groups):
        return None
    ignored = config.get("ignore") or []

    def layout_of(*names: str, classes: Tuple[str, ...] = LINEAR) -> Optional[Layout]:
        if any(matches(entry, name) for entry in ignored for name in (*names, *classes)):
            return None
        group = _group_of(groups, names, classes)
        if group is not None and group.layout is None:
            raise NotServed(
                f"{names[0]} is in a group of quantization_config that has no weights, {group}: "
                "nothing here computes that; load this model without fp8_checkpoints"
            )
        return None if group is None else group.layout

    return layout_of


def _group_of(
    groups: List[_Group], names: Tuple[str, ...], classes: Tuple[str, ...]
) -> Optional[_Group]:
    """The group of a name goes before that of a pattern, and that before a class's; of several the
    first in alphabetical order, as compressed-tensors has it."""
    of_target = {target: group for group in groups for target in group.targets}
    ordered = sorted(of_target, key=lambda target: (target.startswith("re:"), target))
    for target in ordered:
        if any(matches(target, name) for name in names):
            return of_target[target]
    return next((of_target[target] for target in ordered if target in classes), None)


def _read_group(group: Dict[str, Any]) -> _Group:
    targets, weights = group["targets"], group.get("weights")
    if group.get("output_activations") and not _are_of_a_cache(targets):
        raise Unknown("quantises its output")
    if weights is None:
        return _Group(targets, None)
    if _is_mxfp4(weights):
        named = all(target.startswith("re:") and "experts" in target for target in targets)
        if group.get("input_activations") or not named:
            raise Unknown("is MXFP4, and not experts alone")
        return _Group(targets, Layout("mxfp4", "none"))
    return _Group(targets, layout_of_scheme(weights, group.get("input_activations")))


def _are_of_a_cache(targets: List[str]) -> bool:
    """Outputs of these alone are keys and values: the cache's business."""
    return all(target.rstrip("$").endswith(("k_proj", "v_proj")) for target in targets)


def layout_of_scheme(weights: Dict[str, Any], inputs: Optional[Dict[str, Any]]) -> Layout:
    """Returns one linear's layout from what compressed-tensors says of its weight and inputs.
    Raises :class:`Unknown`."""
    if not _is_fp8(weights):
        raise Unknown("is compressed-tensors, not FP8 with scales alone")
    by, block = _strategy(weights), BLOCK
    if by == "group" and weights.get("group_size") == MX_BLOCK[1]:
        by, block = "block", MX_BLOCK
    elif by == "block":
        block = tuple(weights.get("block_structure") or ())
    if by not in ("tensor", "channel", "block"):
        raise Unknown(f"has weight scales by {by}")
    if block not in (BLOCK, MX_BLOCK, (32, 32)):
        raise Unknown(f"has scale blocks of {block}, not {BLOCK}")
    if inputs is None:
        return Layout(by, "none", block=block)
    if not _is_fp8(inputs):
        bits, kind = inputs.get("num_bits"), inputs.get("type")
        raise Unknown(f"quantises its input to {bits} bits, {kind}")
    inputs_by, size = _strategy(inputs), inputs.get("group_size")
    if not inputs.get("dynamic"):
        if inputs_by != "tensor":
            raise Unknown(f"has static scales of its input by {inputs_by}")
        return Layout(by, "static", block=block)
    # What is computed here has as many scales, or more; MXFP8's have no other way to run.
    known = {
        ("tensor", "token", None): None,
        ("tensor", "tensor", None): ONE_A_TENSOR,
        ("channel", "token", None): None,
        ("channel", "tensor", None): ONE_A_TENSOR,
        ("block", "group", SCALE_BLOCK): None,
        ("block", "token", None): ONE_A_TOKEN,
        ("block", "tensor", None): ONE_A_TENSOR,
    }
    if block != BLOCK:
        known["block", "group", block[1]] = ONE_FOR_32
    if (by, inputs_by, size) not in known:
        raise Unknown(f"takes its input's scale by {inputs_by}")
    return Layout(by, "dynamic", block=block, instead=known[by, inputs_by, size])


def _strategy(tensor: Dict[str, Any]) -> str:
    size = tensor.get("group_size")
    unsaid = "tensor" if size is None else "channel" if size == -1 else "group"
    return tensor.get("strategy") or unsaid


def _is_fp8(tensor: Dict[str, Any]) -> bool:
    kind = tensor.get("type"), tensor.get("num_bits"), tensor.get("symmetric", True)
    return kind == ("float", 8, True)


def _is_mxfp4(tensor: Dict[str, Any]) -> bool:
    return _MXFP4.items() <= {"symmetric": True, **tensor}.items()


_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def _short(said: Any) -> str:
    text = str(said)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- linears that transformers has loaded


def read_linear(module: nn.Module) -> Optional[Stored]:
    """Reads an FP8 linear of this format; None for any other module."""
    if type(module).__name__ == "CompressedTensorsFP8Linear":
        return stored(module.weight, module.weight_scale)  # its own forward is dynamic, too
    if type(module) is not nn.Linear or not hasattr(module, "quantization_scheme"):
        return None
    scheme = module.quantization_scheme
    if scheme.output_activations is not None:
        raise Unreadable("quantises its output")
    if scheme.weights is None:
        raise Unreadable("is compressed-tensors, and its weight is not quantised")
    weights, inputs = (_fields(said) for said in (scheme.weights, scheme.input_activations))
    layout = layout_of_scheme(weights, inputs)
    if layout.block != BLOCK:
        raise Unreadable(f"has scale blocks of {layout.block}, not {BLOCK}")
    rest: Dict[str, Any] = {"scheme": layout.inputs, "instead": layout.instead}
    if layout.inputs == "static":
        rest = static_input(module.input_scale)
    return stored(module.weight, module.weight_scale, layout.weights == "block", **rest)


def _fields(said: Any) -> Optional[Dict[str, Any]]:
    """Returns the fields of a scheme as they stand in a config."""
    if said is None:
        return None
    block = said.block_structure
    return {
        "type": text(said.type),
        "num_bits": said.num_bits,
        "symmetric": said.symmetric,
        "strategy": None if said.strategy is None else text(said.strategy),
        "dynamic": said.dynamic,
        "group_size": said.group_size,
        "block_structure": None if block is None else [*block],
    }


# ---- what is saved


def describe(targets: Dict[Layout, List[str]], ignored: List[str]) -> Dict[str, Any]:
    """Names, or ``re:`` and patterns, of each layout, to a ``quantization_config``."""
    if len(targets) == 1 and "mxfp4" not in {layout.weights for layout in targets}:
        targets = {layout: ["Linear"] for layout in targets}
    groups = [_described(layout, names) for layout, names in targets.items()]
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
    }


def _described(layout: Layout, targets: List[str]) -> Dict[str, Any]:
    if layout.weights == "mxfp4":
        bytes_of_scales = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return {
            "targets": targets,
            "weights": {**_MXFP4, **bytes_of_scales, "dynamic": False},
            "input_activations": None,
            "format": "mxfp4-pack-quantized",
        }
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**fp8, "strategy": layout.weights, "dynamic": False}
    inputs = None
    if layout.weights == "block":
        weights["block_structure"] = [*BLOCK]
    if layout.inputs == "static":
        inputs = {**fp8, "strategy": "tensor", "dynamic": False}
    elif layout.inputs == "dynamic" and layout.weights == "block":
        inputs = {**fp8, "strategy": "group", "group_size": SCALE_BLOCK, "dynamic": True}
    elif layout.inputs == "dynamic":
        inputs = {**fp8, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "format": "float-quantized",
    }
