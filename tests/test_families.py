"""Families of models: whole decoder layers of each, and what is left alone and named."""

import copy
import functools

import pytest
import torch
from kernels import Mode
from project import slow_but
from tiny_models import dequantized, quantizing_inputs, randomized, tiny_llama, tokens
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FalconConfig,
    GPT2Config,
    JambaConfig,
    MambaConfig,
    RwkvConfig,
    T5Config,
)

# Model type in transformers -> what its tiny configuration has besides.
FAMILIES = {
    "phi3": {"pad_token_id": 0},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    # Multipliers that none of the two layers can lose unseen.
    "granite": {"residual_multiplier": 0.4, "attention_multiplier": 0.3, "embedding_multiplier": 2},
    "olmo2": {},
    # All experts for each token: a router that chooses anew for a rounding would drown the rest.
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 80,
        "head_dim": 16,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 16},
    # The second layer has experts; its shared one is a gated MLP of the first's class.
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 144,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "attention_chunk_size": 64,
    },
    "deepseek_v3": {
        "num_key_value_heads": 6,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 80,
        "first_k_dense_replace": 1,
    },
}

# Families that are another under names of their own.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 80}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 80,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT = FAMILIES["deepseek_v3"]
ALIKE = {
    "cwm": {},
    "diffllama": {},
    "ernie4_5": {},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "ministral3": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "glm": {"head_dim": 16, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "granite_swa": FAMILIES["granite"],
    "exaone4": {},
    "olmo3": {},
    "dots1": {**ROUTED, "head_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 4, "moe_intermediate_size": 80, "moe_num_shared_experts": 1,
    },
    "glm4_moe": {**ROUTED, "head_dim": 16},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 80},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 4, "moe_num_shared_experts": 1,
                  "pad_token_id": 0},
    "mellum": {**EXPERTS, "head_dim": 16},
    "minimax_m2": {**FAMILIES["mixtral"], "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 4},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 4, "pad_token_id": 0},
    "deepseek_v2": LATENT,
    "glm4_moe_lite": LATENT,
    "youtu": {k: v for k, v in LATENT.items() if "expert" not in k},
    "exaone_moe": {**EXPERTS, "n_group": 1, "topk_group": 1, "num_shared_experts": 1,
                   "head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 4, "head_dim": 16},
    "hy_v3": {**EXPERTS, "head_dim": 16},
    "solar_open": {**ROUTED, "head_dim": 16},
}  # fmt: skip


def tiny(model_type, **changes):
    """A model of a family, of two layers and grouped queries."""
    config = AutoConfig.for_model(
        model_type,
        **{
            "hidden_size": 96,
            "intermediate_size": 144,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 160,
            **FAMILIES.get(model_type, ALIKE.get(model_type, {})),
            **changes,
        },
    )
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def quantize_(package):
    """With FP8 inputs on any device: where both sides round alike, they can be compared closely."""
    return functools.partial(package.models.quantize_model_, activations="dynamic")


# ---- whole layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *ALIKE])
@torch.no_grad()
def test_a_family_equals_its_reference(package, quantize_, run_kernelized, device, family):
    """Against the model's own forward, with linears that quantise their inputs, bar a tie.

    NVIDIA's FP8 tensor cores add in some 14 bits, so that more of h of the experts rounds the other
    way, each by a step of FP8: up to 0.31 of the noise were seen on an H200.
    """
    model = tiny(family).to(device)
    quantize_(model)
    ids = tokens(2, 9, device)
    expected = quantizing_inputs(package, model)(ids).logits
    unquantised = dequantized(package, model).to(device)(ids).logits
    torch.testing.assert_close(model(ids).logits, unquantised)
    actual = run_kernelized(model)(ids).logits
    decoder = type(model.model.layers[0]).__name__
    counts = package.models.kernelized_layers(model)
    assert [count for (name, _), count in counts.items() if name == decoder] == [2]
    noise = (expected - unquantised).abs().mean()
    experts = any(isinstance(m, package.models.Experts) for m in model.modules())
    share = 0.5 if device.type == "cuda" and experts else 0.05
    assert (actual - expected).abs().mean() < share * noise


@torch.no_grad()
def test_deepseek_without_latent_queries(package, quantize_, run_kernelized, device):
    model = tiny("deepseek_v3", q_lora_rank=None).to(device)
    report = quantize_(model)
    assert report.fused["model.layers.1.self_attn.qkv_a_proj"] == (
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.kv_a_proj_with_mqa",
    )
    ids = tokens(2, 9, device)
    expected = quantizing_inputs(package, model)(ids).logits
    noise = (expected - dequantized(package, model).to(device)(ids).logits).abs().mean()
    assert (run_kernelized(model)(ids).logits - expected).abs().mean() < 0.05 * noise


@torch.no_grad()
def test_an_mlp_in_16_bits_leaves_the_attention_fused(package, quantize_, run_kernelized, device):
    model = tiny_llama().to(device)
    quantize_(model, skip=["*.mlp.*"])
    ids = tokens(2, 9, device)
    expected = quantizing_inputs(package, model)(ids).logits
    noise = (expected - dequantized(package, model).to(device)(ids).logits).abs().mean()
    actual = run_kernelized(model)(ids).logits
    counts = package.models.kernelized_layers(model)
    assert counts["LlamaDecoderLayer", "LlamaDecoderLayer"] == 2
    assert ("LlamaMLP", "SwiGLUMLP") not in counts
    assert (actual - expected).abs().mean() < 0.05 * noise


@pytest.mark.parametrize("family", slow_but(["gemma3_text", "qwen3_moe"], FAMILIES))
@torch.no_grad()
def test_a_family_in_bfloat16_decodes_and_compiles(
    package, quantize_, run_kernelized, device, family
):
    model = tiny(family).bfloat16().to(device)
    original = copy.deepcopy(model).float()
    quantize_(model, activations="none")
    run_kernelized(model, Mode.INFERENCE | Mode.TORCH_COMPILE)
    ids = tokens(2, 7, device)
    whole = model(ids).logits
    exact = original(ids).logits
    assert torch.nn.functional.cosine_similarity(whole.float(), exact, dim=-1).min() > 0.9
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    step = model(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(step[:, 0], whole[:, -1], atol=0.15, rtol=0.05)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(ids, use_cache=False).logits, model(ids).logits)


class PlusOneNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) - 0.5), 1e-5

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


@torch.no_grad()
def test_one_plus_weight_follows_a_loaded_weight(quantize_, run_kernelized, device):
    model, other = nn.Sequential(PlusOneNorm(96)), nn.Sequential(PlusOneNorm(96))
    quantize_(model)
    assert list(model.state_dict()) == ["0.weight"]
    run_kernelized(model).load_state_dict(other.state_dict())
    x = torch.randn(3, 96, device=device)
    torch.testing.assert_close(model(x), other.to(device)(x))


# ---- what is left alone, and named ---------------------------------------------------------------


def test_report_names_what_stays_experts_first(quantize_):
    model = tiny("mixtral").bfloat16()
    report = quantize_(model, skip=["*.experts"])
    assert report.experts == {
        f"model.layers.{i}.mlp.experts": "stays: asked to skip" for i in range(2)
    }
    experts = ["model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"]
    assert list(report.kept)[:2] == experts
    fp8 = 2 * (96 * (96 + 32 + 32 + 96) + 4 * (96 + 32 + 32 + 96))  # q, k, v, o and their scales
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert report.kept[experts[0]] == 2 * 2 * 4 * (2 * 144) * 96 / report.bytes_after
    rest = (report.bytes_after - fp8 - buffers) / report.bytes_after
    assert sum(report.kept.values()) == pytest.approx(rest, abs=1e-9), "all is named, once"
    share = f"{report.kept[experts[0]]:.1%}"
    assert f"not FP8: {share} of the bytes, {experts[0]}" in str(report)


class ReadsItsLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.called = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.called(x.to(self.read.weight.dtype)) @ self.read.weight


@torch.no_grad()
def test_linears_whose_weight_the_model_reads_stay(package, quantize_, run_kernelized, device):
    """T5 casts to its wo's dtype, Jamba multiplies with its dt_proj's weight, torch's encoder layer
    hands weights to a kernel of its own, RWKV divides those of its blocks by powers of two."""
    config = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    t5 = AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=160, **config)).eval()
    ids = tokens(1, 5)
    jamba = AutoModelForCausalLM.from_config(
        JambaConfig(
            vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_experts=1, num_experts_per_tok=1,
            attn_layer_offset=1, attn_layer_period=2, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    rwkv = AutoModelForCausalLM.from_config(
        RwkvConfig(vocab_size=160, hidden_size=32, num_hidden_layers=2, context_length=64)
    ).eval()
    encoder = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    for model, inputs, stays in (
        (ReadsItsLinear(), (torch.randn(3, 16),), {"read"}),
        (rwkv, (ids,), {f"rwkv.blocks.{i}.{name}" for i in range(2)
                        for name in ("attention.output", "feed_forward.value")}),
        (encoder, (torch.randn(2, 5, 32),), {"linear1", "linear2", "self_attn.out_proj"}),
        (jamba, (ids,), {"model.layers.0.mamba.dt_proj"}),
        (t5, (ids, None, ids), {f"{coder}.block.0.layer.{i}.DenseReluDense.wo"
                                for coder, i in (("encoder", 1), ("decoder", 2))}),
    ):  # fmt: skip
        expected = model(*inputs)
        report = quantize_(model)
        reasons = {name: why for name, why in report.skipped.items() if "reads" in why}
        assert set(reasons) == stays
        assert all("itself" in why for why in reasons.values())
        actual = run_kernelized(model)(*[x if x is None else x.to(device) for x in inputs])
        expected, actual = getattr(expected, "logits", expected), getattr(actual, "logits", actual)
        close = torch.nn.functional.cosine_similarity(actual.cpu(), expected, dim=-1)
        assert close.min() > 0.98, type(model)


@torch.no_grad()
def test_subclasses_that_compute_a_linear_are_linears(package, quantize_, run_kernelized, device):
    """Falcon's, say; one that computes something else, or only for small inputs, is named."""

    class Clamped(nn.Linear):
        def forward(self, x):
            return super().forward(x).clamp(-100, 100)

    report = quantize_(nn.Sequential(Clamped(16, 16)))
    assert report.skipped == {"0": "is a Clamped"}
    falcon = randomized(
        AutoModelForCausalLM.from_config(
            FalconConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=160,
                bos_token_id=0, eos_token_id=0,
            )
        )
    )  # fmt: skip
    assert len(quantize_(falcon).converted) == 8
    ids = tokens(2, 9)
    expected = quantizing_inputs(package, falcon)(ids).logits.to(device)
    noise = (expected - falcon(ids).logits.to(device)).abs().mean()
    actual = run_kernelized(falcon)(ids.to(device)).logits
    assert (actual - expected).abs().mean() < 0.1 * noise


@torch.no_grad()
def test_a_float32_residual_meets_a_16_bit_norm(package, quantize_, run_kernelized, device):
    """Mamba's, in bfloat16."""
    config = MambaConfig(vocab_size=160, hidden_size=32, num_hidden_layers=2, residual_in_fp32=True)
    model = randomized(AutoModelForCausalLM.from_config(config)).bfloat16().to(device)
    ids = tokens(2, 9, device)
    report = quantize_(model, activations="none")
    expected = model(ids).logits
    assert report.skipped["backbone.layers.0.mixer.conv1d"] == "is a Conv1d"
    logits = run_kernelized(model)(ids).logits
    assert ("MambaRMSNorm", "RMSNorm") in package.models.kernelized_layers(model)
    close = torch.nn.functional.cosine_similarity(logits.float(), expected.float(), dim=-1)
    assert close.min() > 0.999


@torch.no_grad()
def test_matrices_that_no_linear_holds_are_named(quantize_):
    config = GPT2Config(vocab_size=160, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    report = quantize_(AutoModelForCausalLM.from_config(config))
    assert report.converted == ()
    assert report.skipped["transformer.h.2.attn.c_attn"] == "is a Conv1D"
    assert "skipped transformer.h.*.attn.c_attn: is a Conv1D (3)" in str(report)
