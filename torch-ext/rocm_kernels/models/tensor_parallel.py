"""Tensor parallelism: each process has a shard of a linear's weight, as a DTensor of N or of K, or
of the weights of all experts."""

import copy
import re
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
from torch import nn

from ..functional import SCALE_BLOCK

# Of transformers' plans: those whose linears take and give plain tensors, N divided or K.
_STYLES = ("colwise", "rowwise")
# Of experts, each of which has a part in each process: gate's and up's N divided, and down's K.
_STYLES_OF_EXPERTS = {
    "": "moe_tp_experts", ".gate_up_proj": "packed_colwise", ".down_proj": "rowwise",
}  # fmt: skip
# Those whose modules exchange something with the other processes at each call.
_EXCHANGES = (
    "all_reduce", "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise",
    "moe_tp_experts", "rowwise", "rowwise_rep", "rowwise_split_input",
)  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """What a process has of a linear.

    Attributes:
        weight: ``[N / processes, K]`` or ``[N, K / processes]``, plain.
        bias: ``[N / processes]``, or ``[N]`` where K is divided.
        process_group: where K is divided, the processes whose results are summed; else None.
    """

    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    process_group: Optional[Any]


def is_sharded(linear: nn.Linear) -> bool:
    return hasattr(linear.weight, "placements")


def is_divided(model: nn.Module) -> bool:
    """Whether a call of a model exchanges something with other processes."""
    return any(
        getattr(module, "process_group", None) is not None
        or any(hasattr(tensor, "placements") for tensor in module._parameters.values())
        for module in model.modules()
    )


def why_shard_stays(model: nn.Module, name: str, linear: nn.Linear) -> Optional[str]:
    """Why a linear that is divided cannot become FP8 shard by shard; None: it can."""
    style = _style(model, name)
    if style in _STYLES and linear.weight.device_mesh.ndim == 1:
        return None
    return f"is divided among processes by {style or 'a plan of its own'}"


def others_that_exchange(model: nn.Module) -> Dict[str, str]:
    """Names of modules that exchange at each call, as transformers has them do it, and the style of
    each."""
    styles = {name: _style(model, name) for name, _ in model.named_modules()}
    ours = {n for n, m in model.named_modules() if getattr(m, "process_group", None) is not None}
    return {
        name: style for name, style in styles.items() if style in _EXCHANGES and name not in ours
    }


def _style(model: nn.Module, name: str) -> Optional[str]:
    """transformers' word for how a module is divided."""
    plan = getattr(model, "tp_plan", None) or {}
    return plan.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))


def local_shard(linear: nn.Linear) -> Shard:
    weight, bias = linear.weight, linear.bias
    divides_k = weight.placements[0].is_shard(1)
    group = weight.device_mesh.get_group() if divides_k else None
    if hasattr(bias, "placements"):
        bias = nn.Parameter(bias.detach().to_local(), requires_grad=bias.requires_grad)
    return Shard(weight.detach().to_local(), bias, group)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, of which processes may have parts."""
    return tensor.detach().full_tensor() if hasattr(tensor, "placements") else tensor


def share_with_scales(
    weight: torch.Tensor, scale: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """A process's share of a checkpoint's FP8 weight ``[N, K]``, which is divided, and its scales.

    A share has blocks of its own, from its first row and column on. Where they have parts of two
    blocks of the whole, they take the larger scale, and the values of the other are rounded again.

    Args:
        scale: of the whole: ``[1]``, ``[N, 1]`` or a block's, as ``FP8Linear`` takes them.
    """
    q, dim = weight.detach().to_local(), weight.placements[0].dim
    mesh, size = weight.device_mesh, weight.shape[dim]
    start = min(mesh.get_local_rank() * -(-size // mesh.size()), size)
    if scale.numel() == 1 or (scale.shape[1] == 1 and dim == 1):
        return q, scale
    if scale.shape[1] == 1:
        return q, scale[start : start + q.shape[0]].contiguous()
    block = torch.arange(start, start + q.shape[dim], device=q.device) // SCALE_BLOCK
    lines = scale.index_select(dim, block)  # of each row, or column, of the share
    padding = -q.shape[dim] % SCALE_BLOCK
    padded = nn.functional.pad(lines, (0, padding) if dim else (0, 0, 0, padding))
    scale = padded.unflatten(dim, (-1, SCALE_BLOCK)).amax(dim + 1)
    if start % SCALE_BLOCK:
        smaller = lines / scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, q.shape[dim])
        other = 1 - dim
        smaller = smaller.repeat_interleave(SCALE_BLOCK, other).narrow(other, 0, q.shape[other])
        q = (q.float() * smaller).to(q.dtype)
    if scale.shape[1] == 1:
        scale = scale.repeat_interleave(SCALE_BLOCK, 0)[: q.shape[0]]
    return q, scale.contiguous()


def row_amax_of_all_shards(weight: torch.Tensor, process_group: Any) -> Optional[torch.Tensor]:
    """``[..., N, 1]``, the largest magnitude of each row of ``[..., N, K]`` over all its shards, so
    that the FP8 values do not depend on how many there are. None: each row is in one shard."""
    if process_group is None:
        return None
    largest = weight.abs().amax(-1, keepdim=True)
    maximum = torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(largest, maximum, group=process_group)
    return largest


def are_sharded(experts: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") for parameter in experts._parameters.values())


def why_experts_stay(model: nn.Module, name: str, experts: nn.Module) -> Optional[str]:
    """Why experts that are divided cannot become FP8 share by share; None: they can."""
    styles = {end: _style(model, name + end) for end in _STYLES_OF_EXPERTS}
    found = [p for p in experts._parameters.values() if p is not None]
    plain = getattr(experts, "is_concatenated", True) and not getattr(experts, "has_bias", False)
    if (
        styles == _STYLES_OF_EXPERTS
        and plain
        and all(hasattr(p, "placements") and p.device_mesh.ndim == 1 for p in found)
    ):
        return None
    return "are divided among processes by " + ", ".join(
        dict.fromkeys(style or "a plan of its own" for style in styles.values())
    )


def share_of_experts(experts: nn.Module) -> Tuple[nn.Module, Any]:
    """A module of this process's parts of all experts, which computes what they add to the result;
    and the processes whose results are summed."""
    share = copy.copy(experts)
    group = next(iter(experts._parameters.values())).device_mesh.get_group()
    share._parameters = {
        name: None if p is None else nn.Parameter(p.detach().to_local(), requires_grad=False)
        for name, p in experts._parameters.items()
    }
    vars(share).pop("forward", None)  # transformers' own, which sums
    return share, group
