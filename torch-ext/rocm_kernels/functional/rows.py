"""Folds the leading dimensions of a tensor into the rows of the matrix that an op takes."""

import math
from typing import Any, Dict, Optional

import torch


def explain(required: Dict[str, Any], optional: Dict[str, Any]) -> None:
    """Raises a sentence if a call failed because an argument is no tensor, or one without rows.

    Looked at afterwards: asking each tensor first would cost every call a fifth of a microsecond.
    """
    require_tensors(required, optional)
    name = next(iter(required))
    if required[name].dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar") from None


def require_tensors(required: Dict[str, Any], optional: Dict[str, Any]) -> None:
    for name, value in {**required, **optional}.items():
        if not isinstance(value, torch.Tensor) and not (name in optional and value is None):
            got = "None" if value is None else f"a {type(value).__name__}"
            raise TypeError(f"{name} must be a torch.Tensor, got {got}") from None


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
    """An input as ``[rows, columns]`` with neighbours in a row side by side.

    Where its strides do not allow that it is copied, as ``nn.Linear`` does.
    """
    if tensor.dim() != 2:
        if tensor.dim() == 0:
            raise ValueError("an input must have at least one dimension, got a scalar")
        tensor = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    # First the question that is cheap to ask: a stride takes a quarter of a microsecond.
    if tensor.is_contiguous() or tensor.stride(1) == 1:
        return tensor
    return tensor.contiguous()


def input_vector(tensor: torch.Tensor) -> torch.Tensor:
    """An input of one dimension with neighbours side by side."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def optional_vector(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if tensor is None else input_vector(tensor)


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any dimensions whose last is contiguous."""
    if tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


# For functions that tell how a call would run: they read no values, so where the call converts an
# operand, they describe the result by a tensor without values, and no kernel runs.


def rows_told(tensor: torch.Tensor) -> torch.Tensor:
    """What :func:`input_rows` returns; without values where that is a copy."""
    if tensor.dim() not in (0, 2):
        shape = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        try:
            tensor = tensor.view(shape)
        except RuntimeError:
            return tensor.new_empty(shape)
    if tensor.dim() == 0 or tensor.is_contiguous() or tensor.stride(1) == 1:
        return input_rows(tensor)
    return empty_rows_like(tensor, tensor.dtype)


def side_by_side_told(tensor: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """What :func:`side_by_side` returns of the tensor in that dtype; without values where that is a
    copy."""
    if dtype in (None, tensor.dtype) and (tensor.stride(-1) == 1 or tensor.is_contiguous()):
        return side_by_side(tensor)
    return empty_rows_like(tensor, tensor.dtype if dtype is None else dtype)


def empty_rows_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, of x's shape and device."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
