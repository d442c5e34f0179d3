"""PyTorch's own FP8 for comparison: inputs quantised at each call, and its scaled products.

Scales are one for each token and output channel, as ours are, or, of linears, one a tensor:
coarser, and quicker in the library. Quantising and what stands between an expert's two products are
compiled.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

MAX = torch.finfo(torch.float8_e4m3fn).max


def amax(rows: torch.Tensor, per_row: bool) -> torch.Tensor:
    magnitudes = rows.abs()
    return (magnitudes.amax(-1, keepdim=True) if per_row else magnitudes.amax()).float()


def quantized(rows: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scale = amax(rows, per_row).clamp(min=1e-12) / MAX
    return (rows.float() / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn), scale


quantize = torch.compile(quantized)


@torch.compile
def gated(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gate_up.chunk(2, -1)
    return quantized(F.silu(gate) * up, True)


class ScaledMMLinear(nn.Module):
    """``torch._scaled_mm``."""

    def __init__(self, linear: nn.Linear, per_token: bool) -> None:
        super().__init__()
        self.per_token = per_token
        weight, scale = quantized(linear.weight, per_token)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize(x.flatten(0, -2), self.per_token)
        out = torch._scaled_mm(
            q, self.weight.t(), scale, self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return out.view(*x.shape[:-1], -1)


class ScaledExperts(nn.Module):
    """``torch._scaled_grouped_mm``, twice, in the place of transformers' experts with SwiGLU."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.count = gate_up.shape[0]
        for name, stack in (("gate_up", gate_up), ("down", down)):
            pairs = [quantized(weight, True) for weight in stack]
            weights = torch.stack([weight for weight, _ in pairs])
            scales = torch.stack([scale.flatten() for _, scale in pairs])
            self.register_buffer(name, weights)
            self.register_buffer(f"{name}_scale", scales)

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        k = top_k_index.shape[1]
        experts, order = top_k_index.flatten().sort()
        ends = torch.searchsorted(
            experts, torch.arange(self.count, device=x.device), right=True, out_int32=True
        )

        def product(q: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
            w = getattr(self, name).transpose(1, 2)
            return torch._scaled_grouped_mm(
                q, w, scale.flatten(), getattr(self, f"{name}_scale"), offs=ends,
                out_dtype=torch.bfloat16, use_fast_accum=True,
            )  # fmt: skip

        gate_up = product(*quantize(x[order // k], True), "gate_up")
        down = product(*gated(gate_up), "down")
        sorted_weights = top_k_weights.flatten()[order].unsqueeze(1)
        slots = torch.empty_like(down).index_copy_(0, order, down * sorted_weights.to(down.dtype))
        return slots.view(-1, k, down.shape[1]).sum(1)


def with_scaled_products(model: nn.Module, per_token: bool) -> nn.Module:
    """The model, its linears and experts in FP8, in place; its output embedding stays."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, ScaledMMLinear(child, per_token))
            elif isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                setattr(parent, name, ScaledExperts(child.gate_up_proj, child.down_proj))
    return model
