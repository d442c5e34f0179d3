"""Tensor parallelism: each process has a share of a linear's weight, as a DTensor of N or of K."""

import re
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn

# Of transformers' plans: those whose linears take and give plain tensors, N divided or K.
_STYLES = ("colwise", "rowwise")


@dataclass(frozen=True)
class Share:
    """What a process has of a linear.

    Attributes:
        weight: ``[N / processes, K]`` or ``[N, K / processes]``, plain.
        bias: ``[N / processes]``, or ``[N]`` where K is divided.
        process_group: where K is divided, the processes whose results are summed; else None.
    """

    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    process_group: Optional[Any]


def is_shared_out(linear: nn.Linear) -> bool:
    return hasattr(linear.weight, "placements")


def why_not_shareable(model: nn.Module, name: str, linear: nn.Linear) -> Optional[str]:
    """Why a linear that is divided cannot become FP8 share by share; None: it can."""
    plan = getattr(model, "tp_plan", None) or {}
    style = plan.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))
    if style in _STYLES and linear.weight.device_mesh.ndim == 1:
        return None
    return f"is divided among processes by {style or 'a plan of its own'}"


def share_of(linear: nn.Linear) -> Share:
    weight, bias = linear.weight, linear.bias
    divides_k = weight.placements[0].is_shard(1)
    group = weight.device_mesh.get_group() if divides_k else None
    if hasattr(bias, "placements"):
        bias = nn.Parameter(bias.detach().to_local(), requires_grad=bias.requires_grad)
    return Share(weight.detach().to_local(), bias, group)


def largest_of_rows(share: Share) -> Optional[torch.Tensor]:
    """``[N, 1]``, the largest magnitude of each row over all its shares, so that the FP8 values do
    not depend on how many there are. None: each row is in one share."""
    if share.process_group is None:
        return None
    largest = share.weight.abs().amax(-1, keepdim=True)
    maximum = torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(largest, maximum, group=share.process_group)
    return largest
