"""A module for every kernel layer: the rules that all keep are tested on these.

A new layer without one fails tests/test_training.py, so it cannot be forgotten. Whole decoder
layers have tests/test_decoder_layers.py besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from test_moe_models import tiny
from tiny_models import randomized, tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Starcoder2Config
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm


@dataclass
class Case:
    """A layer, and a call of the module that it replaces.

    Attributes:
        root: what is given to kernelize; the module is the one at `path` in it.
    """

    layer: str
    root: nn.Module
    inputs: dict[str, torch.Tensor]
    path: str = ""
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        return self.root.get_submodule(self.path)

    def run(self, **changes: torch.Tensor) -> torch.Tensor:
        # By position: a norm's parameter has many names.
        out = self.module(*{**self.inputs, **changes}.values(), **self.others)
        return out[0] if isinstance(out, tuple) else out


def gated(name: str) -> nn.Module:
    """A module of the Hub's names, with a forward of its own."""
    first = name != "MulAndSilu"
    act = {
        "GeluAndMul": nn.functional.gelu,
        "GeluTanhAndMul": lambda v: nn.functional.gelu(v, approximate="tanh"),
    }.get(name, nn.functional.silu)

    class Own(nn.Module):
        kernel_layer_name = name

        def forward(self, x):
            one, other = x.chunk(2, -1)
            return act(one) * other if first else one * act(other)

    return Own()


class Fbgemm(nn.Module):
    """What transformers' FbgemmFp8Linear holds; its own forward needs FBGEMM's ops."""

    kernel_layer_name = "FbgemmFp8Linear"

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(q, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.input_scale_ub = nn.Parameter(torch.tensor([1200.0]), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(q.shape[0]))

    def forward(self, x):
        weight = self.weight.float() * self.weight_scale
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)


def cases(package: ModuleType, device: torch.device) -> Iterator[Case]:
    """In evaluation mode, not kernelized yet."""

    def quantized(model: nn.Module) -> nn.Module:
        model = model.to(device).eval()
        package.models.quantize_model_(model, activations="none")
        return model

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    norm = LlamaRMSNorm(64)
    package.models.registration.register_layer(LlamaRMSNorm, "RMSNorm", lambda module: True)
    norm.weight.data = torch.rand(64) + 0.5
    yield Case("RMSNorm", norm.to(device).eval(), {"hidden_states": randn(2, 3, 64)})

    norm = nn.ModuleDict({"norm": Qwen3_5RMSNorm(64)})
    norm["norm"].weight.data = torch.rand(64) - 0.5
    yield Case("RMSNormZeroCentered", quantized(norm), {"x": randn(2, 3, 64)}, "norm")

    q, scale = package.reference.quantize_fp8(
        torch.randn(48, 64), fp8_dtype=package.native_fp8_dtype(device)
    )
    linear = package.models.FP8Linear(q, scale, nn.Parameter(torch.randn(48)), "none")
    yield Case("FP8Linear", linear.to(device).eval(), {"input": randn(2, 3, 64)})
    yield Case("FbgemmFp8Linear", Fbgemm(q, scale).to(device).eval(), {"x": randn(2, 3, 64)})

    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    mlp = quantized(nn.ModuleDict({"mlp": randomized(LlamaMLP(config))}))
    yield Case("SwiGLUMLP", mlp, {"x": randn(2, 3, 64)}, "mlp")
    yield Case("FP8LinearPart", mlp, {"input": randn(2, 3, 64)}, "mlp.gate_proj")

    gemma = Gemma2Config(
        hidden_size=96, intermediate_size=272, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=160, head_dim=16,
    )  # fmt: skip
    for layer, model in (
        ("LlamaDecoderLayer", tiny_llama(num_hidden_layers=1)),
        ("GemmaDecoderLayer", randomized(Gemma2ForCausalLM(gemma))),
    ):
        model = quantized(model)
        x, positions = randn(2, 5, 96), torch.arange(5, device=device)[None]
        embeddings = model.model.rotary_emb(x, positions)
        yield Case(
            layer, model, {"hidden_states": x}, "model.layers.0",
            {"position_embeddings": embeddings, "position_ids": positions},
        )  # fmt: skip

    model = quantized(randomized(AutoModelForCausalLM.from_config(Starcoder2Config(
        hidden_size=96, intermediate_size=144, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=160,
    ))))  # fmt: skip
    x, positions = randn(2, 5, 96), torch.arange(5, device=device)[None]
    others = {
        "position_embeddings": model.model.rotary_emb(x, positions), "attention_mask": None,
    }  # fmt: skip
    path = "model.layers.0.self_attn"
    yield Case("Attention4AndOthers", model, {"hidden_states": x}, path, others)

    experts = quantized(tiny("qwen3_moe"))
    routing = torch.randint(0, 8, (6, 3), device=device)
    inputs = {
        "hidden_states": randn(6, 96), "top_k_index": routing,
        "top_k_weights": torch.rand(6, 3, device=device),
    }  # fmt: skip
    yield Case("Experts", experts, inputs, "model.layers.0.mlp.experts")
    minimax = quantized(tiny("minimax_m2"))
    yield Case("TopKRouter", experts, {"x": randn(6, 96)}, "model.layers.0.mlp.gate")
    yield Case(
        "TopKRouterGivenBias", minimax, {"x": randn(6, 96)}, "model.layers.0.mlp.gate",
        {"e_score_correction_bias": randn(8) / 4},
    )  # fmt: skip
    llama4 = quantized(tiny("llama4_text"))
    x = {"hidden_states": randn(2, 3, 96)}
    yield Case("Llama4TextMoe", llama4, x, "model.layers.0.feed_forward")

    for name in ("SiluAndMul", "MulAndSilu", "GeluAndMul", "GeluTanhAndMul"):
        # kernelize looks for a parameter to tell the device.
        root = nn.ModuleDict({"act": gated(name), "other": nn.Linear(1, 1)}).to(device).eval()
        yield Case(name, root, {"x": randn(2, 3, 64)}, "act")
