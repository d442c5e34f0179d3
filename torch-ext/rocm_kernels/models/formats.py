"""FP8 checkpoints as their ``quantization_config`` describes them: which linears are FP8, and how.
Each expert's are linears too, and may be MXFP4.

Four formats are read here: compressed-tensors, which is also what a quantised model is saved as,
AMD Quark, FBGEMM, and GPT-OSS's own, whose experts are MXFP4 and whose linears have 16 bits. The
first three call a weight's scale ``weight_scale`` and a static one of the input ``input_scale``.
"""

import fnmatch
import re
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import nn

from ..functional import SCALE_BLOCK

FINEGRAINED = "fp8"  # is transformers' own; a weight's scale is weight_scale_inv there


@dataclass(frozen=True)
class Layout:
    """How an FP8 linear is stored, or experts.

    Attributes:
        weights: what has one scale: ``"tensor"``, ``"channel"`` or ``"block"``, of 128 x 128; or
            ``"mxfp4"``, which experts alone may be.
        inputs: ``"dynamic"``, ``"static"`` or ``"none"``.
        scale_ub: largest magnitude that a computed scale of the inputs covers.
        scale_fmt: of computed scales of the inputs, as ``FP8Linear`` takes it.
    """

    weights: str
    inputs: str
    scale_ub: Optional[float] = None
    scale_fmt: Optional[str] = None

    def scale_shape(self, n: int, k: int) -> Tuple[int, ...]:
        """As ``FP8Linear`` has it."""
        columns = -(-k // SCALE_BLOCK)
        if self.weights == "block" and columns > 1:
            return (-(-n // SCALE_BLOCK), columns)
        return (1,) if self.weights == "tensor" else (n, 1)


# Of a linear, by its names, in the model and in files; None: it is not FP8.
LayoutOf = Callable[..., Optional[Layout]]


def layouts_of(config: Dict[str, Any]) -> Optional[LayoutOf]:
    """Which linears a ``quantization_config`` says to be FP8, and how; None: it says something
    else, or something that is not known here."""
    reader = _READERS.get(config.get("quant_method", ""))
    return None if reader is None else reader(config)


# ---- compressed-tensors


def _read_compressed_tensors(config: Dict[str, Any]) -> Optional[LayoutOf]:
    groups: List[Tuple[List[str], Layout]] = []
    for group in (config.get("config_groups") or {}).values():
        layout = _of_experts(group) if _is_mxfp4(group["weights"]) else _of_group(group)
        if layout is None:
            return None
        groups.append((group["targets"], layout))
    if not groups:
        return None
    ignored = config.get("ignore") or []

    def layout_of(*names: str) -> Optional[Layout]:
        if any(_is_target(target, name) for target in ignored for name in names):
            return None
        for targets, layout in groups:
            if "Linear" in targets or any(_is_target(t, name) for t in targets for name in names):
                return layout
        return None

    return layout_of


def _is_target(target: str, name: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


def _of_group(group: Dict[str, Any]) -> Optional[Layout]:
    weights, inputs = group["weights"], group.get("input_activations")
    if group.get("output_activations") or not _is_fp8(weights):
        return None
    by = weights["strategy"]
    if by not in ("tensor", "channel", "block"):
        return None
    if by == "block" and weights.get("block_structure") != [SCALE_BLOCK, SCALE_BLOCK]:
        return None
    if inputs is None:
        return Layout(by, "none")
    if not _is_fp8(inputs):
        return None
    if not inputs.get("dynamic"):
        return Layout(by, "static") if inputs["strategy"] == "tensor" else None
    wanted = ("group", SCALE_BLOCK) if by == "block" else ("token", None)
    return (
        Layout(by, "dynamic") if (inputs["strategy"], inputs.get("group_size")) == wanted else None
    )


def _of_experts(group: Dict[str, Any]) -> Optional[Layout]:
    """MXFP4's, if its targets say that they are experts, with inputs as they are."""
    if group.get("output_activations") or group.get("input_activations"):
        return None
    named = all(target.startswith("re:") and "experts" in target for target in group["targets"])
    return Layout("mxfp4", "none") if named else None


def _is_mxfp4(tensor: Dict[str, Any]) -> bool:
    return _MXFP4.items() <= {"symmetric": True, **tensor}.items()


_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def _is_fp8(tensor: Dict[str, Any]) -> bool:
    return (tensor["type"], tensor["num_bits"], tensor.get("symmetric", True)) == ("float", 8, True)


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
                "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
                "modules_to_not_convert": [name.removeprefix("re:") for name in ignored],
                **({} if scale_fmt is None else {"scale_fmt": scale_fmt}),
            }
    targets: Dict[Layout, List[str]] = {}
    for target, layout in layouts.items():
        targets.setdefault(layout, []).append(target)
    if len(targets) == 1 and "mxfp4" not in {layout.weights for layout in targets}:
        targets = {layout: ["Linear"] for layout in targets}
    groups = [_group(layout, names) for layout, names in targets.items()]
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
    }


def layout_of_linear(linear: nn.Module) -> Layout:
    scale = linear.weight_scale_inv
    by = "tensor" if scale.numel() == 1 else "channel" if scale.shape[1] == 1 else "block"
    return Layout(by, linear.activation_scheme, scale_fmt=linear.scale_fmt)


def _group(layout: Layout, targets: List[str]) -> Dict[str, Any]:
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
        weights["block_structure"] = [SCALE_BLOCK, SCALE_BLOCK]
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


# ---- AMD Quark


def _read_quark(config: Dict[str, Any]) -> Optional[LayoutOf]:
    default = _of_quark(config.get("global_quant_config"))
    named = config.get("layer_quant_config") or {}
    layers = {pattern: _of_quark(layer) for pattern, layer in named.items()}
    if default is None or None in layers.values() or config.get("layer_type_quant_config"):
        return None
    excluded = config.get("exclude") or []

    def layout_of(*names: str) -> Optional[Layout]:
        def are(pattern: str) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for name in names)

        if any(are(pattern) for pattern in excluded):
            return None
        return next((layer for pattern, layer in layers.items() if are(pattern)), default)

    return layout_of


def _of_quark(config: Optional[Dict[str, Any]]) -> Optional[Layout]:
    """Output tensors may be quantised: those are keys and values, for a cache in FP8."""
    weight = (config or {}).get("weight")
    if not isinstance(weight, dict) or config.get("bias"):
        return None
    by = {"per_tensor": "tensor", "per_channel": "channel"}.get(weight["qscheme"])
    inputs = config.get("input_tensors")
    if weight["dtype"] != "fp8_e4m3" or by is None or weight.get("is_dynamic"):
        return None
    if inputs is None:
        return Layout(by, "none")
    if inputs["dtype"] != "fp8_e4m3" or inputs["qscheme"] != "per_tensor":
        return None
    return None if inputs.get("is_dynamic") else Layout(by, "static")


# ---- FBGEMM


def _read_fbgemm(config: Dict[str, Any]) -> Optional[LayoutOf]:
    left, bound = config.get("modules_to_not_convert") or [], config["activation_scale_ub"]
    layout = Layout("channel", "dynamic", bound)
    # As transformers has it: a name's beginning or its end, up to a dot.
    patterns = [re.compile(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in left]

    def layout_of(*names: str) -> Optional[Layout]:
        kept = any(name.endswith(end) for end in left for name in names)
        kept = kept or any(pattern.match(name) for pattern in patterns for name in names)
        return None if kept else layout

    return layout_of


# ---- GPT-OSS


def _read_mxfp4(_: Dict[str, Any]) -> LayoutOf:
    def layout_of(*names: str) -> Optional[Layout]:
        return Layout("mxfp4", "none") if any(".experts." in name for name in names) else None

    return layout_of


_READERS: Dict[str, Callable[[Dict[str, Any]], Optional[LayoutOf]]] = {
    "compressed-tensors": _read_compressed_tensors,
    "fbgemm_fp8": _read_fbgemm,
    "mxfp4": _read_mxfp4,
    "quark": _read_quark,
}
