"""Detects calls that need shapes alone: under tracing, and for tensors on the meta device."""

from typing import Any

import torch

from .._ops import add_op_namespace_prefix


def register_shapes(name: str, returns: Any = None) -> None:
    """Registers what torch.compile runs in an op's place: nothing, as the op writes what it is
    given; but it refuses operands without data among others, whose output would stay as it was.

    returns: what the op does, where it has no shape either.
    """

    def fake(*operands: Any, **_: Any) -> Any:
        _require_one_device(*operands)
        return returns

    torch.library.register_fake(add_op_namespace_prefix(name), fake)


def _require_one_device(*operands: Any) -> None:
    tensors = [t for o in operands for t in (o if isinstance(o, list) else [o])]
    devices = {str(t.device): None for t in tensors if isinstance(t, torch.Tensor)}
    if len(devices) > 1:
        raise RuntimeError(
            f"operands must be on one device, got {' and '.join(devices)}: a weight on meta has no "
            "data yet, or accelerate brings it for calls of its module alone"
        )
