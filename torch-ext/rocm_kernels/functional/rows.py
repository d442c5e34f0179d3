"""Tensors of any shape as the matrices that ops take: leading dimensions fold into rows."""

import math
from typing import Optional

import torch


def written_rows(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A written tensor as ``[rows, columns]``; it must be a view, or the writes would be lost."""
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} is written, so its leading dimensions must fold into rows without a copy, "
            f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        ) from None


def optional_rows(tensor: Optional[torch.Tensor], name: str) -> Optional[torch.Tensor]:
    return None if tensor is None else written_rows(tensor, name)


def input_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An input as ``[rows, columns]``; leading dimensions that do not fold are copied."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() == 0:
        raise ValueError("an input must have at least one dimension, got a scalar")
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def empty_rows_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, of x's shape and device."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
