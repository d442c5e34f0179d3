"""Saves and loads the state dicts of FP8 linears and experts.

A state dict is in OCP's dialect on every device, as checkpoints are, and has each part of a joined
projection as a linear of its own. A weight is loaded together with all its scales and converted to
the dialect of its device; a weight without its scales is refused, because it would be another
weight.
"""

from typing import Any, Dict, List, Optional

import torch
from torch import nn

from ..functional import FP8_DTYPES, native_fp8_dtype, to_native_fp8

OF_FP8 = ("weight", "weight_scale_inv", "activation_scale")


def fp8_tensors(linear: nn.Module) -> Dict[str, torch.Tensor]:
    tensors = {name: getattr(linear, name) for name in OF_FP8}
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


def in_dialect(
    tensors: Dict[str, torch.Tensor], fp8_dtype: Optional[torch.dtype] = None
) -> Dict[str, torch.Tensor]:
    """Converts an FP8 linear's tensors to another dialect; None: to their device's."""
    weight, scale = tensors["weight"], tensors["weight_scale_inv"]
    converted, scale = to_native_fp8(weight, scale, fp8_dtype=fp8_dtype)
    changed = {**tensors, "weight": converted, "weight_scale_inv": scale}
    if "activation_scale" in tensors:
        none = weight[:0]
        static = tensors["activation_scale"]
        _, changed["activation_scale"] = to_native_fp8(none, static, fp8_dtype=converted.dtype)
    return changed


def unset(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Makes memory on a device in place of a tensor without data, filled so that no scale looks
    set."""
    if tensor.dtype in FP8_DTYPES:
        return torch.empty_like(tensor, dtype=native_fp8_dtype(device), device=device)
    return torch.full_like(tensor, torch.nan, device=device)


def dialect_to_load(own: torch.Tensor, given: torch.Tensor, assign: bool) -> torch.dtype:
    """The FP8 dtype that a weight has once it is loaded into ``own``'s place."""
    moves = assign and own.device != given.device
    return native_fp8_dtype(given.device) if moves else own.dtype


def why_not_loadable(key: str, own: torch.Tensor, assign: bool) -> Optional[str]:
    """Why a tensor cannot be loaded; None: it can. Into the meta device torch would copy, and say
    that all went well."""
    if own.device.type != "meta" or assign:
        return None
    return (
        f"{key} is on the meta device, where nothing can be loaded: pass assign=True to "
        "load_state_dict, or give the model memory by to_empty first"
    )


def came_alone(given: str, absent: str) -> str:
    return f"{given} must come with {absent}, of which the state dict has nothing"


def require_whole(is_shard: bool, name: str) -> None:
    if is_shard:
        raise RuntimeError(
            f"{name} is one process's share of a tensor-parallel model, and the whole is not put "
            "together here: save the model on one process, before it is divided"
        )


def save_linear(linear: nn.Module, destination: Dict, prefix: str) -> None:
    require_whole(linear.is_shard, f"{prefix}weight")
    tensors = fp8_tensors(linear)
    if tensors["weight"].device.type != "meta":
        tensors = in_dialect(tensors, torch.float8_e4m3fn)
    if linear.bias is not None:
        tensors["bias"] = linear.bias.detach()
    destination.update({prefix + name: tensor for name, tensor in tensors.items()})


def load_linear(
    linear: nn.Module,
    state_dict: Dict[str, torch.Tensor],
    prefix: str,
    local_metadata: Dict,
    strict: bool,
    missing: List[str],
    unexpected: List[str],
    errors: List[str],
) -> None:
    own = {name: getattr(linear, name) for name in (*OF_FP8, "bias")}
    own = {name: tensor for name, tensor in own.items() if tensor is not None}
    given = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
    missing += [prefix + name for name in own if name not in given]
    unexpected += [k for k in state_dict if k.startswith(prefix) and k[len(prefix) :] not in own]
    assign = local_metadata.get("assign_to_params_buffers", False)
    wrong = [
        f"{prefix}{name} must be {tuple(own[name].shape)}, got {tuple(tensor.shape)}"
        for name, tensor in given.items()
        if tensor.shape != own[name].shape
    ]
    of_fp8 = [name for name in OF_FP8 if name in own]
    absent = [name for name in of_fp8 if name not in given]
    if 0 < len(absent) < len(of_fp8):
        came = next(name for name in of_fp8 if name in given)
        wrong.append(came_alone(prefix + came, ", ".join(absent)))
    if "weight" in given and given["weight"].dtype not in FP8_DTYPES:
        wrong.append(f"{prefix}weight must be FP8, got {given['weight'].dtype}")
    why_not = why_not_loadable(f"{prefix}weight", own["weight"], assign)
    if given and why_not is not None:
        wrong.append(why_not)
    errors += wrong
    if wrong or not given:
        return
    if "weight" in given:
        dialect = dialect_to_load(own["weight"], given["weight"], assign)
        given = in_dialect(given, dialect)
    fused = getattr(linear, "fused", None)
    if fused is not None:
        errors += _load_part(linear, fused, given, prefix, assign)
    elif assign:
        for name, tensor in given.items():
            tensor = tensor if name in ("weight", "bias") else tensor.float()
            trains = own[name].requires_grad
            linear._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=trains)
    else:
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)


def _load_part(
    part: nn.Module, fused: nn.Module, given: Dict[str, torch.Tensor], prefix: str, assign: bool
) -> List[str]:
    """Loads a part of a joined linear, which has no tensors to assign: the joined ones move to
    where the first of its parts' come from. Returns what is wrong."""
    device = next(iter(given.values())).device
    if assign and fused.weight.device != device:
        if fused.weight.device.type == "meta":
            fused.to_empty(device=device)
            if fused.bias is not None:
                fused.bias.data.fill_(torch.nan)
        else:
            fused.to(device)
    with torch.no_grad():
        for name, tensor in given.items():
            own = getattr(part, name)
            of_all = own is getattr(fused, name) and name != "bias"
            if of_all and part.start > 0 and not torch.equal(own, tensor.to(own)):
                return [
                    f"{prefix}{name} must be that of the linears that it is joined with, "
                    f"{own.tolist()}, got {tensor.tolist()}: quantise the model with fuse=False"
                ]
            own.copy_(tensor)
    return []


def load_experts(
    experts: nn.Module, state_dict: Dict[str, torch.Tensor], prefix: str, local_metadata: Dict
) -> Any:
    """What ``nn.Module`` may load into experts; or, as a text, why it may not."""
    given, assign = dict(state_dict), local_metadata.get("assign_to_params_buffers", False)
    for name in ("gate_up_proj", "down_proj"):
        keys = prefix + name, f"{prefix}{name}_scale_inv"
        absent = [key for key in keys if key not in given]
        if len(absent) == 2:
            continue
        if absent:
            return came_alone(next(key for key in keys if key in given), absent[0])
        own, (weight, scale) = getattr(experts, name), (given[key] for key in keys)
        is_fp8 = own.dtype in FP8_DTYPES
        if (weight.dtype in FP8_DTYPES) != is_fp8 or not (is_fp8 or weight.dtype == own.dtype):
            return f"{keys[0]} must be {own.dtype}, got {weight.dtype}"
        why_not = why_not_loadable(keys[0], own, assign)
        if why_not is not None:
            return why_not
        if is_fp8:
            dialect = dialect_to_load(own, weight, assign)
            pair = to_native_fp8(weight, scale.float(), fp8_dtype=dialect)
            given.update(zip(keys, pair))
    return given
