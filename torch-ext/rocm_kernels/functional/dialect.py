"""Weights of OCP checkpoints on FNUZ devices (MI300X): read where they lie.

The bits of an OCP number mean half as much in FNUZ, so a weight can be read as FNUZ in place, with
its scale doubled. Two codes stand in the way: -0 (0x80), which is FNUZ's NaN and becomes +0, and
NaN, which is a number in FNUZ: the scale of a matrix with one is NaN. So the weight takes no second
copy, keeps its dtype and its values, and the checkpoint can be saved from it as before.

This is done with each call, in one pass over the weight that writes it and two that read it.
Nothing cheaper knows that a weight is fit still: ``param.data.copy_``, by which reinforcement
learning brings in new weights, leaves no trace in ``_version`` or in the memory's address, and
whatever looks at the values has to read them all. ``quantize_model_`` converts weights once, for
good.
"""

from typing import Tuple

import torch

from .._ops import add_op_namespace_prefix
from .fp8 import native_fp8_dtype

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def native_weight(w: torch.Tensor, scale: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """An FP8 weight, ``[N, K]`` or ``[E, N, K]``, as the device's matrix units read it, and its
    scale in float32.

    Returns:
        ``(w, scale)``: w itself or, of an OCP weight on an FNUZ device, a view of it.
    """
    if w.dtype == native_fp8_dtype(w.device):
        return w, scale.float()
    if w.dtype != OCP:
        raise ValueError(f"w must be {OCP} on {w.device}, got {w.dtype}: see to_native_fp8")
    # A write that changes no value is not for torch.compile to look into.
    fnuz_scale = _fnuz_scale_op if torch.compiler.is_compiling() else _fnuz_scale
    scale = fnuz_scale(w, scale)
    return w.detach().view(FNUZ), scale


def _fnuz_scale(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Makes w fit to be read as FNUZ, and returns its scale for that."""
    # .data: a write that changes no value is no new version.
    codes = w.data.view(torch.int8)
    matrix = (-2, -1)
    has_nan = (codes.amax(matrix) == 0x7F) | (codes.view(torch.uint8).amax(matrix) == 0xFF)
    codes.fmod_(-0x80)  # -0x80 becomes 0, all else stays
    has_nan = has_nan.view((*has_nan.shape, *(1,) * (scale.dim() - has_nan.dim())))
    return (scale.detach().float() * 2).masked_fill(has_nan, torch.nan)


@torch.library.custom_op(add_op_namespace_prefix("fnuz_scale"), mutates_args=())
def _fnuz_scale_op(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # What w holds means the same afterwards, so the schema need not tell of a write.
    return _fnuz_scale(w, scale)


@_fnuz_scale_op.register_fake
def _(w, scale):
    return torch.empty_like(scale, dtype=torch.float32)
