"""A quantised model's state: pickled and copied, loaded, asked for its dtype."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from project import REPO_ID, ROOT
from test_families import tiny
from tiny_models import randomized, tiny_llama, tokens
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaForCausalLM


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def quantize_(package):
    return package.models.quantize_model_


@pytest.fixture
def run_kernelized(package, device):
    def kernelized(model, mode=Mode.INFERENCE):
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            return kernelize(model, mode=mode)

    return kernelized


# ---- pickling

OTHER_PROCESS = f"""
import sys, torch
from kernels import Mode, get_kernel, kernelize, use_kernel_mapping
folder, backend = sys.argv[1:]
package = get_kernel("{REPO_ID}", version=1, backend=backend)
for name in torch.load(folder + "/names"):
    model, ids, logits, quick, counts = torch.load(folder + "/" + name, weights_only=False)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits), name
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE)
        assert package.models.kernelized_layers(model) == counts, name
        assert torch.equal(model(ids).logits, quick), name
print("as it was")
"""


@pytest.mark.parametrize("when", ["quantised", "kernelized"])
@torch.no_grad()
def test_a_model_is_pickled_whole(package, quantize_, run_kernelized, device, tmp_path, when):
    """Into a process that has loaded the package: the same values, the same layers to kernelize.
    Of a kernelized one, too, the other process kernelizes anew."""
    names = ("llama", "gemma2", "mixtral", "llama4_text")
    for name in names:
        model = (tiny_llama() if name == "llama" else tiny(name)).to(device)
        quantize_(model)
        quick = copy.deepcopy(model)
        run_kernelized(quick)
        counts = package.models.kernelized_layers(quick)
        assert counts
        ids = tokens(2, 7, device)
        logits = model(ids).logits
        if when == "kernelized":
            run_kernelized(model)
        quick = quick(ids).logits
        torch.save((model, ids, logits, quick, counts), tmp_path / name)
    torch.save(names, tmp_path / "names")
    script = tmp_path / "other.py"
    script.write_text(OTHER_PROCESS)
    backend = "cpu" if device.type == "cpu" else ("rocm" if torch.version.hip else "cuda")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), backend],
        env={**os.environ, "LOCAL_KERNELS": f"{REPO_ID}={ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("as it was\n"), done.stderr


def test_what_describes_a_checkpoint_is_pickled(package, quantize_, tmp_path):
    """The config of a quantised model, and what transformers keeps of one that was just loaded."""
    model = tiny_llama()
    quantize_(model)
    config = pickle.loads(pickle.dumps(model.config))
    assert config.to_dict() == copy.deepcopy(model.config).to_dict() == model.config.to_dict()
    assert config.quantization_config.quant_method == "compressed-tensors"
    model.save_pretrained(tmp_path / "ours")
    finegrained = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    tiny_llama(**sizes, tie_word_embeddings=False).save_pretrained(tmp_path / "16")
    with package.models.fp8_checkpoints():
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "16", quantization_config=finegrained
        )
        loaded.save_pretrained(tmp_path / "finegrained")
        for name in ("ours", "finegrained"):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            buffer = io.BytesIO()
            loaded.hf_quantizer.quantization_config.unseen = 7
            torch.save((loaded.config, loaded.hf_quantizer), buffer)
            buffer.seek(0)
            config, quantizer = torch.load(buffer, weights_only=False)
            assert config.to_dict() == loaded.config.to_dict()
            assert quantizer.quantization_config.unseen == 7
            assert type(quantizer).__name__ == type(loaded.hf_quantizer).__name__


# ---- loading


@pytest.fixture
def fnuz(package, monkeypatch):
    """Every device is one of FNUZ's."""
    original = package.functional.native_fp8_dtype
    for module in list(sys.modules.values()):
        if vars(module).get("native_fp8_dtype") is original:
            monkeypatch.setattr(module, "native_fp8_dtype", lambda device: torch.float8_e4m3fnuz)


def biased_llama(**changes):
    return tiny_llama(attention_bias=True, tie_word_embeddings=False, **changes)


MODELS = {
    "llama": biased_llama,
    "mixtral": lambda: tiny("mixtral"),
    "gpt_oss": lambda: tiny("gpt_oss"),
    "llama4_text": lambda: tiny("llama4_text"),
}


def a_form(model, quantize_, made):
    if made == "moved":
        return copy.deepcopy(model).to("meta")
    with torch.device("meta"):
        form = type(model)(model.config)
    assert len(quantize_(form).converted) > 0
    return form.eval()


def same_results(model, filled):
    filled.model.rotary_emb = model.model.rotary_emb  # its buffers are in no state dict
    ids = tokens(2, 5)
    return torch.equal(filled(ids).logits, model(ids).logits)


@pytest.mark.parametrize("made", ["moved", "quantised"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_form_on_meta_is_filled_by_assigning(package, quantize_, name, made):
    """A model without data, that was quantised before or since."""
    model = MODELS[name]()
    config = copy.deepcopy(model.config)
    quantize_(model)
    model.config = config
    form = a_form(model, quantize_, made)
    found = form.load_state_dict(model.state_dict(), assign=True)
    assert not found.missing_keys and not found.unexpected_keys
    assert not any(parameter.device.type == "meta" for parameter in form.parameters())
    for module in form.modules():
        if isinstance(module, package.models.FP8Linear):
            assert module.weight.dtype == torch.float8_e4m3fn
            assert module.weight_scale_inv.dtype == torch.float32
    assert same_results(model, form)


@pytest.mark.parametrize("made", ["moved", "quantised"])
@pytest.mark.parametrize("fills", ["assigned", "to_empty"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_a_form_takes_the_dialect_of_the_device_that_fills_it(
    package, quantize_, monkeypatch, request, name, made, fills
):
    model = MODELS[name]()
    quantize_(model)
    state = model.state_dict()
    form = a_form(model, quantize_, made)
    request.getfixturevalue("fnuz")
    if fills == "to_empty":
        form.to_empty(device="cpu")
    form.load_state_dict(state, assign=fills == "assigned")
    fp8 = {p.dtype for p in form.parameters() if p.dtype.itemsize == 1}
    assert fp8 == {torch.float8_e4m3fnuz}
    again = form.state_dict()
    for key, tensor in state.items():
        actual, expected = again[key].float(), tensor.float()
        if tensor.dtype == torch.float8_e4m3fn:
            assert again[key].dtype == tensor.dtype
        assert torch.equal(actual, expected), key
    form.model.rotary_emb = model.model.rotary_emb
    ids = tokens(2, 5)
    torch.testing.assert_close(form(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore:.*is a no-op")  # torch's own, of what is not FP8
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_what_is_without_memory_is_not_said_to_be_loaded(quantize_, name):
    model = MODELS[name]()
    quantize_(model)
    form = copy.deepcopy(model).to("meta")
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"on the meta device.*pass assign=True"):
            form.load_state_dict(model.state_dict(), strict=strict)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@torch.no_grad()
def test_a_state_dict_replaces_another(quantize_, fuse, assign):
    model, other = biased_llama(), biased_llama()
    for each in (model, other):
        quantize_(each, fuse=fuse)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert same_results(model, other)
    weight = other.model.layers[0].self_attn.o_proj.weight
    assert not weight.requires_grad and other.model.layers[0].self_attn.o_proj.bias.requires_grad


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.down_proj"])
@torch.no_grad()
def test_an_fp8_weight_and_its_scales_are_loaded_together(quantize_, part, assign):
    model = biased_llama()
    quantize_(model)
    name = f"model.layers.1.{part}"
    for alone, absent in (("weight", "weight_scale_inv"), ("weight_scale_inv", "weight")):
        state = {f"{name}.{alone}": model.state_dict()[f"{name}.{alone}"]}
        with pytest.raises(RuntimeError, match=f"{name}.{alone} must come with {absent}"):
            model.load_state_dict(state, strict=False, assign=assign)
    other = biased_llama()
    quantize_(other)
    state = {k: v for k, v in other.state_dict().items() if k.startswith(name)}
    model.load_state_dict(state, strict=False, assign=assign)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key].float(), state[key].float()) for key in state)


@torch.no_grad()
def test_one_experts_weight_does_not_come_alone(quantize_):
    model = tiny("mixtral")
    quantize_(model)
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(RuntimeError, match=f"{name} must come with {name}_scale_inv"):
        model.load_state_dict({name: model.state_dict()[name]}, strict=False)


@torch.no_grad()
def test_joined_linears_that_have_one_scale_get_no_two(package):
    """The last to be loaded would have had its way with all."""
    models = package.models
    weight = torch.ones(8, 16).to(torch.float8_e4m3fn)
    fused = models.FP8Linear(weight, torch.ones(1))
    fused.joins = ("q", "k")
    parts = torch.nn.ModuleDict(
        {n: models.FP8LinearPart(fused, i, i + 4) for n, i in (("q", 0), ("k", 4))}
    )
    state = parts.state_dict()
    state["q.weight_scale_inv"] = state["k.weight_scale_inv"] = torch.full((1,), 0.5)
    parts.load_state_dict(state)
    assert fused.weight_scale_inv.item() == 0.5
    state["k.weight_scale_inv"] = torch.full((1,), 0.25)
    with pytest.raises(
        RuntimeError, match=r"k.weight_scale_inv must be that .* \[0.5\], got \[0.25\]"
    ):
        parts.load_state_dict(state)


# ---- dtype


class HeadFirst(LlamaForCausalLM):
    """Its first parameter is a linear's."""

    def __init__(self, config):
        super().__init__(config)
        self._modules["model"] = self._modules.pop("model")


class InAnother(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tower = model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_a_models_dtype_is_what_it_computes_in(package, quantize_, tmp_path, dtype):
    model = randomized(HeadFirst(tiny_llama(tie_word_embeddings=False).config)).to(dtype)
    quantize_(InAnother(model), lm_head=True)
    assert next(model.parameters()).dtype == torch.float8_e4m3fn
    assert model.dtype == dtype
    quantize_(model, lm_head=True)
    model.save_pretrained(tmp_path)
    with package.models.fp8_checkpoints():
        loaded = HeadFirst.from_pretrained(tmp_path)
    assert loaded.dtype == dtype == loaded.config.dtype
    quantize_(loaded)
    assert loaded.dtype == dtype
    assert same_results(model, loaded)
    assert loaded.to(torch.float16).dtype == torch.float16
    assert tiny_llama().dtype == torch.float32, "and other models have theirs"


@torch.no_grad()
def test_a_pickled_model_keeps_its_dtype(quantize_):
    """In a process that has not seen its class quantised yet."""
    model = HeadFirst(tiny_llama(tie_word_embeddings=False).config).to(torch.bfloat16)
    quantize_(model, lm_head=True)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    del HeadFirst.dtype
    assert model.dtype == torch.float8_e4m3fn
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).dtype == torch.bfloat16
