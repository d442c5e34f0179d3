"""What an op that goes through torch's dispatcher reads and writes."""

from typing import Any, Dict, List, Set, Tuple

import torch
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty)  # read nothing


def tensors_in(tree: Any) -> List[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storages_of(tensors: Any) -> Set[int]:
    """What tells memory from other memory, as long as it is held."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def written_by(func: Any, args: Tuple, kwargs: Dict[str, Any]) -> List[torch.Tensor]:
    found: List[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def may_be_a_view(func: Any) -> bool:
    """Whether a result may look at an argument's memory. Some that do copy where they must."""
    returns = func._schema.returns
    return bool(returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    )


def is_plain_sum(func: Any, args: Tuple, kwargs: Dict[str, Any]) -> bool:
    """Of two tensors side by side, as between layers."""
    if func is not _aten.add.Tensor or len(args) != 2 or kwargs.get("alpha", 1) != 1:
        return False
    x, y = args
    return (
        isinstance(y, torch.Tensor)
        and x.dtype == y.dtype
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.shape == y.shape
        and x.dim() >= 2
        and x.numel() > 0
        and x.is_contiguous()
        and y.is_contiguous()
    )
