"""Experts in FP8 checkpoints: a linear for each, as compressed-tensors and AMD Quark store them, or
all in one tensor, as FBGEMM does. MXFP4 experts beside FP8 linears: as compressed-tensors packs
them, or as GPT-OSS's files have them. What a model calls them there is asked of transformers."""

import importlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import nn

from ..functional import SCALE_BLOCK
from .convert_experts import LOADED, PER_TOKEN, Pair, Stays, gate_of, is_experts, is_transposed
from .experts import WEIGHTS, Experts
from .formats import BLOCK as SCALES
from .formats import Layout, LayoutOf
from .mxfp4 import BLOCK
from .names import listed_names

NO_BOUND = ", without a bound on its inputs' scales"

# Of one expert's linears: those that gate_up_proj joins, in order, and down's, by either name.
_GATE_UP, _DOWN = ("gate_proj", "up_proj"), ("down_proj",)
_MIXTRALS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


# ---- loading


def place_experts(model: Any, layout_of: LayoutOf) -> None:
    """Puts an empty :class:`Experts` in the place of each module whose experts a checkpoint has in
    FP8."""
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    for name, names in listed_names(model, modules, {}).items():
        module = modules[name]
        gate_up, down = (_layout(layout_of, names, linears) for linears in (_GATE_UP, _DOWN))
        if gate_up is None and down is None:
            continue
        try:
            if gate_up != down:
                raise Stays("has its down_proj in another layout than its gate_proj and up_proj")
            model.set_submodule(name, _empty(module, gate_up))
        except Stays as reason:
            raise ValueError(
                f"{name} is FP8 in this checkpoint, and cannot be taken over: it {reason}; load "
                "this model without fp8_checkpoints"
            ) from None


def _layout(
    layout_of: LayoutOf, experts: Iterable[str], linears: Tuple[str, ...]
) -> Optional[Layout]:
    for linear in linears:
        for stored in (linear, _MIXTRALS[linear]):
            layout = layout_of(*(f"{name}.0.{stored}" for name in experts))
            if layout is not None:
                return layout
    return None


def _empty(module: nn.Module, layout: Layout) -> Experts:
    gate, transposed, pairs = gate_of(module), is_transposed(module), []
    for name in WEIGHTS:
        shape = module._parameters[name].shape
        experts, n, k = (shape[0], shape[2], shape[1]) if transposed else shape
        if layout.weights == "mxfp4" and k % BLOCK:
            raise Stays(f"has rows of {k} values, not whole blocks of {BLOCK}")
        if layout.weights == "block" and layout.block != SCALES:
            raise Stays(f"has scale blocks of {layout.block}, not {SCALES}")
        if layout.weights == "block" and (n // 2 if name == "gate_up_proj" else n) % SCALE_BLOCK:
            raise Stays(f"has {n} rows, not whole blocks of {SCALE_BLOCK}")
        with module._parameters[name].device:
            pairs.append(_empty_pair(layout.weights, experts, n, k))
    biases = tuple(module._parameters.get(f"{name}_bias") for name in WEIGHTS)
    scheme = "dynamic" if layout.inputs == "static" else layout.inputs
    new = Experts(*pairs, biases, gate, scheme, transposed, layout.scale_fmt)
    new.loaded_as = LOADED.format("FP8" if new.is_fp8 else "MXFP4")
    new.loaded_as += PER_TOKEN if layout.inputs == "static" else ""
    new.loaded_as += NO_BOUND if layout.scale_ub is not None else ""
    return new


def _empty_pair(weights: str, experts: int, n: int, k: int) -> Pair:
    if weights == "mxfp4":
        shapes, dtypes = ((n, k // 2), (n, k // BLOCK)), (torch.uint8, torch.uint8)
    else:
        blocks = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
        shapes = (n, k), blocks if weights == "block" else (n, 1)
        dtypes = torch.float8_e4m3fn, torch.float32
    weight, scales = (torch.empty(experts, *s, dtype=d) for s, d in zip(shapes, dtypes))
    return weight, scales


def with_conversions(conversions: List[Any], model: Any) -> List[Any]:
    """transformers' conversions of a model's weights, and those of its experts in FP8 or MXFP4."""
    core = importlib.import_module("transformers.core_model_loading")
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, Experts)}
    scales, result = [_scales_operation()()], []
    for name in names:
        own = [c for c in conversions if _makes(c, core, f"{name}.gate_up_proj")]
        if not own:
            result += _generic(core, name, scales)
        for which in WEIGHTS:
            result += _one_tensor(core, rf"\.{name}.{which}", "_blocks", "_scales")
    for conversion in conversions:
        result.append(conversion)
        if any(_makes(conversion, core, f"{name}.{which}") for name in names for which in WEIGHTS):
            sources = conversion._original_source_patterns
            targets = conversion._original_target_patterns
            packed = [f"{source}_packed" for source in sources]
            result.append(conversion.copy(packed, targets, operations=conversion.operations))
            sources = [f"{source}_scale" for source in sources]
            targets = [f"{target}_scale_inv" for target in targets]
            result.append(conversion.copy(sources, targets, operations=scales))
    return result


def _makes(conversion: Any, core: Any, target: str) -> bool:
    if not isinstance(conversion, core.WeightConverter):
        return False
    return any(pattern.endswith(target) for pattern in conversion._original_target_patterns)


def _generic(core: Any, name: str, scales: List[Any]) -> List[Any]:
    """Of a model whose own checkpoints hold all experts in one tensor: of files with a linear for
    each, and of files as its own."""
    made = []
    merge, join = core.MergeModulelist(dim=0), core.Concatenate(dim=1)
    for which, linears in zip(WEIGHTS, (_GATE_UP, _DOWN)):
        # Patterns: a dot by itself is any character, and shared_experts are others.
        sources = [rf"\.{name}.*.{linear}.weight" for linear in linears]
        target = rf"\.{name}.{which}"
        operations = [merge, join] if len(sources) > 1 else [merge]
        packed = [f"{source}_packed" for source in sources]
        made += [core.WeightConverter(names, target, operations) for names in (sources, packed)]
        made += _one_tensor(core, target, "", "_scale")
        sources = [f"{source}_scale" for source in sources]
        made.append(core.WeightConverter(sources, f"{target}_scale_inv", scales))
    return made


def _one_tensor(core: Any, target: str, weight: str, scale: str) -> List[Any]:
    """Of all experts in one tensor, whose name, and its scales', end so."""
    own, scales = [_one_tensor_operation()()], [_scales_operation()()]
    return [
        core.WeightConverter(f"{target}{weight}", target, own),
        core.WeightConverter(f"{target}{scale}", f"{target}_scale_inv", scales),
    ]


def _operation(convert: Callable[..., Dict[str, torch.Tensor]]) -> type:
    """A class of transformers' operations on tensors as they are loaded."""
    core = importlib.import_module("transformers.core_model_loading")

    class Operation(core.ConversionOps):
        def convert(self, tensors: Dict, full_layer_name: str, model: Any, **rest: Any) -> Dict:
            experts = model.get_submodule(full_layer_name.rpartition(".")[0])
            return {full_layer_name: convert(tensors, full_layer_name, experts, **rest)}

        @property
        def reverse_op(self) -> Any:
            return self

    return Operation


def _scales_operation() -> type:
    return _operation(_joined_scales)


def _one_tensor_operation() -> type:
    return _operation(_as_ours)


def _as_ours(tensors: Dict, _: str, experts: Experts, **rest: Any) -> torch.Tensor:
    (weight,) = tensors.values()
    weight = weight[0] if isinstance(weight, list) else weight
    if not experts.is_fp8:
        return weight.flatten(2)  # [E, N, K / 32, 16]
    return weight.transpose(1, 2).contiguous() if experts.is_transposed else weight


def _joined_scales(
    tensors: Dict, name: str, experts: Experts, source_patterns: List[str], **_: Any
) -> torch.Tensor:
    """Scales of any shape that mean one value, one a row or one a block, as ``Experts`` has
    them."""
    own = getattr(experts, name.rpartition(".")[2])
    count, rows, columns = own.shape
    parts = [tensors[pattern] for pattern in source_patterns]
    parts = [part if isinstance(part, list) else [part] for part in parts]
    if len(parts) == 1 and len(parts[0]) == 1 < count:  # all experts in one tensor
        scales = parts[0][0].to(own.dtype)
        return scales.reshape(count, -1, columns).expand(count, rows, columns)
    made = []
    for pattern, part in zip(source_patterns, parts):
        if len(part) != count:
            raise ValueError(f"{pattern} must be {count} scales for {name}, got {len(part)}")
        made.append(torch.stack([_spread(s, rows // len(parts), columns) for s in part]))
    return torch.cat(made, 1).to(own.dtype)


def _spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """One expert's, to ``[rows, columns]``."""
    if scale.numel() not in (1, rows * columns):
        raise ValueError(
            f"a scale must be one, or {rows} x {columns} values, got {tuple(scale.shape)}"
        )
    return scale.reshape(-1, columns if scale.numel() > 1 else 1).expand(rows, columns)


# ---- saving


def store_experts(model: Any, state_dict: Dict[str, torch.Tensor], suffix: str) -> None:
    """Gives a state dict, in place, the names and shapes that checkpoints have: a linear for each
    expert, where a model's own files have one, and where nothing speaks against it; else the
    model's own tensors. A scale's name is the weight's, and ``suffix``. An MXFP4 weight's name is
    that of a linear's, and ``packed``; of all experts' in one tensor, as in GPT-OSS's files, that
    and ``blocks``, beside ``scales``."""
    core = importlib.import_module("transformers.core_model_loading")
    for name, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        if layout_of_experts(module).weights == "block" and module.down_proj.shape[2] % SCALE_BLOCK:
            raise ValueError(
                f"{name} has {module.down_proj.shape[2]} rows each of gate and up, which are not "
                f"whole blocks of {SCALE_BLOCK}, and a file has their scales apart: save the model "
                "before quantize_model_"
            )
        for which, linears in zip(WEIGHTS, (_GATE_UP, _DOWN)):
            key = f"{name}.{which}"
            weight, scale = state_dict.pop(key), state_dict.pop(f"{key}_scale_inv")
            split = core.revert_weight_conversion(model, {key: weight})
            if len(split) > 1:
                parts = core.revert_weight_conversion(model, {key: scale})
                scales = {
                    f"{part}_{suffix}": value.reshape(-1, scale.shape[2]).clone()
                    for part, value in parts.items()
                }
                # transformers splits a weight of this name so, once more.
                weights = {key: weight}
                if not module.is_fp8:
                    weights = {f"{part}_packed": value for part, value in split.items()}
                state_dict.update({**weights, **scales})
            elif _needs_one_tensor(module) or not any(w is weight for w in split.values()):
                if not module.is_fp8:
                    state_dict[f"{key}_blocks"] = weight.unflatten(2, (-1, BLOCK // 2))
                    state_dict[f"{key}_scales"] = scale
                    continue
                state_dict[key] = weight  # in the model's own layout, which its conversion may make
                if module.is_transposed and any(w is weight for w in split.values()):
                    state_dict[key] = weight.transpose(1, 2).contiguous()
                state_dict[f"{key}_{suffix}"] = scale
            else:
                for expert in range(module.num_experts):
                    weights, scales = (
                        tensor[expert].chunk(len(linears)) for tensor in (weight, scale)
                    )
                    for linear, w, s in zip(linears, weights, scales):
                        stored = f"{name}.{expert}.{linear}.weight"
                        state_dict[stored if module.is_fp8 else f"{stored}_packed"] = w
                        state_dict[f"{stored}_{suffix}"] = s.clone()


def _needs_one_tensor(module: Experts) -> bool:
    return module.interleaved or module.gate_up_proj_bias is not None


def layout_of_experts(module: Experts) -> Layout:
    if not module.is_fp8:
        return Layout("mxfp4", "none")
    by_row = module.gate_up_proj_scale_inv.shape[1] == module.gate_up_proj.shape[1]
    by = "channel" if by_row else "block"
    return Layout(by, module.activation_scheme, scale_fmt=module.scale_fmt)
