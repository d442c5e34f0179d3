"""``Stored``: the tensors of an FP8 linear that transformers, or the package of a format's makers,
has loaded."""

from dataclasses import dataclass
from typing import Any, Dict, Optional

import torch

from ...functional import FP8_DTYPES, SCALE_BLOCK
from ..tensor_parallel import whole_of


@dataclass(frozen=True)
class Stored:
    """An FP8 linear of a checkpoint.

    Attributes:
        weight: FP8, ``[N, K]``; of a divided linear a DTensor, and all else is of the whole.
        scale: of the weight, float32, as ``FP8Linear`` takes it.
        scheme: of the activations: ``"dynamic"``, ``"static"`` or ``"none"``.
        static: ``[1]``, the activations' scale.
        scale_ub: largest magnitude that a computed scale of the activations covers.
        scale_fmt: of computed scales of the activations, as ``FP8Linear`` takes it.
        instead: what is done here instead of what the checkpoint says.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    scheme: str = "dynamic"
    static: Optional[torch.Tensor] = None
    scale_ub: Optional[float] = None
    scale_fmt: Optional[str] = None
    instead: Optional[str] = None


class Unreadable(Exception):
    """Why a linear of a checkpoint cannot become an ``FP8Linear``."""


def weight_scale(scale: torch.Tensor, n: int, k: int, blocks: bool = False) -> torch.Tensor:
    """A weight's scale of any shape that means one value, one a row or one a block, as
    ``FP8Linear`` takes it."""
    scale = scale.detach().float()
    rows, columns = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    if blocks and scale.shape == (rows, columns):
        if columns > 1:
            return scale.contiguous()
        return scale.repeat_interleave(SCALE_BLOCK, 0)[:n].contiguous()
    if scale.numel() == 1:
        return scale.reshape(1)
    if not blocks and scale.numel() == n:
        return scale.reshape(n, 1).contiguous()
    raise Unreadable(
        f"has scales of shape {tuple(scale.shape)} for a weight of {(n, k)}: one, one a row, or "
        f"one for {SCALE_BLOCK} x {SCALE_BLOCK} are known"
    )


def stored(weight: torch.Tensor, scale: torch.Tensor, blocks: bool = False, **rest: Any) -> Stored:
    if weight.dtype not in FP8_DTYPES:
        raise Unreadable(f"weight is {weight.dtype}")
    return Stored(weight.detach(), weight_scale(whole_of(scale), *weight.shape, blocks), **rest)


def static_input(scale: torch.Tensor) -> Dict[str, Any]:
    if scale.numel() != 1:
        raise Unreadable(f"has a static scale of shape {tuple(scale.shape)} for its input")
    return {"scheme": "static", "static": whole_of(scale).detach().float().reshape(1)}


def text(value: Any) -> str:
    return str(getattr(value, "value", value))
