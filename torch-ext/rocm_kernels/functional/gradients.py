"""Refuses a call that would need a derivative, since no op here has one, and marks the tensors that
ops write.

torch does neither for an op that writes its arguments: the result would be a constant to it, and a
gradient zero or missing without a word. So every function of the API asks :func:`needs_gradient`
about all its tensors, those that it writes too, and calls :func:`mark_written` on what a caller
gave it to write; tests/test_gradients.py calls each of them to see that it does.
"""

from typing import Any, Optional

import torch
from torch.autograd import forward_ad

_transform = torch._C._functorch.peek_interpreter_stack  # None outside of grad, jvp, vmap


def needs_gradient(*tensors: Optional[torch.Tensor]) -> bool:
    """Whether a function of these tensors is to be differentiated; a quarter of a microsecond."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    if torch.compiler.is_compiling():
        return False
    if _transform() is not None:
        return True
    return forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def refuse_gradient(function: str, **tensors: Any) -> None:
    """Raises for a call of which :func:`needs_gradient` is true. A pair, or None, is as good as a
    tensor."""
    wanting = []
    for name, given in tensors.items():
        several = given if isinstance(given, tuple) else (given,)
        if any(tensor is not None and tensor.requires_grad for tensor in several):
            wanting.append(name)
    if not torch.compiler.is_compiling() and _transform() is not None:
        raise RuntimeError(
            f"{function} has no gradient and no batching rule, got a call inside a torch.func "
            "transform: call it outside, with all rows of a batch at once"
        )
    if torch.is_grad_enabled() and wanting:
        what = f"got {' and '.join(wanting)} with requires_grad"
    else:
        what = "got a tangent of forward-mode differentiation"
    raise RuntimeError(
        f"{function} has no gradient, {what}: call it under torch.inference_mode() or "
        "torch.no_grad(), or with detached tensors; a kernelized model computes its own forward, "
        "with its gradient, after model.train()"
    )


def mark_written(*tensors: Optional[torch.Tensor]) -> None:
    """Bumps the version of what an op has written, so that autograd refuses to use an older value
    that it has saved."""
    if torch.compiler.is_compiling():
        return  # the graph's own copies do
    for tensor in tensors:
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
