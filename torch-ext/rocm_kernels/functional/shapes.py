"""Detects calls that need shapes alone: under tracing, and for tensors on the meta device."""

from typing import Any

import torch

from .._ops import add_op_namespace_prefix


def register_shapes(name: str) -> None:
    """Of an op that writes what it is given, so nothing is left to do; but one operand without
    data among others must not leave what is to be written as it was."""
    torch.library.register_fake(add_op_namespace_prefix(name), _require_one_device)


def _require_one_device(*operands: Any, **_: Any) -> None:
    devices = {str(o.device): None for o in operands if isinstance(o, torch.Tensor)}
    if len(devices) > 1:
        raise RuntimeError(
            f"operands must be on one device, got {' and '.join(devices)}: a weight on meta has no "
            "data yet, or accelerate brings it for calls of its module alone"
        )
