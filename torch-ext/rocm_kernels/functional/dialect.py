"""Weights of OCP checkpoints on FNUZ devices (MI300X): read in place, made fit once.

The bits of an OCP number mean half as much in FNUZ, so a weight can be read as FNUZ where it lies,
with its scale doubled. Two codes stand in the way: -0 (0x80), which is FNUZ's NaN and becomes +0,
and NaN, which is a number in FNUZ and is refused. So the weight takes no second copy, keeps its
dtype and its values, and the checkpoint can be saved from it as before.

Which weights are fit already is remembered by their memory: a module may hand over a new view of
its experts with each call.
"""

import threading
from typing import Dict, NamedTuple, Optional, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._ops import add_op_namespace_prefix
from .fp8 import native_fp8_dtype

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def native_weight(w: torch.Tensor, scale: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """An FP8 weight of any shape as the device's matrix units read it, and its scale in float32.

    Returns:
        ``(w, scale)``: w itself or, of an OCP weight on an FNUZ device, a view of it.
    """
    if w.dtype == native_fp8_dtype(w.device):
        return w, scale.float()
    if w.dtype != OCP:
        raise ValueError(f"w must be {OCP} on {w.device}, got {w.dtype}: see to_native_fp8")
    # Mutations and what is remembered are not for torch.compile to look into.
    double = _fnuz_scale_op if torch.compiler.is_compiling() else _fnuz_scale
    scale = double(w, scale)
    return w.detach().view(FNUZ), scale


class _Entry(NamedTuple):
    storage: StorageWeakRef  # while it is held, no other storage gets this one's key
    version: int
    result: Optional[torch.Tensor]


_remembered: Dict[Tuple, _Entry] = {}
_remembering = threading.Lock()


def _fnuz_scale(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Makes w fit to be read as FNUZ, and returns its scale for that."""
    with _remembering:
        if _recall(w) is None:
            # .data: a write that changes no value is no new version.
            bits = w.data.view(torch.uint8)
            if bool(((bits & 0x7F) == 0x7F).any()):
                raise ValueError(
                    "w must not hold NaN to be read as FNUZ, where its code is a number"
                )
            bits.masked_fill_(bits == 0x80, 0)
            _finish(w)
            _remember(w, None)
        entry = _recall(scale)
        if entry is None:
            doubled = scale.detach().float() * 2
            _finish(doubled)
            entry = _remember(scale, doubled)
        return entry.result


def _finish(tensor: torch.Tensor) -> None:
    """Awaits what was done to it: whoever finds it remembered may be on another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


@torch.library.custom_op(add_op_namespace_prefix("fnuz_scale"), mutates_args=())
def _fnuz_scale_op(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # What w holds means the same afterwards, so the schema need not tell of a write.
    return _fnuz_scale(w, scale).clone()


@_fnuz_scale_op.register_fake
def _(w, scale):
    return torch.empty_like(scale, dtype=torch.float32)


def _key(tensor: torch.Tensor) -> Tuple:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _recall(tensor: torch.Tensor) -> Optional[_Entry]:
    entry = _remembered.get(_key(tensor))
    return entry if entry is not None and entry.version == _version(tensor) else None


def _remember(tensor: torch.Tensor, result: Optional[torch.Tensor]) -> _Entry:
    for key in [key for key, entry in _remembered.items() if entry.storage.expired()]:
        del _remembered[key]
    entry = _Entry(StorageWeakRef(tensor.untyped_storage()), _version(tensor), result)
    _remembered[_key(tensor)] = entry
    return entry
