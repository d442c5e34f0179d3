"""The kernel layer of a router: which experts a token goes to."""

from typing import Tuple

import torch
from torch import nn

from ..functional import moe
from ..functional.product import linear_of_router
from ..models.hooks import is_called
from .training import for_inference


class TopKRouter(nn.Module):
    """Gives ids in int32 and weights in float32, as ``fused_moe`` takes them."""

    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(
        self, hidden_states: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if is_called(self):  # a hook may take the dtypes of the module's own results for granted
            return type(self).forward(self, hidden_states)
        call = self.kernel_router
        rows = hidden_states.reshape(-1, self.weight.shape[1])
        bias = None if call.bias is None else getattr(self, call.bias)
        logits = linear_of_router(rows, self.weight, bias, in_float32=call.in_float32)
        choice_bias = None
        if call.choice_bias is not None:
            choice_bias = getattr(self, call.choice_bias).float()
        return (logits, *call.choose(logits, choice_bias, moe))
