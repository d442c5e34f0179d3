"""Experts of transformers' models on fused_moe: each family's own block beside ours, with the
weights that ours holds."""

import copy
import sys

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from project import slow_but
from tiny_models import randomized, reference_experts, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
    "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_shared_experts": 1,
}  # fmt: skip
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 16}
FAMILIES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 64},
    "qwen3_moe": QWEN,
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "llama4_text": {
        "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 64, "head_dim": 16, "pad_token_id": 0,
    },
    # Experts of a layout that they share with others, gated by another activation.
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "head_dim": 16,
        "moe_intermediate_size": 64, "global_head_dim": 16, "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
    },
}  # fmt: skip


def tiny(model_type):
    config = AutoConfig.for_model(
        model_type,
        **{
            "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 160,
            "num_attention_heads": 4, "num_key_value_heads": 2, **FAMILIES[model_type],
        },
    )  # fmt: skip
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def experts_of(model, cls=object):
    """Names of the experts."""
    return [
        n for n, m in model.named_modules() if n.split(".")[-1] == "experts" and isinstance(m, cls)
    ]


def linears_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def written_back(package, original, model):
    """The original model with the values that the quantised one's experts hold."""
    for name in experts_of(model, package.models.Experts):
        ours, theirs = model.get_submodule(name), original.get_submodule(name)
        for which in ("gate_up_proj", "down_proj"):
            weight, scale = getattr(ours, which), getattr(ours, f"{which}_scale_inv")
            values = [
                package.reference.dequantize_expert(w, s)
                for w, s in zip(weight, scale, strict=True)
            ]
            parameter = getattr(theirs, which)
            values = torch.stack(values).to(parameter.dtype)
            if type(theirs).__name__ in ("GptOssExperts", "Llama4TextExperts"):
                values = values.transpose(1, 2)
            assert values.shape == parameter.shape
            parameter.data = values.contiguous()
    return original


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def run_kernelized(package, device):
    def kernelized(model, mode=Mode.INFERENCE):
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            return kernelize(model.to(device), mode=mode)

    return kernelized


def close(actual, expected, bound):
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < bound, error.item()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family(package, run_kernelized, device, family):
    """The block that holds the experts, with its own router, on one input."""
    original = tiny(family).to(device)
    model = copy.deepcopy(original)
    report = package.models.quantize_model_(model, activations="none", skip=linears_of(model))
    names = experts_of(original)
    assert names and report.experts == dict.fromkeys(names, "FP8, a scale a channel")
    kept = [name for name in report.kept if ".experts." in name and not name.endswith("bias")]
    assert not kept
    expected = written_back(package, copy.deepcopy(original), model)
    ids = tokens(2, 9, device)
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-3, atol=1e-3)

    block = names[-1].rpartition(".")[0]
    seen = {}
    block_module = expected.get_submodule(block)
    hook = block_module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    expected(ids)
    hook.remove()
    run_kernelized(model)
    layers = package.models.kernelized_layers(model)
    layer = "Llama4TextMoe" if family == "llama4_text" else "Experts"
    assert sum(count for (_, name), count in layers.items() if name == layer) == len(names)
    if family == "gemma4_text":  # its block is the decoder layer
        close(model(ids).logits, expected(ids).logits, 0.02)
        return
    theirs = block_module(*seen["args"], **seen["kwargs"])
    ours = model.get_submodule(block)(*seen["args"], **seen["kwargs"])
    theirs, ours = (x[0] if isinstance(x, tuple) else x for x in (theirs, ours))
    close(ours.reshape(theirs.shape), theirs, 0.01)  # bfloat16 between the products


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text"])
@torch.no_grad()
def test_inputs_are_quantised_as_the_reference_does(package, run_kernelized, device, family):
    model = tiny(family).to(device)
    package.models.quantize_model_(model, activations="dynamic", skip=linears_of(model))
    module = model.get_submodule(experts_of(model)[0])
    x = torch.randn(24, 96, device=device)
    ids = torch.randint(-1, 9, (24, 2), device=device)  # other ranks' among them
    weights = torch.rand(24, 2, device=device)
    expected = reference_experts(package, module, x, ids, weights)
    run_kernelized(model)
    close(model.get_submodule(experts_of(model)[0])(x, ids, weights), expected, 0.02)


@pytest.mark.parametrize("family", slow_but(["gpt_oss"], ["qwen3_moe", "gpt_oss", "llama4_text"]))
@torch.no_grad()
def test_decodes_and_compiles(package, run_kernelized, device, family):
    model = tiny(family).bfloat16().to(device)
    package.models.quantize_model_(model)
    run_kernelized(model, Mode.INFERENCE | Mode.TORCH_COMPILE)
    ids = tokens(2, 5, device)
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 9)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(ids, use_cache=False).logits, model(ids).logits)


@torch.no_grad()
def test_mxfp4_is_found_again(package, run_kernelized, device):
    """GPT-OSS's checkpoints, which transformers dequantises where it has no kernel for them."""
    model = tiny("gpt_oss").bfloat16().to(device)
    for name in experts_of(model):
        for parameter in (
            model.get_submodule(name).gate_up_proj,
            model.get_submodule(name).down_proj,
        ):
            experts, k, n = parameter.shape
            codes = torch.randint(256, (experts, n, k // 2), dtype=torch.uint8)
            scales = torch.randint(120, 125, (experts, n, k // 32), dtype=torch.uint8)
            values = [
                package.reference.dequantize_expert(c, s)
                for c, s in zip(codes, scales, strict=True)
            ]
            parameter.data = torch.stack(values).transpose(1, 2).bfloat16().contiguous().to(device)
    original = copy.deepcopy(model)
    report = package.models.quantize_model_(model, skip=linears_of(model))
    assert set(report.experts.values()) == {"MXFP4 of the checkpoint"}
    assert "2 layers of model.layers.*.mlp.experts: MXFP4 of the checkpoint" in str(report)
    rewritten = written_back(package, copy.deepcopy(original), model)
    for before, after in zip(original.parameters(), rewritten.parameters(), strict=True):
        assert torch.equal(before, after)
    module, theirs = (m.get_submodule(experts_of(m)[0]) for m in (model, original))
    x, ids = torch.randn(9, 96, device=device).bfloat16(), torch.randint(8, (9, 2), device=device)
    weights = torch.rand(9, 2, device=device).bfloat16()
    expected = theirs.float()(x.float(), ids, weights.float())
    run_kernelized(model)
    close(module(x, ids, weights), expected, 0.01)


def fp8_experts(config, blocks):
    """As transformers makes them for an FP8 checkpoint, with random weights in them."""
    cls = use_experts_implementation(
        experts_class=type("FP8Experts", (FP8Experts,), {}),
        experts_interface=ALL_FP8_EXPERTS_FUNCTIONS,
    )
    module = cls(config, block_size=(128, 128) if blocks else None)
    for name, parameter in module.named_parameters():
        if "scale" in name:
            parameter.data.uniform_(0.001, 0.002)
        else:
            parameter.data = (40 * torch.randn(parameter.shape)).to(torch.float8_e4m3fn)
    return module


@pytest.mark.parametrize("blocks", [True, False])
@torch.no_grad()
def test_an_fp8_checkpoint_is_adopted(package, run_kernelized, device, blocks):
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=256, moe_intermediate_size=128, num_experts=4
    )
    module = fp8_experts(config, blocks)
    model = nn.ModuleDict({"experts": module})
    report = package.models.quantize_model_(model.to(device))
    assert report.experts == {"experts": "FP8 of the checkpoint"} and not report.kept
    ours = model["experts"]
    x = torch.randn(20, 256, device=device).bfloat16()
    ids = torch.randint(4, (20, 2), device=device)
    weights = torch.rand(20, 2, device=device)
    plain = [
        package.reference.dequantize_expert(ours.gate_up_proj[e], ours.gate_up_proj_scale_inv[e])
        for e in range(4)
    ]
    # The scales mean what they meant in the checkpoint.
    stored = module.gate_up_proj_scale_inv
    rows, columns = (
        -(-size // scales) for size, scales in zip((256, 256), stored.shape[1:], strict=True)
    )
    scale = stored.repeat_interleave(rows, 1).repeat_interleave(columns, 2).to(device)
    torch.testing.assert_close(
        torch.stack(plain).float(), module.gate_up_proj.to(device).float() * scale
    )
    expected = reference_experts(package, ours, x, ids, weights)
    run_kernelized(model)
    close(model["experts"](x, ids, weights), expected, 0.02)


@torch.no_grad()
def test_experts_implementation(package, device):
    """16-bit experts without quantize_model_; of others a sentence."""
    ALL_EXPERTS_FUNCTIONS.register("rocm_kernels", package.layers.experts_forward)
    model = tiny("qwen3_moe").bfloat16().to(device)
    ids = tokens(2, 6, device)
    expected = model.float()(ids).logits
    model.bfloat16().set_experts_implementation("rocm_kernels")
    logits = model(ids).logits
    assert torch.nn.functional.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.99
    other = tiny("gpt_oss").bfloat16().to(device)
    other.set_experts_implementation("rocm_kernels")
    with pytest.raises(ValueError, match=r"GptOssExperts; models.quantize_model_ converts"):
        other(ids)


@torch.no_grad()
def test_experts_that_cannot_be_converted_are_named(package):
    class OwnGate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 16))
            self.down_proj = nn.Parameter(torch.randn(2, 16, 4))

        def _apply_gate(self, both):
            gate, up = both.chunk(2, -1)
            return gate.sin() * up

    class Mxfp4GptOssExperts(OwnGate):
        pass

    wrapped = OwnGate()
    wrapped.forward = lambda x: x
    model = nn.ModuleDict({"a": OwnGate(), "b": Mxfp4GptOssExperts(), "c": OwnGate().to("meta"),
                           "d": wrapped})  # fmt: skip
    report = package.models.quantize_model_(model)
    assert report.experts["a"] == "stays: computes its gate in a way of its own"
    assert "load the model within fp8_checkpoints()" in report.experts["b"]
    assert "meta device" in report.experts["c"]
    assert "forward was replaced" in report.experts["d"]
    assert type(model["a"]) is OwnGate


class TwiceTheExperts(nn.Module):
    """Gated as others, and then something else."""

    def __init__(self, down_experts=2):
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 16))
        self.down_proj = nn.Parameter(torch.randn(down_experts, 16, 4))

    def _apply_gate(self, both):
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for slot in range(ids.shape[1]):
            for t, e in enumerate(ids[:, slot]):
                y = self._apply_gate(self.gate_up_proj[e] @ x[t])
                out[t] += 2 * weights[t, slot] * (self.down_proj[e] @ y)
        return out


class RaisesAtItsGate(TwiceTheExperts):
    def _apply_gate(self, both):
        raise TypeError("an argument more")


@torch.no_grad()
def test_experts_are_asked_what_their_whole_forward_computes(package):
    model = nn.ModuleDict(
        {"twice": TwiceTheExperts(), "zero": TwiceTheExperts(1), "raises": RaisesAtItsGate()}
    )
    report = package.models.quantize_model_(model)
    assert report.experts == {
        "twice": "stays: computes something else than gated experts",
        "zero": "stays: gate_up_proj and down_proj are (2, 8, 16) and (1, 16, 4), which are not "
        "the same gated experts",
        "raises": "stays: its gate cannot be asked what it computes: an argument more",
    }


@torch.no_grad()
def test_a_failure_in_the_last_expert_leaves_the_model_as_it_was(package, device, monkeypatch):
    model = tiny("mixtral").bfloat16().to(device)
    modules = {name: type(module) for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    last = model.model.layers[1].mlp.experts.down_proj[7].data_ptr()
    convert = sys.modules[f"{package.__name__}.models.convert_experts"]
    works = convert.quantize_weight

    def fails_at_the_last(weight, dialect):
        if weight.data_ptr() == last:
            raise MemoryError("planted")
        return works(weight, dialect)

    monkeypatch.setattr(convert, "quantize_weight", fails_at_the_last)
    with pytest.raises(RuntimeError, match=r"layers.1.mlp.experts cannot be quantised.*as it was"):
        package.models.quantize_model_(model)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert not hasattr(model.config, "quantization_config")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    report = package.models.quantize_model_(model, skip=["model.layers.1.mlp.experts"])
    assert len(report.converted) == 8


@torch.no_grad()
def test_what_chooses_experts_stays(package):
    """Also where it is a linear."""
    qwen = package.models.quantize_model_(tiny("qwen2_moe"))
    gates = {f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)}
    assert {name for name, why in qwen.skipped.items() if why == "chooses experts"} == gates
    config = AutoConfig.for_model(
        "jetmoe", hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8,
        intermediate_size=48, num_local_experts=4, vocab_size=160,
    )  # fmt: skip
    jetmoe = package.models.quantize_model_(AutoModelForCausalLM.from_config(config))
    mlp = "model.layers.0.mlp"
    assert jetmoe.skipped[f"{mlp}.router.layer"] == "chooses experts"
    # Its experts are in a layout that nothing here reads: said, too.
    assert jetmoe.skipped[f"{mlp}.input_linear"] == "is a JetMoeParallelExperts"


@torch.no_grad()
def test_hooks_stay(package, run_kernelized, device):
    model, seen = tiny("mixtral").to(device), []
    name = experts_of(model)[0]
    model.get_submodule(name).register_forward_hook(lambda module, *_: seen.append(type(module)))
    package.models.quantize_model_(model)
    model(tokens(1, 3, device))
    run_kernelized(model)(tokens(1, 3, device))
    assert seen == [package.models.Experts] * 2


@torch.no_grad()
def test_experts_keep_their_bits(package, device):
    """Through changes of dtype and device, as FP8Linear does."""
    model = tiny("mixtral")
    package.models.quantize_model_(model)
    module = model.get_submodule(experts_of(model)[0])
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    model.half().to("meta" if device.type == "cpu" else device)
    for name, tensor in module.named_parameters():
        assert tensor.dtype == before[name].dtype and tensor.shape == before[name].shape
