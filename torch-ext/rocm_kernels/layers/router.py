"""The kernel layers of a router: which experts a token goes to. They give ids in int32 and weights
in float32, as ``fused_moe`` takes them."""

from typing import Optional, Tuple

import torch
from torch import nn

from ..functional import moe
from ..functional.product import linear_of_router
from ..models.hooks import is_called
from .training import for_inference

Routing = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, weights, ids


class TopKRouter(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, hidden_states: torch.Tensor) -> Routing:
        if _is_seen(self):
            return type(self).forward(self, hidden_states)
        name = self.kernel_router.choice_bias
        return _route(self, hidden_states, None if name is None else getattr(self, name))


class TopKRouterGivenBias(nn.Module):
    """One whose block holds the bias for choosing."""

    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(
        self, hidden_states: torch.Tensor, e_score_correction_bias: Optional[torch.Tensor]
    ) -> Routing:
        if _is_seen(self):
            return type(self).forward(self, hidden_states, e_score_correction_bias)
        return _route(self, hidden_states, e_score_correction_bias)


def _is_seen(router: nn.Module) -> bool:
    """Whether a hook may see what it gives, of dtypes that are not those of its own forward."""
    return is_called(router) or is_called(router.kernel_routed[0])


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choice_bias: Optional[torch.Tensor]
) -> Routing:
    call = router.kernel_router
    rows = hidden_states.reshape(-1, router.weight.shape[1])
    bias = None if call.bias is None else getattr(router, call.bias)
    logits = linear_of_router(rows, router.weight, bias, in_float32=call.logits == "float32")
    choice_bias = None if choice_bias is None else choice_bias.float()
    weights, ids = call.choose(logits, choice_bias, moe)
    return logits.float() if call.logits == "widened" else logits, weights, ids
