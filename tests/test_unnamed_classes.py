"""MLPs, attentions and decoder layers of classes that no family names: what they compute is asked
of them, and what another computes is left alone."""

import copy
import functools

import pytest
import torch
from kernels import Mode
from kernels.layer.layer import _validate_layer
from test_families import tiny
from tiny_attention import prompt
from tiny_attention import tiny as tiny_with_attention
from tiny_models import randomized, tokens
from torch import nn
from transformers import Starcoder2Config, Starcoder2ForCausalLM

PARTS = ("MLP", "DecoderLayer", "Attention")


def renamed(model):
    """A model whose layers have classes of other names, with forwards of their own."""
    for module in model.modules():
        cls = type(module)
        if cls.__name__.endswith(PARTS):
            own = {"forward": copy.copy(cls.forward), "__module__": cls.__module__}
            module.__class__ = type(f"Strange{PARTS.index(ending(cls))}", (cls,), own)
    return model


def ending(cls):
    return next(part for part in PARTS if cls.__name__.endswith(part))


@pytest.fixture
def package(best_package):
    return best_package


@pytest.mark.parametrize(
    "family",
    ["qwen3", "phi3", "gemma2", "granite", "olmo2", "mixtral", "qwen3_moe", "gpt_oss", "glm4"],
)
@torch.no_grad()
def test_a_known_formula_by_another_name(package, run_kernelized, device, family):
    """As many layers of each kind, and the same bits."""
    named = tiny(family).to(device)
    strange = renamed(copy.deepcopy(named))
    counts = []
    for model in (named, strange):
        package.models.quantize_model_(model)
        run_kernelized(model)
        assert package.models.unkernelized_layers(model) == {}
        counts.append(sorted(layers_of(package, model)))
    assert counts[0] == counts[1]
    ids = tokens(2, 9, device)
    assert torch.equal(*(model(ids).logits for model in (named, strange)))


def layers_of(package, model):
    found = package.models.kernelized_layers(model).items()
    return [(layer, count) for (_, layer), count in found]


class Halved(nn.Module):
    """Known names, another formula."""

    def __init__(self, layer):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + 0.5 * attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Scaled(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


class Asked(nn.Module):
    """A gated MLP that may be given more than x."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x, scale=1.0):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * scale)


@pytest.mark.parametrize("other", [Halved, Scaled, Asked])
@torch.no_grad()
def test_another_formula_is_left_alone(package, run_kernelized, device, other):
    model = tiny("qwen3").to(device).eval()
    layers = model.model.layers
    if other is Halved:
        layers[1] = Halved(layers[1])
    else:
        layers[1].mlp = other(layers[1].mlp)
    package.models.quantize_model_(model, activations="none")
    ids = tokens(2, 9, device)
    expected = model(ids, use_cache=False).logits
    run_kernelized(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
    changed = layers[1] if other is Halved else layers[1].mlp
    assert "kernel_family" not in vars(changed) and "forward" not in vars(changed)


def gated(cls):
    """An attention that makes more of its input than queries, keys and values."""

    @functools.wraps(cls.forward)
    def forward(self, hidden_states, **others):
        out, weights = cls.forward(self, hidden_states, **others)
        return out * hidden_states.sigmoid(), weights

    return type(f"Gated{cls.__name__}", (cls,), {"forward": forward, "__module__": cls.__module__})


@pytest.fixture
def starcoder(package, device):
    package.models.use_attention()
    _, model = tiny_with_attention("Starcoder2", use_bias=True)
    return model.to(device)


def logits(model, given):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True,
               "return_dict_in_generate": True, "max_new_tokens": 5}  # fmt: skip
    return torch.stack(model.generate(**given, **options).logits)


@pytest.mark.parametrize("family", ["Starcoder2", "Qwen3"])
def test_an_attention_that_makes_more_of_its_input(package, run_kernelized, device, family):
    """Alone, and in a decoder layer that is one of a family's by another name: then the layer is
    ours, and the attention gets what it got."""
    package.models.use_attention()
    model = renamed(tiny_with_attention(family)[1].to(device))
    for layer in model.model.layers:
        layer.self_attn.__class__ = gated(type(layer.self_attn))
    package.models.quantize_model_(model, activations="none")
    plain = copy.deepcopy(model)
    model = run_kernelized(model, Mode.INFERENCE)
    assert not any(hasattr(layer.self_attn, "kernel_attention") for layer in model.model.layers)
    assert all(("forward" in vars(layer)) == (family == "Qwen3") for layer in model.model.layers)
    package.models.use_decode_step(model)
    given = {name: tensor.to(device) for name, tensor in prompt().items()}
    torch.testing.assert_close(logits(model, given), logits(plain, given), rtol=1e-3, atol=1e-3)


def test_an_attention_alone_in_a_step(package, run_kernelized, device, starcoder):
    package.models.quantize_model_(starcoder, activations="none")
    plain = copy.deepcopy(starcoder)
    model = run_kernelized(starcoder, Mode.INFERENCE)
    found = package.models.kernelized_layers(model)
    assert found["Starcoder2Attention", "Attention4AndOthers"] == 2
    package.models.use_decode_step(model)
    given = {name: tensor.to(device) for name, tensor in prompt().items()}
    for _ in range(2):
        torch.testing.assert_close(logits(model, given), logits(plain, given), rtol=1e-3, atol=1e-3)
    assert package.models.decode_steps(model).replayed == 7


@pytest.mark.parametrize("where", ["self_attn", "self_attn.q_proj", "self_attn.qkv_proj",
                                   "self_attn.o_proj"])  # fmt: skip
def test_a_hook_sees_what_it_saw(package, run_kernelized, device, starcoder, where):
    package.models.quantize_model_(starcoder, activations="none")
    plain = copy.deepcopy(starcoder)
    model = run_kernelized(starcoder, Mode.INFERENCE)
    package.models.use_decode_step(model)  # whose cache lets the attention be ours
    given = {name: tensor.to(device) for name, tensor in prompt().items()}
    seen = {}
    for each in (plain, model):
        seen[each] = []
        part = each.model.layers[1].get_submodule(where)
        part.register_forward_hook(lambda m, args, out, each=each: seen[each].append(of(out)))
        said = logits(each, given)
        assert all(torch.equal(*kept) for kept in seen[each]), "it was written to"
        seen[each] = [kept[1] for kept in seen[each]] + [said]
    if where == "self_attn.qkv_proj":  # which plain has, and does not call
        seen[plain], seen[model] = seen[plain][-1:], seen[model][-1:]
    assert len(seen[plain]) == len(seen[model]) > 0
    for pair in zip(seen[plain], seen[model], strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


def of(out):
    """What a module has returned, and a copy of it."""
    out = out if isinstance(out, torch.Tensor) else out[0]
    return out, out.clone()


def test_training_runs_its_own_forward(package, run_kernelized, starcoder, device):
    package.models.quantize_model_(starcoder, activations="none")
    plain = copy.deepcopy(starcoder).train()
    model = run_kernelized(starcoder).train()
    ids = tokens(2, 9, device)
    gradients = []
    for each in (plain, model):
        embeddings = each.get_input_embeddings()(ids).detach().requires_grad_()
        each(inputs_embeds=embeddings).logits.square().sum().backward()
        gradients.append(embeddings.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_layers_of_attentions_are_pure(package, run_kernelized):
    """And fit the forwards that they replace."""
    model = randomized(Starcoder2ForCausalLM(Starcoder2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=160)))  # fmt: skip
    package.models.quantize_model_(model)
    attention = model.model.layers[0].self_attn
    layer = getattr(package.layers, type(attention).kernel_layer_name)
    _validate_layer(check_cls=type(attention), cls=layer, repo="ours")
    assert layer.has_backward is False and layer.can_torch_compile is True


def test_too_many_arguments_are_told(package, run_kernelized, starcoder):
    """By the forward that is replaced."""
    package.models.quantize_model_(starcoder)
    attention = run_kernelized(starcoder, Mode.INFERENCE).model.layers[0].self_attn
    x = torch.zeros(1, 2, 64, device=starcoder.device)
    with torch.inference_mode():
        with pytest.raises(TypeError, match="positional arguments"):
            attention(x, None, None, None, None)
        with pytest.raises(TypeError, match="multiple values for argument 'hidden_states'"):
            attention(x, hidden_states=x)
        with pytest.raises(TypeError, match="missing"):
            attention(attention_mask=None, position_embeddings=None)


@pytest.mark.parametrize("family", ["Starcoder2", "Cohere"])
def test_an_attention_alone_compiles(package, run_kernelized, device, family):
    """As one graph."""
    package.models.use_attention()
    model = tiny_with_attention(family)[1].to(device)
    package.models.quantize_model_(model, activations="none")
    model = run_kernelized(model, Mode.INFERENCE | Mode.TORCH_COMPILE)
    assert package.models.kernelized_layers(model)[f"{family}Attention", "Attention4AndOthers"] == 2
    torch._dynamo.reset()
    compiled, ids = torch.compile(model, fullgraph=True, backend="aot_eager"), tokens(2, 9, device)
    with torch.inference_mode():
        pair = (each(ids, use_cache=False).logits for each in (compiled, model))
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
