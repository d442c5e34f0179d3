"""accelerate's hooks on a model that quantize_model_ has been through: weights that wait elsewhere,
and are brought for each call."""

import copy
import sys

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from kernels import Mode, kernelize, use_kernel_mapping
from test_families import tiny
from tiny_models import tiny_llama, tokens


@pytest.fixture
def kernelized(package):
    def replace(model):
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            return kernelize(model, mode=Mode.INFERENCE, device="cpu")

    return replace


@pytest.fixture
def fnuz(package, monkeypatch):
    """Every device is one of FNUZ's."""
    original = package.functional.native_fp8_dtype
    for module in list(sys.modules.values()):
        if vars(module).get("native_fp8_dtype") is original:
            monkeypatch.setattr(module, "native_fp8_dtype", lambda device: torch.float8_e4m3fnuz)


MODELS = {
    "llama": lambda: tiny_llama(attention_bias=True, tie_word_embeddings=False),
    "gemma2": lambda: tiny("gemma2"),
    "mixtral": lambda: tiny("mixtral"),
    "gpt_oss": lambda: tiny("gpt_oss"),
}


def dispatch(model, folder):
    """Some on the CPU, some on disk, and a decoder layer in two places."""
    names = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    last = [f"model.layers.1.{name}" for name, _ in model.model.layers[1].named_children()]
    others = [f"model.layers.{i}" for i in range(2, len(model.model.layers))]
    places = {name: "cpu" for name in (*names, *last, *others, "lm_head")}
    places.update({"model.layers.0": "disk", "model.layers.1.mlp": "disk"})
    places = {n: place for n, place in places.items() if n in dict(model.named_modules())}
    accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=folder, force_hooks=True
    )


WAYS = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, torch.device("cpu")),
    "disk_offload": lambda model, folder: accelerate.disk_offload(
        model, folder, execution_device=torch.device("cpu")
    ),
    "dispatch_model": dispatch,
    "dispatch_model, one place": lambda model, folder: accelerate.dispatch_model(
        model, {"": "cpu"}, force_hooks=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_offloaded_after_it_was_quantised(package, kernelized, tmp_path, name, way):
    """By itself, kernelized before, and kernelized since."""
    model, ids = MODELS[name](), tokens(2, 5)
    package.models.quantize_model_(model)
    expected = model(ids).logits
    quick = kernelized(copy.deepcopy(model))(ids).logits
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    WAYS[way](kernelized(first), tmp_path / "first")
    WAYS[way](last, tmp_path / "last")
    for _ in range(2):
        torch.testing.assert_close(last(ids).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first(ids).logits, quick, rtol=2e-3, atol=2e-3)
    kernelized(last)
    layers = package.models.kernelized_layers(last)
    assert {layer for _, layer in layers} >= {"RMSNorm", "FP8Linear"}
    for _ in range(2):
        torch.testing.assert_close(last(ids).logits, quick, rtol=2e-3, atol=2e-3)
    if "one place" not in way:
        fp8 = [m for m in last.model.layers[0].modules() if isinstance(m, package.models.FP8Linear)]
        assert {linear.weight.device.type for linear in fp8} == {"meta"}, "put away again"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_what_is_brought_has_the_dialect_of_its_device(package, tmp_path, request, name, way):
    """From a CPU, where a state dict is in OCP's, to an MI300X; and back."""
    model, ids = MODELS[name](), tokens(2, 5)
    package.models.quantize_model_(model)
    state, expected = model.state_dict(), model(ids).logits
    request.getfixturevalue("fnuz")
    WAYS[way](model, tmp_path)
    fp8 = {p.dtype for p in model.parameters() if p.element_size() == 1}
    assert fp8 == {torch.float8_e4m3fnuz}
    for _ in range(2):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    again = model.state_dict()
    assert all(torch.equal(again[key].float(), state[key].float()) for key in state)


@torch.no_grad()
def test_static_scales_are_brought_too(package, request):
    models = package.models
    weight, scale = package.reference.quantize_fp8(torch.randn(32, 32))
    linear = models.FP8Linear(weight, scale, None, "static", activation_scale=torch.tensor([0.5]))
    model = torch.nn.Sequential(linear)
    x = torch.randn(3, 32)
    expected = model(x)
    request.getfixturevalue("fnuz")
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model(x), expected)
    hook = linear._hf_hook
    assert hook.weights_map["activation_scale"].item() == 1.0
    remove_hook_from_module(model, recurse=True)
    assert linear.activation_scale.item() == 1.0 and linear.weight.dtype == torch.float8_e4m3fnuz


@pytest.mark.parametrize("place", ["first", "last"])
@torch.no_grad()
def test_offloading_is_one_of_several_hooks(package, kernelized, place):
    """accelerate makes one of them, which calls each in turn."""

    class Counts(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model, ids, counts = tiny_llama(tie_word_embeddings=False), tokens(2, 5), Counts()
    package.models.quantize_model_(model)
    expected = model(ids).logits
    down = model.model.layers[0].mlp.down_proj
    joined = model.model.layers[0].self_attn.qkv_proj  # a state dict has its parts alone
    if place == "first":
        add_hook_to_module(down, counts)
        add_hook_to_module(joined, ModelHook())
    accelerate.cpu_offload(model, torch.device("cpu"))
    if place == "last":
        add_hook_to_module(down, counts, append=True)
        add_hook_to_module(joined, ModelHook(), append=True)
    assert all(isinstance(each._hf_hook, SequentialHook) for each in (down, joined))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert counts.calls == 1
    kernelized(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=2e-3, atol=2e-3)
    assert counts.calls == 2


@torch.no_grad()
def test_quantised_offloaded_and_asked_once_more(package, kernelized):
    """The hooks are called once, however often they are moved."""
    model, ids = tiny_llama(tie_word_embeddings=False), tokens(2, 5)
    package.models.quantize_model_(model)
    expected = model(ids).logits
    accelerate.cpu_offload(model, torch.device("cpu"))
    for _ in range(2):
        package.models.quantize_model_(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    kernelized(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_hooked_twice_is_called_once(package):
    """A hook that was moved out of the forward, and another that accelerate adds to it later."""

    class Counts(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model, first, second = tiny_llama(), Counts(), Counts()
    down = model.model.layers[0].mlp.down_proj
    add_hook_to_module(down, first)
    package.models.quantize_model_(model)
    down = model.model.layers[0].mlp.down_proj
    assert isinstance(down, package.models.FP8Linear), "its hook brings no weight"
    add_hook_to_module(down, second, append=True)
    for calls in (1, 2):
        model(tokens(1, 3))
        assert (first.calls, second.calls) == (calls, calls)
    package.models.quantize_model_(model)
    model(tokens(1, 3))
    assert (first.calls, second.calls) == (3, 3)


@pytest.mark.parametrize("way", ["cpu_offload", "dispatch_model", "disk_offload"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_an_offloaded_model_is_saved_once_its_hooks_are_gone(package, tmp_path, name, way):
    """By transformers' own save, which says so before, and writes no weight."""
    model, ids = MODELS[name](), tokens(2, 5)
    package.models.quantize_model_(model)
    expected = model(ids).logits
    WAYS[way](model, tmp_path / "away")
    with pytest.raises(ValueError, match=r"must be on a device to be saved, got offloaded weights"):
        model.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.glob("saved/*.safetensors"))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    remove_hook_from_module(model, recurse=True)
    vars(model).pop("hf_device_map", None)  # accelerate leaves it
    model.save_pretrained(tmp_path / "saved")
    with package.models.fp8_checkpoints():
        again = type(model).from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-4, atol=1e-4)
