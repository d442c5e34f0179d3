"""Whole decoder layers of models that ``quantize_model_`` has prepared."""

from typing import Any, Optional

import torch
from torch import nn

from ..functional.norm import add_residual_
from ..models.linear import Projected
from .norm import norm_linear


class LlamaDecoderLayer(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
        past_key_values: Optional[Any] = None,
        use_cache: Optional[bool] = False,
        position_embeddings: Optional[Any] = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        family = self.kernel_family
        attention, mlp = getattr(self, family.attention), getattr(self, family.mlp)
        # Rows are folded once: at batch 1 each view costs a tenth of an op.
        x = hidden_states.flatten(0, -2)
        norm, projection = getattr(self, family.attention_norm), getattr(attention, family.qkv.name)
        qkv = norm_linear(x, None, norm, projection)
        # The attention's result is fresh, so the residual sum may take its place. The layer's input
        # may not be written: output_hidden_states keeps it.
        residual, _ = attention(
            hidden_states=Projected(qkv.view(*hidden_states.shape[:-1], qkv.shape[-1])),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        rows = residual.view(x.shape)
        norm, projection = getattr(self, family.mlp_norm), getattr(mlp, family.gate_up.name)
        gate_up = norm_linear(x, rows, norm, projection)
        add_residual_(rows, mlp(Projected(gate_up)))
        return residual
