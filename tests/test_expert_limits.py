"""How many experts, and how many of them a token may have: served, or left alone with a reason."""

import re

import pytest
import torch
from project import ROOT
from tiny_models import randomized, tokens
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.fixture
def package(best_package):
    return best_package


def tiny(experts, slots):
    return randomized(
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, vocab_size=160, head_dim=16, num_experts=experts,
                num_experts_per_tok=slots, moe_intermediate_size=32,
            )
        )
    )  # fmt: skip


def test_the_limits_are_the_kernels(package):
    header = (ROOT / "moe" / "experts.h").read_text()
    limits = {name: int(n) for name, n in re.findall(r"int64_t (kMax\w+) = (\d+);", header)}
    moe = package.functional.moe
    assert limits == {"kMaxExperts": moe.MAX_EXPERTS, "kMaxTopk": moe.MAX_TOPK}
    plugin = (ROOT / "integrations/vllm/rocm_kernels_vllm/experts.py").read_text()
    assert f"MAX_EXPERTS, MAX_TOPK = {moe.MAX_EXPERTS}, {moe.MAX_TOPK}" in plugin


@pytest.mark.parametrize("experts, slots", [(64, 22), (520, 8), (2048, 32)])
@torch.no_grad()
def test_what_is_served_runs(package, run_kernelized, device, experts, slots):
    model = tiny(experts, slots).to(device)
    report = package.models.quantize_model_(model, activations="none")
    assert {*report.experts.values()} == {"FP8, a scale a channel"}
    ids = tokens(1, 9, device)
    expected = model(ids).logits
    run_kernelized(model)
    assert ("Experts", "Experts") in package.models.kernelized_layers(model)
    error = (model(ids).logits - expected).norm() / expected.norm()
    assert error < 0.02, error.item()


@pytest.mark.parametrize(
    "experts, slots, reason",
    [
        (40, 33, "stays: takes 33 experts a token, of which fused_moe serves 32"),
        (2049, 2, "stays: has 2049 experts, of which fused_moe serves 2048"),
    ],
)
@torch.no_grad()
def test_what_is_not_served_stays_and_says_why(
    package, run_kernelized, device, experts, slots, reason
):
    model = tiny(experts, slots).to(device)
    ids = tokens(1, 9, device)
    report = package.models.quantize_model_(model, activations="none")
    assert [*report.experts.values()] == [reason] and reason in str(report)
    expected = model(ids).logits
    run_kernelized(model)
    assert ("Experts", "Experts") not in package.models.kernelized_layers(model)
    error = (model(ids).logits - expected).norm() / expected.norm()
    assert error < 1e-3, error.item()
