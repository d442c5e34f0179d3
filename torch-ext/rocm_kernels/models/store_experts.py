"""Writes experts into a state dict as checkpoints hold them: a linear for each expert, or all
experts in one tensor, as the model's own files do. MXFP4 experts are packed as compressed-
tensors does, or as in GPT-OSS's files."""

import importlib
from typing import Any, Dict, Tuple

import torch

from ..functional import SCALE_BLOCK
from .experts import WEIGHTS, Experts
from .mxfp4 import BLOCK
from .stored_experts import layout_of_experts

# Of one expert's linears: those that gate_up_proj joins, in order, and down's.
_LINEARS = (("gate_proj", "up_proj"), ("down_proj",))


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
        for which, linears in zip(WEIGHTS, _LINEARS):
            key = f"{name}.{which}"
            weight, scale = _without_padding(
                module, which, state_dict.pop(key), state_dict.pop(f"{key}_scale_inv")
            )
            bias = state_dict.pop(f"{key}_bias", None)
            bias = None if bias is None else _meant_rows(module, which, bias)
            split = core.revert_weight_conversion(model, {key: weight})
            is_own = any(w is weight for w in split.values())
            if len(split) > 1 and bias is None:
                _require_whole_blocks(name, module)
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
            elif module.interleaved or not is_own:
                if bias is not None:
                    state_dict[f"{key}_bias"] = bias
                if not module.is_fp8:
                    whole = torch.nn.functional.pad(weight, (0, -weight.shape[2] % (BLOCK // 2)))
                    state_dict[f"{key}_blocks"] = whole.unflatten(2, (-1, BLOCK // 2))
                    state_dict[f"{key}_scales"] = scale
                    continue
                state_dict[key] = weight  # in the model's own layout, which its conversion may make
                if module.is_transposed and is_own:
                    state_dict[key] = weight.transpose(1, 2).contiguous()
                state_dict[f"{key}_{suffix}"] = scale
            else:
                _require_whole_blocks(name, module)
                for expert in range(module.num_experts):
                    tensors = [t[expert].chunk(len(linears)) for t in (weight, scale)]
                    if bias is not None:
                        tensors.append(bias[expert].chunk(len(linears)))
                    for linear, w, s, *b in zip(linears, *tensors):
                        stored = f"{name}.{expert}.{linear}"
                        packed = "" if module.is_fp8 else "_packed"
                        state_dict[f"{stored}.weight{packed}"] = w
                        state_dict[f"{stored}.weight_{suffix}"] = s.clone()
                        state_dict.update({f"{stored}.bias": value.clone() for value in b})


def _require_whole_blocks(name: str, module: Experts) -> None:
    held = module.gate_up_proj.shape[1] // 2
    if layout_of_experts(module).weights == "block" and held % SCALE_BLOCK:
        raise ValueError(
            f"{name} has {held} rows each of gate and up, which are not whole blocks of "
            f"{SCALE_BLOCK}, and a file has their scales apart: save the model before "
            "quantize_model_"
        )


def _without_padding(
    module: Experts, which: str, weight: torch.Tensor, scale: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Removes from a weight and its scales the zeros that no file has."""
    if module.gate_up_proj.shape[1] == 2 * module.intermediate_size:
        return weight, scale
    meant = module.intermediate_size
    if which == WEIGHTS[0]:
        by_row = scale.shape[1] == weight.shape[1]
        weight = _meant_rows(module, which, weight)
        return weight, _meant_rows(module, which, scale) if by_row else scale
    columns = meant if module.is_fp8 else meant // 2
    block = SCALE_BLOCK if module.is_fp8 else BLOCK
    return weight[:, :, :columns].contiguous(), scale[:, :, : -(-meant // block)].contiguous()


def _meant_rows(module: Experts, which: str, tensor: torch.Tensor) -> torch.Tensor:
    """Takes away the rows of gate and up that padding has added."""
    meant = module.intermediate_size
    if which != WEIGHTS[0] or tensor.shape[1] == 2 * meant:
        return tensor
    if module.interleaved:
        return tensor[:, : 2 * meant].contiguous()
    return tensor.unflatten(1, (2, -1))[:, :, :meant].flatten(1, 2).contiguous()
