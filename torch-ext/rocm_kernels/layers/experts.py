"""Kernel layers of mixtures of experts."""

import inspect
from typing import Optional, Tuple

import torch
from torch import nn

from ..functional.moe import each_expert_in_turn, fused_moe, moe_of_weighted_inputs
from ..models.families import ACTIVATIONS
from ..models.hooks import is_called
from ..models.linear import summed
from .training import for_inference


class Experts(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: Optional[torch.Tensor] = None,
        top_k_weights: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        if top_k_index is None:
            top_k_weights, top_k_index = each_expert_in_turn(hidden_states, self.num_experts)
        return experts(hidden_states, top_k_index, top_k_weights, self)


class Llama4TextMoe(nn.Module):
    has_backward = False
    can_torch_compile = True

    @for_inference
    def forward(self, hidden_states: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        if is_called(self.experts):  # its own forward calls them as a module
            return type(self).forward(self, hidden_states)
        rows = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(rows)
        routed = moe_of_weighted_inputs(
            rows, scores, self.top_k, lambda *routing: experts(*routing, self.experts)
        )
        return self.shared_expert(rows) + routed, logits


def experts(
    x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, module: nn.Module
) -> torch.Tensor:
    """``fused_moe`` with the weights of a ``models.Experts``, summed over the processes that have a
    part of each expert."""
    y = fused_moe(
        x,
        module.gate_up_proj,
        module.down_proj,
        top_k_weights,
        top_k_index,
        scale_gate_up=module.gate_up_proj_scale_inv,
        scale_down=module.down_proj_scale_inv,
        bias_gate_up=module.gate_up_proj_bias,
        bias_down=module.down_proj_bias,
        activation=module.activation,
        limit=module.limit,
        interleaved=module.interleaved,
        quantize_input=module.activation_scheme == "dynamic",
        scale_fmt=module.scale_fmt,
    )
    return summed(y, module)


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """A model's own experts on ``fused_moe``, without ``quantize_model_``::

        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        ALL_EXPERTS_FUNCTIONS.register("rocm_kernels", rocm_kernels.layers.experts_forward)
        model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="rocm_kernels")

    For 16-bit experts with ``[E, N, K]`` weights and one of the activations of ``fused_moe``. Of
    those whose weights are transposed, that have biases or compute their gate in a way of their
    own, such as GPT-OSS's, it raises a ValueError: ``quantize_model_`` converts them. A module in
    training mode computes its own forward, as the layers do.
    """
    if module.training and torch.is_grad_enabled():
        own = inspect.unwrap(type(module).forward)  # without a choice of implementations
        return own(module, hidden_states, top_k_index, top_k_weights)
    activation = ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    own_gate = type(module)._apply_gate.__name__ != "_default_apply_gate"
    if module.is_transposed or module.has_bias or own_gate or activation is None:
        raise ValueError(
            f"experts must have [E, N, K] weights without biases and a gate of silu or gelu, got "
            f"{type(module).__name__}; models.quantize_model_ converts such experts"
        )
    return fused_moe(
        hidden_states, module.gate_up_proj, module.down_proj, top_k_weights, top_k_index,
        activation=activation,
    )  # fmt: skip
