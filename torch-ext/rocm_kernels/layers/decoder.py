"""Whole decoder layers of models that ``quantize_model_`` has prepared."""

from typing import Any, Optional

import torch
from torch import nn

from ..functional.norm import add_residual_, multiply_
from ..models.fuse import has_fused
from ..models.hooks import is_hooked
from ..models.linear import Projected
from .norm import norm_linear, norm_rows


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
        return decoder_layer(
            self,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )


class GemmaDecoderLayer(nn.Module):
    """As ``LlamaDecoderLayer``, for families whose forward names its arguments differently."""

    has_backward = False
    can_torch_compile = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Optional[Any] = None,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
        past_key_values: Optional[Any] = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return decoder_layer(
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )


def decoder_layer(layer: nn.Module, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """What ``layer.kernel_family`` says; the attention gets the arguments.

    In training, and where something has come between the layer and what it would compute itself, an
    adapter or a hook, its own forward runs.
    """
    family = layer.kernel_family
    attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
    hooked = any(is_hooked(getattr(layer, name)) for name in family.norms)
    if layer.training or hooked or not has_fused(attention, family.qkv):
        return type(layer).forward(layer, hidden_states, **arguments)
    multiplier = _named(layer, family.residual_multiplier)
    # Rows are folded once: at batch 1 each view costs a tenth of an op.
    x = hidden_states.flatten(0, -2)
    norm, projection = _named(layer, family.attention_norm), getattr(attention, family.qkv.name)
    qkv = norm_linear(x, None, norm, projection)
    attended, _ = attention(
        hidden_states=Projected(qkv.view(*hidden_states.shape[:-1], qkv.shape[-1])), **arguments
    )
    # The attention's result is fresh, so the residual sum may take its place. The layer's input may
    # not be written: output_hidden_states keeps it.
    attended = attended.view(x.shape).to(x.dtype)  # autocast may have made it 16 bits
    residual = norm_rows(attended, None, _named(layer, family.attention_out_norm))
    if multiplier is not None:
        multiply_(residual, multiplier)
    norm = _named(layer, family.mlp_norm)
    if has_fused(mlp, family.gate_up):
        gate_up = norm_linear(x, residual, norm, getattr(mlp, family.gate_up.name))
        out = mlp(Projected(gate_up))
    else:  # experts, or an MLP that was left in 16 bits
        out = mlp(norm_rows(x, residual, norm).view(hidden_states.shape))
        out = (out[0] if isinstance(out, tuple) else out).view(x.shape)  # with what a router says
    out = norm_rows(out.to(x.dtype), None, _named(layer, family.mlp_out_norm))
    add_residual_(residual, out, 1.0 if multiplier is None else multiplier)
    return residual.view(hidden_states.shape)


def _named(layer: nn.Module, name: Optional[str]) -> Any:
    return None if name is None else getattr(layer, name)
