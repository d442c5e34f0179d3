"""Joins the tensors that checkpoint files hold for experts, with their scales, into the parameters
of the module that holds all experts."""

import importlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ..functional import SCALE_BLOCK
from ..reference import dequantize_expert
from .convert_experts import is_experts, is_transposed
from .experts import WEIGHTS, Experts
from .mxfp4 import BLOCK
from .regroup import decoded
from .stored_experts import (
    SCALE_ENDS,
    WEIGHT_ENDS,
    are_apart,
    block_of,
    is_transposed_in_files,
    makes_several,
)

_ENDS = (*WEIGHT_ENDS, *SCALE_ENDS)
# Of one expert's linears: those that a model joins, in order, and down's.
_LINEARS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def add_expert_conversions(conversions: List[Any], model: Any) -> List[Any]:
    """transformers' conversions of a model's weights, with those of its experts' made to take them
    in every form that files have: one by one or in one tensor, with scales or without."""
    core = importlib.import_module("transformers.core_model_loading")
    targets = {
        f"{name.rpartition('.')[2]}.{which}"
        for name, module in model.named_modules()
        if is_experts(module) or isinstance(module, Experts)
        for which in _LINEARS
        if which in module._parameters
    }
    result, one_by_one = [], set()
    for conversion in conversions:
        made = _made(conversion, core, targets)
        if not made:
            result.append(conversion)
            continue
        sources = conversion._original_source_patterns
        one_by_one |= {target for target in made if any("*" in source for source in sources)}
        own = conversion.operations
        # transformers asks by class whether an operation makes many tensors of many, as Ernie's.
        base = type(own[0]) if makes_several(conversion) else core.ConversionOps
        ends = [f"{source}{end}" for source in sources for end in _ENDS]
        joined = _operation(base)(own, conversion)
        result.append(
            conversion.copy(ends, conversion._original_target_patterns, operations=[joined])
        )
    generic, generic_operation = [], _operation(core.ConversionOps)
    for target in sorted(targets):
        name, _, which = target.partition(".")
        # Patterns: a dot by itself is any character, and shared_experts are others.
        forms = [(rf"\.{name}.{which}", "")]
        if target not in one_by_one:
            forms.append((rf"\.{name}.*.", ".weight"))
        for before, after in forms:
            linears = [f"{linear}{after}" for linear in _LINEARS[which]] if after else [""]
            sources = [f"{before}{linear}{end}" for linear in linears for end in _ENDS]
            generic.append(
                core.WeightConverter(sources, rf"\.{name}.{which}", [generic_operation([], None)])
            )
        biases = [rf"\.{name}.*.{linear}.bias" for linear in _LINEARS[which]]
        bias = rf"\.{name}.{which}_bias"
        for sources in (biases, [bias]):
            generic.append(core.WeightConverter(sources, bias, [_bias_operation()()]))
    return result + generic


def restore_conversions(conversions: List[Any]) -> List[Any]:
    """Conversions that were used in loading, with transformers' own in the place of those that
    :func:`add_expert_conversions` made, by which it saves."""
    kept = []
    for conversion in conversions:
        operations = getattr(conversion, "operations", None) or [None]
        own = getattr(operations[0], "stands_for", conversion)
        kept += [] if own is None else [own]
    return kept


def _made(conversion: Any, core: Any, targets: Sequence[str]) -> List[str]:
    if not isinstance(conversion, core.WeightConverter):
        return []
    patterns = conversion._original_target_patterns
    return [t for t in targets if any(pattern.endswith(t) for pattern in patterns)]


class _Part(NamedTuple):
    """What files have under one name: of each expert a weight, or one of all; so its scales."""

    weights: List[torch.Tensor]
    scales: List[torch.Tensor]


def _operation(base: type) -> type:
    class JoinedExperts(base):
        """Weights and scales of experts, to the parameters of the module that has them.

        Args:
            operations: transformers' own, for a module of its own.
            stands_for: the conversion that has them.
        """

        hf_quantizer = True  # or transformers casts what it reads to the parameter's type first

        def __init__(self, operations: List[Any], stands_for: Any) -> None:
            self.operations, self.stands_for = operations, stands_for

        def convert(
            self,
            tensors: Dict[str, Any],
            source_patterns: List[str],
            target_patterns: List[str],
            full_layer_name: str,
            model: Any,
            **rest: Any,
        ) -> Dict[str, torch.Tensor]:
            path, _, which = full_layer_name.rpartition(".")
            module = model.get_submodule(path)
            parts = dict(_parts(tensors, source_patterns))
            if isinstance(module, Experts):
                weight, scale = _joined(module, which, list(parts.values()))
                return {full_layer_name: weight, f"{full_layer_name}_scale_inv": scale}
            dtype = module._parameters[which].dtype
            plain = {source: _plain(module, which, part, dtype) for source, part in parts.items()}
            if self.stands_for is None:
                return {full_layer_name: _as_the_model_has_it(module, which, list(plain.values()))}
            for operation in self.operations:
                plain = operation.convert(
                    plain,
                    source_patterns=[*parts],
                    target_patterns=target_patterns,
                    full_layer_name=full_layer_name,
                    model=model,
                    **rest,
                )
            return plain

        @property
        def reverse_op(self) -> Any:
            return self

    return JoinedExperts


def _parts(tensors: Dict[str, Any], patterns: List[str]) -> Iterator[Tuple[str, _Part]]:
    """Yields the weights and scales of each group of patterns, by the name of the weights; patterns
    are names with each of the ends in turn."""
    for start in range(0, len(patterns), len(_ENDS)):
        found: Tuple[List[torch.Tensor], List[torch.Tensor]] = ([], [])
        for i, pattern in enumerate(patterns[start : start + len(_ENDS)]):
            given = tensors.pop(pattern, [])
            found[i >= len(WEIGHT_ENDS)].extend(given if isinstance(given, list) else [given])
        if found[0]:
            yield patterns[start], _Part(*found)


# ---- for Experts


def _joined(module: Experts, which: str, parts: List[_Part]) -> Tuple[torch.Tensor, torch.Tensor]:
    """A weight and its scales as :class:`Experts` holds them, padded with zeros."""
    own, own_scale = getattr(module, which), getattr(module, f"{which}_scale_inv")
    device = parts[0].weights[0].device
    weight = torch.zeros(own.shape, dtype=torch.uint8, device=device)
    scale = torch.ones(own_scale.shape, dtype=own_scale.dtype, device=device)
    if own_scale.dtype == torch.uint8:
        scale.fill_(127)  # 1, as a power of two
    parts = [_each(module, which, part) for part in parts]
    if len(parts) == 1 and which == WEIGHTS[0] and not module.interleaved and _is_padded(module):
        parts = _halves(parts[0])
    rows, scale_rows = weight.shape[1] // len(parts), scale.shape[1] // len(parts)
    for i, part in enumerate(parts):
        _require_all(which, part, module.num_experts)
        for expert, (w, s) in enumerate(zip(part.weights, part.scales)):
            n, k = w.shape
            weight[expert, i * rows : i * rows + n, :k] = w.view(torch.uint8)
            s = _spread(s, n, k, scale_rows, scale.shape[2], module.is_fp8)
            scale[expert, i * scale_rows : i * scale_rows + s.shape[0], : s.shape[1]] = s
        part.weights.clear(), part.scales.clear()
    return weight.view(own.dtype), scale


def _is_padded(module: Experts) -> bool:
    return module.gate_up_proj.shape[1] != 2 * module.intermediate_size


def _each(module: Experts, which: str, part: _Part) -> _Part:
    """Divides a tensor of all experts into each expert's, in ``[N, K]``."""
    weights, scales = part
    if len(weights) != 1 or weights[0].dim() < 3:
        return part
    (weight,) = weights
    if weight.dim() == 4:  # MXFP4: [E, N, K / 32, 16]
        return _Part(list(weight.flatten(2)), list(scales[0]))
    own, inner = getattr(module, which), module.intermediate_size
    n, k = (2 * inner, own.shape[2]) if which == WEIGHTS[0] else (own.shape[1], inner)
    is_turned = module.is_transposed if n == k else weight.shape[1:] != (n, k)
    each = [w.t().contiguous() if is_turned else w for w in weight]
    scale = scales[0]
    if scale.shape[:1] != weight.shape[:1]:  # one of all
        return _Part(each, [scale] * len(each))
    return _Part(each, [s.t() if is_turned and s.dim() == 2 else s for s in scale])


def _halves(part: _Part) -> List[_Part]:
    """Gate's and up's of what files have joined, where scales do not join them."""
    halves: Tuple[_Part, _Part] = (_Part([], []), _Part([], []))
    for weight, scale in zip(*part):
        scales = scale.chunk(2) if scale.dim() == 2 and scale.shape[0] > 1 else (scale, scale)
        for half, w, s in zip(halves, weight.chunk(2), scales):
            half.weights.append(w)
            half.scales.append(s)
    return list(halves)


def _require_all(which: str, part: _Part, experts: int) -> None:
    for what, found in (("weights", part.weights), ("scales", part.scales)):
        if len(found) != experts:
            raise ValueError(f"{which} must have {what} of {experts} experts, got {len(found)}")


def _spread(
    scale: torch.Tensor, n: int, k: int, rows: int, columns: int, is_fp8: bool
) -> torch.Tensor:
    """One expert's scales of ``[n, k]``, of any shape that means one value, one a row or one a
    block; for :class:`Experts`, which has at most rows x columns of them."""
    scale = decoded(scale) if is_fp8 else scale.view(torch.uint8)
    if is_fp8 and columns == 1 and rows >= n:  # a scale a row
        if scale.numel() in (1, n):
            return scale.reshape(-1, 1).expand(n, 1)
        if scale.numel() == 2:
            return scale.reshape(2, 1).repeat_interleave(n // 2, 0)
    blocks = (-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)) if is_fp8 else (n, -(-2 * k // BLOCK))
    if scale.numel() != blocks[0] * blocks[1] or blocks[0] > rows:
        raise ValueError(f"scales of {tuple(scale.shape)} for a weight of {(n, k)}")
    return scale.reshape(blocks)


# ---- for a model's own module, in 16 bits


def _plain(module: nn.Module, which: str, part: _Part, dtype: torch.dtype) -> List[torch.Tensor]:
    """Weights in a dtype: what is quantised is multiplied with its scales, in float32."""
    weights, scales = part
    if not scales:
        return [weight.to(dtype) for weight in weights]
    if len(weights) == 1 and weights[0].dim() == 4:
        pairs = zip(weights[0].flatten(2), scales[0])
        made = torch.stack([dequantize_expert(*pair).to(dtype) for pair in pairs])
        own, transposed = module._parameters[which].shape, is_transposed(module)
        made = made[:, :, : own[1 if transposed else 2]]  # files have whole blocks
        return [(made.mT if transposed else made).contiguous()]
    if len(weights) == 1 and weights[0].dim() == 3:
        return [_all_dequantised(module, which, weights[0], scales[0], dtype)]
    quantised = [w for w in weights if w.element_size() == 1]
    if len(quantised) != len(scales):
        raise ValueError(
            f"{which} must have a scale for each expert that is quantised, got {len(scales)} for "
            f"{len(quantised)}"
        )
    rest = iter(scales)
    return [
        _dequantised(w, next(rest)).to(dtype) if w.element_size() == 1 else w.to(dtype)
        for w in weights
    ]


def _all_dequantised(
    module: nn.Module, which: str, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantises a tensor of all experts, in the layout that it has in the file."""
    scale = decoded(scale)
    if scale.shape[:1] != weight.shape[:1]:
        return (weight.float() * scale).to(dtype)
    turned = is_transposed_in_files(module, which, tuple(weight.shape))
    made = []
    for w, s in zip(weight, scale):
        w = w.t() if turned else w
        s = s.t() if turned and s.dim() == 2 else s
        value = _dequantised(w, s).to(dtype)
        made.append(value.t() if turned else value)
    return torch.stack(made)


def _dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` in float32, by scales of any shape that is known."""
    if weight.dtype == torch.uint8:
        return dequantize_expert(weight, scale.view(torch.uint8)).float()
    scale, (n, k) = decoded(scale), weight.shape
    scale = scale.flatten(2).flatten(0, 1) if scale.dim() == 4 else scale  # ModelOpt's
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    if tuple(scale.shape) in ((n,), (n, 1), (1, n), (2,), (2, 1)):
        return weight.float() * scale.reshape(-1, 1).repeat_interleave(n // scale.numel(), 0)
    if are_apart(scale.shape, n, k):
        return torch.cat([_dequantised(w, s) for w, s in zip(weight.chunk(2), scale.chunk(2))])
    block = block_of(scale.shape, n, k)
    if block is None:
        raise ValueError(f"scales of {tuple(scale.shape)} for a weight of {(n, k)}")
    spread = scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return weight.float() * spread


def _as_the_model_has_it(
    module: nn.Module, which: str, parts: List[List[torch.Tensor]]
) -> torch.Tensor:
    """Joins weights that are stored one by one to one tensor, in the layout of the module's own."""
    if len(parts) == 1 and parts[0][0].dim() > 2:
        return parts[0][0]
    each = [torch.cat(rows) for rows in zip(*parts)]
    joined = torch.stack(each)
    if which == WEIGHTS[0] and not getattr(module, "is_concatenated", True):
        joined = joined.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return joined.mT.contiguous() if is_transposed(module) else joined.contiguous()


def _bias_operation() -> type:
    core = importlib.import_module("transformers.core_model_loading")

    class JoinedBiases(core.ConversionOps):
        """Biases of experts, one by one or in one tensor."""

        stands_for: Optional[Any] = None

        def convert(
            self,
            tensors: Dict[str, Any],
            source_patterns: List[str],
            full_layer_name: str,
            model: Any,
            **_: Any,
        ) -> Dict[str, torch.Tensor]:
            path, _, which = full_layer_name.rpartition(".")
            module = model.get_submodule(path)
            lists = [tensors[p] for p in source_patterns if p in tensors]
            own, is_ours = module._parameters[which], isinstance(module, Experts)
            if lists[0][0].dim() == 2:  # all experts'
                bias = lists[0][0]
            else:
                bias = torch.stack([torch.cat(parts) for parts in zip(*lists)])
                if len(lists) == 2 and not is_ours and not getattr(module, "is_concatenated", True):
                    bias = bias.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
            if is_ours and bias.shape != own.shape:
                bias = _padded(bias, own.shape[1], module.interleaved)
            return {full_layer_name: bias.to(own.dtype)}

        @property
        def reverse_op(self) -> Any:
            return self

    return JoinedBiases


def _padded(bias: torch.Tensor, size: int, interleaved: bool) -> torch.Tensor:
    out = bias.new_zeros(bias.shape[0], size)
    if interleaved:
        out[:, : bias.shape[1]] = bias
    else:
        half = bias.shape[1] // 2
        out[:, :half], out[:, size // 2 : size // 2 + half] = bias[:, :half], bias[:, half:]
    return out
