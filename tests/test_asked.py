"""Modules of known classes that compute something else than those of today, and norms by any name:
what they compute is asked of their code, and what is not computed here stays, and is named."""

import copy

import pytest
import torch
from kernels import Mode
from test_families import tiny
from test_moe_models import tiny as tiny_experts
from tiny_models import dequantized, quantizing_inputs, tiny_llama, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


@pytest.fixture
def package(best_package):
    return best_package


# ---- MLPs


def softcap(x, cap):
    return torch.tanh(x / cap) * cap


def mlp_class(compute):
    return type("LlamaMLP", (LlamaMLP,), {"forward": compute, "__module__": __name__})


MLPS = {
    "a cap of the gate": lambda self, x: self.down_proj(
        softcap(self.act_fn(self.gate_proj(x)), 4.0) * self.up_proj(x)
    ),
    "a wide cap of up": lambda self, x: self.down_proj(
        self.act_fn(self.gate_proj(x)) * softcap(self.up_proj(x), 1000.0)
    ),
    "a limit": lambda self, x: self.down_proj(
        self.act_fn(self.gate_proj(x)).clamp(max=50) * self.up_proj(x)
    ),
    "gate and up exchanged": lambda self, x: self.down_proj(
        self.act_fn(self.up_proj(x)) * self.gate_proj(x)
    ),
    "one more": lambda self, x: self.down_proj(
        self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1)
    ),
    "a multiplier": lambda self, x: (
        1.01 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    ),
    "what it takes": lambda self, x, scores: self.down_proj(
        self.act_fn(self.gate_proj(x)) * self.up_proj(x) * scores
    ),
}


@pytest.mark.parametrize("case", MLPS)
@torch.no_grad()
def test_an_mlp_that_computes_something_else_stays(package, run_kernelized, device, case):
    model = tiny_llama().to(device)
    for layer in model.model.layers:
        layer.mlp.__class__ = mlp_class(MLPS[case])
    report = package.models.quantize_model_(model, activations="none")
    assert list(report.layers) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    for why in report.layers.values():
        assert "takes other arguments" in why or "computes something else" in why
    assert len(report.converted) == 14, "its linears are served all the same"
    original = copy.deepcopy(model)
    run_kernelized(model)
    assert package.models.unkernelized_layers(model) == report.layers
    counts = package.models.kernelized_layers(model)
    assert ("LlamaMLP", "SwiGLUMLP") not in counts and counts["FP8Linear", "FP8Linear"]
    if case != "what it takes":
        ids = tokens(2, 5, device)
        assert counts["LlamaDecoderLayer", "LlamaDecoderLayer"] == 2
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_an_mlp_written_another_way_is_served(package, run_kernelized, device):
    def forward(self, hidden):
        up = self.up_proj(hidden)
        return self.down_proj(up.mul(nn.functional.silu(self.gate_proj(hidden))))

    model = tiny_llama().to(device)
    for layer in model.model.layers:
        layer.mlp.__class__ = mlp_class(forward)
    report = package.models.quantize_model_(model, activations="none")
    assert report.layers == {}
    exact = dequantized(package, model)
    run_kernelized(model)
    assert package.models.kernelized_layers(model)["LlamaMLP", "SwiGLUMLP"] == 2
    ids = tokens(2, 5, device)
    torch.testing.assert_close(model(ids).logits, exact(ids).logits, rtol=1e-3, atol=1e-3)


# ---- experts


@pytest.mark.parametrize("cap", [4.0, 30.0, 1000.0])
@torch.no_grad()
def test_experts_with_a_soft_cap_stay(package, run_kernelized, device, cap):
    """As transformers 5.24 has them: of the gate's factor and of up."""
    model = tiny_experts("mixtral").to(device)
    cls = type(model.model.layers[0].mlp.experts)

    def apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return softcap(gate, cap) * torch.sigmoid(gate) * softcap(up, cap)

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = type(cls.__name__, (cls,), {"_apply_gate": apply_gate})
    original, ids = copy.deepcopy(model), tokens(2, 5, device)
    report = package.models.quantize_model_(model, skip=["*_proj"])
    stays = "stays: computes its gate in a way of its own"
    assert set(report.experts.values()) == {stays} and len(report.experts) == 2
    run_kernelized(model)
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_llama4_experts_with_a_limit_stay(package, device):
    """Their gate is in their forward, which takes no routing."""
    model = tiny_experts("llama4_text").to(device)
    cls = type(model.model.layers[0].feed_forward.experts)

    def forward(self, hidden_states):
        rows = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, dim=-1)
        out = torch.bmm(softcap(up, 20.0) * self.act_fn(gate), self.down_proj)
        return out.view(-1, self.hidden_size)

    experts = model.model.layers[1].feed_forward.experts
    experts.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    report = package.models.quantize_model_(model)
    assert report.experts == {
        "model.layers.0.feed_forward.experts": "FP8, a scale a channel",
        "model.layers.1.feed_forward.experts": "stays: computes something else than gated experts",
    }
    assert report.layers["model.layers.1.feed_forward"] == "its experts are a Llama4TextExperts"


@torch.no_grad()
def test_a_llama4_block_that_computes_something_else_stays(package, run_kernelized, device):
    model = tiny_experts("llama4_text").to(device)
    block = model.model.layers[0].feed_forward

    def forward(self, hidden_states):
        rows = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(rows)
        routed = rows.repeat(scores.shape[1], 1) * scores.transpose(0, 1).reshape(-1, 1)
        out = self.experts(routed).reshape(scores.shape[1], -1, self.hidden_dim).sum(dim=0)
        return 0.5 * self.shared_expert(rows) + out, logits

    block.__class__ = type("Llama4TextMoe", (type(block),), {"forward": forward})
    report = package.models.quantize_model_(model)
    name = "model.layers.0.feed_forward"
    assert report.layers == {name: "computes something else than Llama 4's experts"}
    original, ids = quantizing_inputs(package, model), tokens(2, 5, device)
    run_kernelized(model)
    assert package.models.unkernelized_layers(model) == report.layers
    close = nn.functional.cosine_similarity(model(ids).logits, original(ids).logits, dim=-1)
    assert close.min() > 0.98


# ---- norms


class ZeroCentered(nn.Module):
    """As transformers writes Qwen3.5's."""

    def __init__(self, size, name="epsilon"):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) - 0.5)
        self.scale, self.name = 2.0, name
        setattr(self, name, 1e-5)

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + getattr(self, self.name))
        return (h * (1.0 + self.weight.float())).type_as(x)


def named(kernel_layer_name, base=ZeroCentered):
    members = {"kernel_layer_name": kernel_layer_name, "__module__": __name__}
    return type("Normalised", (base,), members)


@pytest.mark.parametrize("eps", ["epsilon", "eps", "rms_norm_eps", "variance_epsilon"])
@pytest.mark.parametrize("name", ["RMSNormZeroCentered", "RMSNorm", "TheNextName"])
@torch.no_grad()
def test_a_norm_is_served_whatever_it_is_called(package, run_kernelized, device, name, eps):
    cls = named(name)
    model = nn.Sequential(cls(96, eps), cls(64, eps)).to(device)
    original = copy.deepcopy(model)
    report = package.models.quantize_model_(model)
    assert report.norms == {} and list(model.state_dict()) == ["0.weight", "1.weight"]
    run_kernelized(model, Mode.INFERENCE | Mode.TORCH_COMPILE)
    assert package.models.unkernelized_layers(model) == {}
    counts = package.models.kernelized_layers(model)
    assert sum(n for (norm, _), n in counts.items() if norm == "Normalised") == 2
    x = torch.randn(3, 96, device=device) * torch.tensor([[1e-3], [1], [1e3]], device=device)
    torch.testing.assert_close(model[0](x), original[0](x))


OTHERS = {
    "weight in the root": lambda self, x: x * torch.rsqrt(
        (x * self.weight).pow(2).mean(-1, keepdim=True) + self.epsilon
    ),
    "eps beside the root": lambda self, x: self.weight * x / (
        x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon
    ),
    "a scale": lambda self, x: 1.5 * ZeroCentered.forward(self, x),
    "two and the weight": lambda self, x: ZeroCentered.forward(self, x) + x * torch.rsqrt(
        x.pow(2).mean(-1, keepdim=True) + self.epsilon
    ),
    "a limit": lambda self, x: ZeroCentered.forward(self, x.clamp(-100, 100)),
    "a gate that may be left out": lambda self, x, gate=None: ZeroCentered.forward(
        self, x if gate is None else x * gate
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["RMSNormZeroCentered", "TheNextName"])
@pytest.mark.parametrize("case", OTHERS)
@torch.no_grad()
def test_another_norm_by_that_name_computes_its_own(package, run_kernelized, device, name, case):
    cls = type("OtherNorm", (named(name),), {"forward": OTHERS[case], "kernel_layer_name": name})
    # kernels refuses a class whose forward takes other arguments, but of the first class alone.
    run_kernelized(nn.Sequential(named(name)(96)))
    x = torch.randn(3, 96, device=device)
    for prepared in (False, True):
        model = nn.Sequential(cls(96)).to(device)
        expected = model(x)
        if prepared:
            assert package.models.quantize_model_(model).norms == {"OtherNorm": 1}
        run_kernelized(model)
        assert torch.equal(model(x), expected)
        assert cls.kernel_layer_name == name


QWEN35 = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 32, "pad_token_id": 0,
}  # fmt: skip


@torch.no_grad()
def test_qwen35s_norms(package, run_kernelized, device):
    config = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=96, intermediate_size=144, num_hidden_layers=2, vocab_size=160,
        num_attention_heads=4, num_key_value_heads=2, **QWEN35,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(-0.5, 0.5)
    model = model.to(device)
    report = package.models.quantize_model_(model, activations="none")
    assert set(report.norms) <= {"Qwen3_5RMSNormGated"}
    exact, ids = dequantized(package, model).to(device), tokens(2, 7, device)
    run_kernelized(model)
    counts = package.models.kernelized_layers(model)
    assert sum(count for (name, _), count in counts.items() if name == "Qwen3_5RMSNorm") == 7
    torch.testing.assert_close(model(ids).logits, exact(ids).logits, rtol=1e-3, atol=1e-3)


# ---- what is derived from a weight


def optimizer_step(weight):
    weight.grad = torch.randn_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()
    weight.grad = None


CHANGES = {
    "an optimizer": optimizer_step,
    "add_": lambda weight: weight.add_(0.25),
    "data.copy_": lambda weight: weight.data.copy_(torch.randn_like(weight)),
    "data": lambda weight: setattr(weight, "data", torch.randn_like(weight)),
    "detach": lambda weight: weight.detach().mul_(3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
@torch.no_grad()
def test_a_weight_may_change(package, run_kernelized, device, family, dtype, change):
    """Of every norm, in every way; also where a decoder layer computes it."""
    model = tiny(family).to(dtype).to(device)
    package.models.quantize_model_(model, activations="none")
    original, ids = copy.deepcopy(model), tokens(2, 5, device)
    run_kernelized(model)
    before = model(ids).logits
    norms = [name for name, module in model.named_modules() if hasattr(module, "kernel_norm")]
    assert len(norms) >= 5
    for name in norms:
        weight = model.get_submodule(name).weight
        CHANGES[change](weight)
        original.get_submodule(name).weight.data = weight.data.clone()
    actual, expected = model(ids).logits.float(), original(ids).logits.float()
    assert (actual - before.float()).abs().max() > 0.3
    error = (actual - expected).norm() / expected.norm()
    assert error < (1e-3 if dtype == torch.float32 else 0.05)


@torch.no_grad()
def test_one_plus_a_16_bit_weight_is_not_rounded(package, run_kernelized, device):
    """1 + 2^-10 is 1 in bfloat16; the models add in float32."""
    model = nn.Sequential(ZeroCentered(512)).to(device).bfloat16()
    model[0].weight.fill_(2.0**-7).mul_(torch.rand(512, device=device))
    original = copy.deepcopy(model).float()
    package.models.quantize_model_(model)
    run_kernelized(model)
    x = torch.randn(4, 512, device=device).bfloat16()
    assert torch.equal(model(x), original(x.float()).bfloat16())
