"""Decoder layers whose class has a known name and another forward: names of arguments, their order
and number, and what is returned may change; what is computed may not."""

import copy
import inspect
import textwrap

import pytest
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer.layer import _validate_layer
from project import ROOT
from second_copy import second_copy
from tiny_models import tiny_llama
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

# Name of each -> (the forward's arguments, what the attention gets, what is returned).
BODY = """
def forward({takes}):
    residual = hidden_states
    {result} = self.self_attn({gives})
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
    return {returns}
"""
NORMED = "self.input_layernorm(hidden_states)"
GIVES = f"hidden_states={NORMED}, attention_mask=mask, position_embeddings=rotary"
OUT = "residual + hidden_states"
SERVED = {
    "other names": ("self, hidden_states, mask=None, rotary=None, **kwargs", GIVES, OUT),
    "another order": ("self, mask, rotary, hidden_states, **kwargs", GIVES, OUT),
    "more": (
        "self, hidden_states, mask=None, rotary=None, a=0, b=1, c=2, d=3, **kwargs",
        f"{GIVES}, a=a, b=b, **kwargs",
        OUT,
    ),
    "no others": ("self, hidden_states, mask=None, rotary=None", GIVES, OUT),
    "by name alone": ("self, hidden_states, *, rotary, mask=None, **kwargs", GIVES, OUT),
    "first by position": (
        "self, hidden_states, rotary=None, mask=None",
        GIVES.replace("hidden_states=self", "self"),
        OUT,
    ),
    "with a constant": (
        "self, hidden_states, mask=None, rotary=None, **kwargs",
        f"{GIVES}, output_attentions=False",
        OUT,
    ),
    "a tuple": ("self, hidden_states, mask=None, rotary=None", GIVES, f"({OUT},)"),
    "with the attention's weights": (
        "self, hidden_states, mask=None, rotary=None", GIVES, f"({OUT}, weights)",
    ),
}  # fmt: skip


def layer_class(takes, gives, returns, result="hidden_states, weights", **changes):
    text = BODY.format(takes=takes, gives=gives, returns=returns, result=result)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    scope = {"torch": torch}
    exec(textwrap.dedent(text), scope)
    members = {"forward": scope["forward"], "__module__": __name__}
    return type("LlamaDecoderLayer", (LlamaDecoderLayer,), members)


def model_of(cls):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.__class__ = cls
    return model


def arguments(model, device):
    x = torch.randn(2, 5, 96, device=device)
    positions = torch.arange(5, device=device)[None]
    rotary = model.model.rotary_emb(x, positions)
    mask = torch.full((5, 5), float("-inf"), device=device).triu(1)[None, None]
    return {"hidden_states": x, "mask": mask, "rotary": rotary}


@pytest.fixture
def package(best_package):
    return best_package


@pytest.mark.parametrize("case", SERVED)
@torch.no_grad()
def test_what_is_handed_through_is_handed_through(package, run_kernelized, device, case):
    """Arguments by name and by position; the layer's own forward is the reference."""
    torch._dynamo.reset()  # all layers of a kind count against one limit of recompilations
    cls = layer_class(*SERVED[case])
    model = model_of(cls)
    report = package.models.quantize_model_(model, activations="none")
    assert report.layers == {}
    original = copy.deepcopy(model).to(device).model.layers[1]
    run_kernelized(model, Mode.INFERENCE | Mode.TORCH_COMPILE)
    layer = model.model.layers[1]
    counts = package.models.kernelized_layers(model)
    assert [count for (name, _), count in counts.items() if name == cls.__name__] == [2]
    assert package.models.unkernelized_layers(model) == {}
    named = arguments(model, device)
    seen = []
    for each in (original, layer):
        each.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
        )
    expected = original(**named)
    parameters = inspect.signature(cls.forward).parameters.values()
    order = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
    first = [named.pop(name) for name in order if name in named]
    for hooked in (True, False):
        if not hooked:
            layer.self_attn._forward_pre_hooks.clear()
            layer.self_attn._forward_pre_hooks_with_kwargs.clear()
        torch.testing.assert_close(layer(*first, **named), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=1e-3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = compiled(*first, **named)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_wrong_arguments_are_the_forwards_own_error(package, run_kernelized, device):
    model = model_of(layer_class(*SERVED["no others"]))
    package.models.quantize_model_(model)
    layer = run_kernelized(model).model.layers[0]
    named = arguments(model, device)
    x = named["hidden_states"]
    for args, kwargs, message in (
        ((), {}, "missing 1 required positional argument: 'hidden_states'"),
        ((x,), {"what": 1}, "unexpected keyword argument 'what'"),
        ((x,), {"hidden_states": x}, "multiple values for argument 'hidden_states'"),
        ((x, None, None, None), {}, "positional arguments"),
    ):
        with pytest.raises(TypeError, match=message):
            layer(*args, **kwargs)


TAKES = "self, hidden_states, mask=None, rotary=None, extra=None, **kwargs"
LEFT = {
    "another sum": ((TAKES, GIVES, f"{OUT} * 1.01"), {}, "computes something else"),
    "a limit": ((TAKES, GIVES, f"({OUT}).clamp(-1e3, 1e3)"), {}, "computes something else"),
    "a norm twice": (
        (TAKES, GIVES, f"self.input_layernorm({OUT})"), {}, "computes something else",
    ),
    "an argument that is used": (
        (TAKES, GIVES, f"{OUT} if extra is None else {OUT} * extra"), {}, "cannot be asked",
    ),
    "a return that depends": (
        (TAKES, GIVES, f"{OUT} if extra is None else ({OUT},)"), {}, "depends on its arguments",
    ),
    "an argument that is made": (
        (TAKES, f"{GIVES}, more=[extra]", OUT), {}, "makes more for its attention, a list",
    ),
    "two tensors": (
        (TAKES, f"{GIVES}, raw=hidden_states", OUT), {}, "other arguments than its hidden states",
    ),
    "no norm before": (
        (TAKES, GIVES.replace(NORMED, "hidden_states"), OUT), {}, "other arguments than",
    ),
    "any arguments": (
        ("self, hidden_states, *args, mask=None, rotary=None", GIVES, OUT), {}, "without names",
    ),
    "too many": (
        ("self, hidden_states, mask=None, rotary=None, "
         + ", ".join(f"a{i}=None" for i in range(20)), GIVES, OUT), {}, "as many arguments",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
@torch.no_grad()
def test_what_is_not_computed_is_left_alone_and_named(package, run_kernelized, device, case):
    parts, changes, why = LEFT[case]
    model = model_of(layer_class(*parts, **changes))
    report = package.models.quantize_model_(model, activations="none")
    names = [f"model.layers.{i}" for i in range(2)]
    assert list(report.layers) == names and all(why in text for text in report.layers.values())
    assert f"not whole: 2 model.layers.*: {report.layers[names[0]]}" in str(report)
    original = copy.deepcopy(model).to(device).model.layers[0]
    run_kernelized(model)
    assert package.models.unkernelized_layers(model) == report.layers
    counts = package.models.kernelized_layers(model)
    assert not any(name == "LlamaDecoderLayer" for name, _ in counts)
    named = arguments(model, device)
    actual = model.model.layers[0](**named)
    torch.testing.assert_close(actual, original(**named), rtol=1e-3, atol=1e-3)


def test_reasons_that_lie_in_a_layers_surroundings(package, run_kernelized):
    def quantised(prepare, **options):
        model = tiny_llama()
        prepare(model.model.layers[0])
        report = package.models.quantize_model_(model, **options)
        return {name: why for name, why in report.layers.items() if "layers.0" in name}

    def no_gate(layer):
        layer.mlp.act_fn = nn.Tanh()

    def hooked(layer):
        layer.self_attn.k_proj.register_forward_hook(lambda *_: None)

    def norm_hooked(layer):
        layer.input_layernorm.register_forward_pre_hook(lambda *_: None)

    def wrapped(layer):
        own = layer.forward
        layer.forward = lambda *args, **kwargs: own(*args, **kwargs)

    def other_norm(layer):
        layer.input_layernorm = nn.LayerNorm(96)

    def nothing(layer):
        pass

    layer = "model.layers.0"
    assert quantised(nothing) == {}
    found = quantised(no_gate)
    assert found == {f"{layer}.mlp": "its activation is a Tanh"}
    assert quantised(hooked) == {layer: "its self_attn's k_proj has a hook"}
    assert quantised(norm_hooked) == {layer: "a hook on input_layernorm wants to see it run"}
    assert quantised(wrapped) == {layer: "its forward was replaced"}
    found = quantised(other_norm)
    assert found == {layer: "its input_layernorm is a LayerNorm, which computes no RMSNorm"}
    found = quantised(nothing, skip=["*.0.self_attn.q_proj", "*.0.mlp.up_proj"])
    assert found == {
        layer: "its self_attn's q_proj is a Linear",
        f"{layer}.mlp": "its up_proj is a Linear",
    }
    found = quantised(nothing, fuse=False)
    assert found == {layer: "its self_attn's q_proj, k_proj, v_proj are not joined"}


@torch.no_grad()
def test_what_kernelize_has_not_replaced_is_named(package, run_kernelized):
    model = tiny_llama()
    package.models.quantize_model_(model)
    missing = package.models.unkernelized_layers(model)
    assert missing["model.layers.1"] == "kernelize has not seen it"
    assert {"model.norm", "model.layers.0.mlp", "model.layers.0.mlp.down_proj"} < set(missing)
    mapping = package.layers.kernel_mapping()
    del mapping["LlamaDecoderLayer"]
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    missing = package.models.unkernelized_layers(model)
    assert list(missing) == ["model.layers.0", "model.layers.1"]
    assert "no layer of this package for LlamaDecoderLayer" in missing["model.layers.0"]
    run_kernelized(model)
    assert package.models.unkernelized_layers(model) == {}


def test_there_is_a_pure_layer_for_each_number_of_arguments(package):
    mapping = package.layers.kernel_mapping()
    for takes, name in package.models.registration.DECODER_LAYERS.items():
        positional, by_name, others = takes
        text = [f"a{i}" for i in range(positional)] + (["*"] if by_name else [])
        text += [f"k{i}" for i in range(by_name)] + (["**kwargs"] if others else [])
        scope = {}
        exec(f"def forward(self, {', '.join(text)}): pass", scope)
        cls = type("Replaced", (nn.Module,), {"forward": scope["forward"]})
        layer = mapping[name]["cpu"].load()
        _validate_layer(check_cls=cls, cls=layer, repo=name)
        assert layer.__name__ == name and getattr(package.layers, name) is layer
        assert layer.has_backward is False and layer.can_torch_compile is True


@torch.no_grad()
def test_layers_are_found_by_name_too(package, device):
    """As with a LayerRepository of the Hub, which looks each layer up by its name."""
    if device.type != "cpu":
        pytest.skip("the folder's CPU variant is what a CPU build of torch finds")
    model = model_of(layer_class(*SERVED["more"]))
    package.models.quantize_model_(model)
    names = ["LlamaDecoderLayer", "DecoderLayer7AndOthers", "LlamaMLP"]
    mapping = package.layers.kernel_mapping(LocalLayerRepository, ROOT / "build")
    mapping = {name: mapping[name] for name in names}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    counts = package.models.kernelized_layers(model)
    assert counts["LlamaDecoderLayer", "DecoderLayer7AndOthers"] == 2


@torch.no_grad()
def test_two_copies_in_a_process(package, monkeypatch):
    """Say, of two revisions: each runs its own models, though they share the model's classes."""
    second = second_copy(package, monkeypatch)
    for copy_ in (package, second, package):
        model = tiny_llama()
        copy_.models.quantize_model_(model)
        with use_kernel_mapping(copy_.layers.kernel_mapping(), inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE)
        assert copy_.models.unkernelized_layers(model) == {}
