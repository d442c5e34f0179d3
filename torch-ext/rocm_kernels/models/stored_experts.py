"""What a checkpoint's files have for a model's experts, and the module that is made ready for them.

Files have a linear for each expert, as compressed-tensors and AMD Quark write them, or all experts
in one tensor, as FBGEMM and GPT-OSS's files do. What they hold decides: a config's lists name
linears, and experts in one tensor were none for the tool that wrote it. FP8 and MXFP4 that
``fused_moe`` can compute go into an :class:`Experts` as they are; what it cannot is dequantised
into the model's own module.
"""

import importlib
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ..functional import SCALE_BLOCK
from .convert_experts import (
    DEQUANTISED,
    LOADED,
    PER_TOKEN,
    NotConvertible,
    Pair,
    gate_of,
    is_experts,
    is_transposed,
    require_limits,
    weights_of,
)
from .experts import WEIGHTS, Experts
from .formats import Layout, LayoutOf
from .mxfp4 import BLOCK
from .names import listed_names
from .stored_tensors import Header

NO_BOUND = ", without a bound on its inputs' scales"

# Ends of names in files, of a weight and of its scale.
WEIGHT_ENDS = ("", "_packed", "_blocks")
SCALE_ENDS = ("_scale", "_scale_inv", "_scales", "_weight_scale", "_weight_scale_inv")

# Blocks of weights that share a scale, of which files tell by the scales' shape.
_BLOCKS = ((SCALE_BLOCK, SCALE_BLOCK), (32, 32), (1, 32), (64, 64), (1, SCALE_BLOCK), (1, 64))
# Of gate and up in one tensor: none of the scales is of both.
_BLOCKS_APART = "blocks of gate and blocks of up"


def makes_several(conversion: Any) -> bool:
    """Whether a conversion makes several tensors, as of Ernie's experts, of which files have the
    text's and the images' in one row."""
    return len(conversion._original_target_patterns) > 1


def _of_several(model: Any, names: Iterable[str]) -> List[str]:
    """Names of experts that share such a conversion."""
    core = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(model)
    targets = [
        target.rpartition(".")[0]
        for c in conversions
        if isinstance(c, core.WeightConverter) and makes_several(c)
        for target in c._original_target_patterns
    ]
    return [name for name in names if any(t and name.endswith(t) for t in targets)]


def place_finegrained_experts(
    model: Any, config: Any, stored: Dict[str, Dict[str, Header]]
) -> List[str]:
    """Does for experts of a finegrained FP8 checkpoint what :func:`place_experts` does, where
    transformers' own ``FP8Experts`` could not hold them: these have gates, no biases and whole
    blocks. Returns their names."""
    names = []
    for name, module in model.named_modules():
        if not is_experts(module) or _held_by_transformers(module, config.weight_block_size):
            continue
        held = stored.get(name, {}).values()
        names += [name] if any(h.dtype == torch.float8_e4m3fn for h in held) else []
    by = "channel" if config.weight_block_size is None else "block"
    scale_fmt = config.scale_fmt if getattr(config, "scale_fmt", None) == "ue8m0" else None
    layout = Layout(by, config.activation_scheme, scale_fmt=scale_fmt)
    place_experts(model, lambda *_: layout, {name: stored[name] for name in names}, names)
    return names


def _held_by_transformers(module: nn.Module, block: Optional[Sequence[int]]) -> bool:
    inner = weights_of(module)[1].shape[1 if is_transposed(module) else 2]
    return (
        WEIGHTS[0] in module._parameters
        and getattr(module, "has_gate", True)
        and not getattr(module, "has_bias", False)
        and not is_transposed(module)
        and (block is None or inner % block[0] == 0)
    )


def is_taken(module: nn.Module) -> bool:
    """Whether :func:`place_experts` has seen to a module."""
    return isinstance(module, Experts) or hasattr(module, "dequantised_from")


def place_experts(
    model: Any,
    layout_of: LayoutOf,
    stored: Dict[str, Dict[str, Header]],
    only: Optional[Sequence[str]] = None,
) -> None:
    """Makes each module of experts ready for what a checkpoint's files have of it.

    Args:
        layout_of: what the config says; of it the inputs are taken, and where nothing is known of
            the files, all.
        stored: what the files hold, by module.
        only: names of modules; None: all.
    """
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    modules = {n: module for n, module in modules.items() if only is None or n in only}
    shared = _of_several(model, modules)
    for name, names in listed_names(model, modules, {}).items():
        module, headers = modules[name], stored.get(name, {})
        layout = _layout(layout_of, names, headers)
        if stored:
            held = _held(module, headers)
        else:
            held = None if layout is None else _Held(layout.weights, True)
        if held is None:
            continue
        try:
            if name in shared:
                raise NotConvertible(
                    "has its experts in one row with another module's in the files"
                )
            if held.weights is None:
                raise NotConvertible(held.why)
            require_limits(model, name, module)
            model.set_submodule(name, _empty(module, held, layout or Layout("channel", "none")))
        except NotConvertible as reason:
            module.dequantised_from = DEQUANTISED.format(held.kind, reason)


def _layout(
    layout_of: LayoutOf, names: Iterable[str], headers: Dict[str, Header]
) -> Optional[Layout]:
    """What the config says of the experts' linears, by the names that these may have."""
    found = [re.fullmatch(r"(.+)\.(\d+\.\w+)\.weight(_packed)?", name) for name in headers]
    prefixes = {*names, *(match[1] for match in found if match)}
    linears = {match[2].partition(".")[2]: match[2] for match in found if match}
    linears = linears or {name: f"0.{name}" for name in ("gate_proj", "up_proj", "down_proj", "w1")}
    layouts = (layout_of(*(f"{p}.{linear}" for p in prefixes)) for linear in linears.values())
    return next((layout for layout in layouts if layout is not None), None)


class _Held(NamedTuple):
    """What files have for a layer's experts.

    Attributes:
        weights: ``"channel"``, ``"block"`` or ``"mxfp4"``; None: what :class:`Experts` cannot hold.
        is_apart: whether gate and up are tensors of their own, and so are their scales.
        kind: in words.
        why: they cannot be held.
    """

    weights: Optional[str]
    is_apart: bool
    kind: str = "FP8"
    why: str = ""


_PLAIN = (torch.float32, torch.float16, torch.bfloat16)


def _held(module: nn.Module, headers: Dict[str, Header]) -> Optional[_Held]:
    """What files have for a layer's experts; None: 16 bits, or nothing."""
    weights = {name: header for name, header in headers.items() if not _SMALL.search(name)}
    kinds: Dict[str, str] = {}
    for name, header in weights.items():
        kinds[name] = "16 bits" if header.dtype in _PLAIN else _kind(module, name, headers)
    found = set(kinds.values())
    if found <= {"16 bits"}:
        return None
    is_apart = any(re.search(r"\.\d+\.\w+\.weight(_packed)?$", name) for name in weights)
    is_apart = is_apart or _BLOCKS_APART in found
    same = {"tensor": "channel", _BLOCKS_APART: "block"}
    found = {same.get(kind, kind) for kind in found}
    quantised = {weights[name].dtype for name, kind in kinds.items() if kind != "16 bits"}
    words = "MXFP4" if quantised == {torch.uint8} else "FP8"
    if len(found) > 1:
        return _Held(None, is_apart, words, "has its weights in more than one format")
    (kind,) = found
    if kind not in ("channel", "block", "mxfp4"):
        return _Held(None, is_apart, words, f"has {kind}")
    if torch.float8_e5m2 in quantised:
        return _Held(None, is_apart, words, "has weights of float8_e5m2")
    return _Held(kind, is_apart, words)


# Scales and biases, by the ends of their names.
_SMALL = re.compile(r"_scales?(_inv)?$|[._]bias$|_zero_point$|_global_scale$|_shape$")


def _kind(module: nn.Module, name: str, headers: Dict[str, Header]) -> str:
    """Tells how a quantised weight is scaled."""
    dtype, shape = headers[name]
    base = re.sub("(_packed|_blocks)$", "", name)
    scale = next((headers[base + end] for end in SCALE_ENDS if base + end in headers), None)
    if scale is None:
        raise ValueError(
            f"{name} is {dtype} in the files, which have no scale for it: use the files of which "
            "none is left out"
        )
    if dtype == torch.uint8 and name != base:
        return "mxfp4"
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(
            f"{name} is {dtype} in the files, and experts can be FP8, MXFP4 or 16 bits here: load "
            "this model without fp8_checkpoints"
        )
    scales = scale.shape
    if len(shape) == 2:
        return _scaled_by(scales, *shape)
    experts, n, k = shape  # all experts in one tensor, whose scales may be each one's
    scales = scales[1:] if scales[:1] == (experts,) else scales
    if is_transposed_in_files(module, name.rpartition(".")[2], shape):
        n, k, scales = k, n, scales if n in scales or k in scales else scales[::-1]
    if getattr(module, "is_concatenated", True) and are_apart(scales, n, k):
        return _BLOCKS_APART
    return _scaled_by(scales, n, k)


def _scaled_by(scales: Tuple[int, ...], n: int, k: int) -> str:
    if len(scales) == 4:  # ModelOpt's, [rows, 1, columns, 1]
        scales = scales[::2]
    if all(size == 1 for size in scales):
        return "tensor"
    if scales in ((n,), (n, 1), (1, n)):
        return "channel"
    block = block_of(scales, n, k)
    if block is not None:
        return "block" if block == (SCALE_BLOCK, SCALE_BLOCK) else "{} x {} blocks".format(*block)
    if scales in ((2,), (2, 1)):  # of gate, and of up
        return "tensor"
    return f"scales of {scales} for weights of {(n, k)}"


def block_of(scales: Sequence[int], n: int, k: int) -> Optional[Tuple[int, int]]:
    """The rows and columns of a block, of those that are known."""
    for rows, columns in _BLOCKS:
        if tuple(scales) == (-(-n // rows), -(-k // columns)):
            return rows, columns
    return None


def are_apart(scales: Sequence[int], n: int, k: int) -> bool:
    """Whether scales are of gate's blocks, and then of up's, each with a last one that is not
    whole, and not of the blocks of both in one."""
    apart = 2 * -(-n // 2 // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    return n % 2 == 0 and tuple(scales) == apart and apart[0] != -(-n // SCALE_BLOCK)


def is_transposed_in_files(module: nn.Module, which: str, shape: Tuple[int, ...]) -> bool:
    """Whether all experts in one tensor of that shape are ``[E, K, N]`` there; what could be either
    is as the model has it."""
    own = next((p for name, p in module._parameters.items() if which.startswith(name)), None)
    own_shape = shape if own is None else tuple(own.shape)
    return is_transposed(module) == (shape == own_shape)


def _empty(module: nn.Module, held: _Held, layout: Layout) -> Experts:
    gate, transposed = gate_of(module), is_transposed(module)
    if held.is_apart:
        gate = gate._replace(interleaved=False)
    shapes = [tuple(weight.shape) for weight in weights_of(module)]
    shapes = [(s[0], s[2], s[1]) if transposed else s for s in shapes]
    (experts, _, hidden), inner = shapes[0], shapes[1][2]
    if held.weights == "mxfp4" and hidden % BLOCK:
        raise NotConvertible(f"has rows of {hidden} values, not whole blocks of {BLOCK}")
    padded = padded_size(held.weights, inner, held.is_apart)
    device = module._parameters[WEIGHTS[0]].device
    pairs, biases = [], []
    for name, n, k in ((WEIGHTS[0], 2 * padded, hidden), (WEIGHTS[1], hidden, padded)):
        bias = module._parameters.get(f"{name}_bias")
        pairs.append(_empty_pair(held.weights, experts, n, k, device))
        biases.append(None if bias is None else bias.new_empty(experts, n, device=device))
    scheme = "dynamic" if layout.inputs == "static" else layout.inputs
    scheme = "none" if held.weights == "mxfp4" else scheme
    scale_fmt = layout.scale_fmt if scheme == "dynamic" else None
    new = Experts(*pairs, tuple(biases), gate, scheme, transposed, scale_fmt, inner)
    new.loaded_as = LOADED.format(held.kind)
    new.loaded_as += PER_TOKEN if layout.inputs == "static" else ""
    new.loaded_as += NO_BOUND if layout.scale_ub is not None else ""
    new.loaded_as += f", {layout.instead}" if layout.instead is not None else ""
    new.loaded_as += new.padding_in_words
    return new


def padded_size(weights: str, inner: int, is_apart: bool = True) -> int:
    """The number of gate's rows, up's rows and down's columns in :class:`Experts`: whole blocks,
    where no block may have rows of both gate and up."""
    block = {"block": SCALE_BLOCK if is_apart else 1, "mxfp4": BLOCK}.get(weights, 1)
    return -(-inner // block) * block


def _empty_pair(weights: str, experts: int, n: int, k: int, device: torch.device) -> Pair:
    if weights == "mxfp4":
        shapes, dtypes = ((n, k // 2), (n, k // BLOCK)), (torch.uint8, torch.uint8)
    else:
        blocks = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
        shapes = (n, k), blocks if weights == "block" else (n, 1)
        dtypes = torch.float8_e4m3fn, torch.float32
    weight, scales = (
        torch.empty(experts, *s, dtype=d, device=device) for s, d in zip(shapes, dtypes)
    )
    return weight, scales if weights == "mxfp4" else scales.fill_(torch.nan)


def layout_of_experts(module: Experts) -> Layout:
    if not module.is_fp8:
        return Layout("mxfp4", "none")
    by_row = module.gate_up_proj_scale_inv.shape[1] == module.gate_up_proj.shape[1]
    by = "channel" if by_row else "block"
    return Layout(by, module.activation_scheme, scale_fmt=module.scale_fmt)
