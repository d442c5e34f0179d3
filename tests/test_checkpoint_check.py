"""The check after loading an FP8 checkpoint: what is missing or misplaced is said."""

import copy
import json

import pytest
import torch
from published import change_config, change_tensors, llama, load
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FORMATS, write
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear


@pytest.fixture
def package(best_package):
    return best_package


MODULE = "model.layers.1.self_attn.v_proj"


def no_scale(tensors, config):
    del tensors[f"{MODULE}.{scale_name(tensors)}"]
    return f"nothing for {MODULE}.weight_scale"


def no_input_scale(tensors, config):
    names = [f"{MODULE}.{name}" for name in ("input_scale", "activation_scale")]
    found = [tensors.pop(name) for name in names if name in tensors]
    return rf"nothing for {MODULE}.activation_scale" if found else None


def no_weight(tensors, config):
    del tensors[f"{MODULE}.weight"]
    return f"nothing for {MODULE}.weight"


def of_16_bits(tensors, config):
    tensors[f"{MODULE}.weight"] = tensors[f"{MODULE}.weight"].bfloat16()
    return rf"says torch.float8_e4m3fn of {MODULE}.weight \(torch.bfloat16\)"


def of_another_fp8(tensors, config):
    tensors[f"{MODULE}.weight"] = tensors[f"{MODULE}.weight"].to(torch.float8_e5m2)
    return rf"says torch.float8_e4m3fn of {MODULE}.weight \(torch.float8_e5m2\)"


def named_as_16_bits(tensors, config):
    lists = ("ignore", "exclude", "ignored_layers", "modules_to_not_convert")
    next(config[name] for name in lists if name in config).append(MODULE)
    return f"the files have {MODULE}.weight in FP8, and quantization_config does not say so"


def scale_of_inputs_that_nobody_named(tensors, config):
    if any(name.endswith(("input_scale", "activation_scale")) for name in tensors):
        return None
    tensors[f"{MODULE}.input_scale"] = torch.tensor([0.5])
    if config["quant_method"] == "fp8":
        return f"nothing takes the scales {MODULE}.(input|activation)_scale"
    return f"nothing takes the scales {MODULE}.input_scale"


def scale_name(tensors):
    return next(name.rpartition(".")[2] for name in tensors if "weight_scale" in name)


FAULTS = (no_scale, no_input_scale, no_weight, of_16_bits, of_another_fp8, named_as_16_bits,
          scale_of_inputs_that_nobody_named)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@torch.no_grad()
def test_what_is_missing_or_misplaced_is_said(package, tmp_path, fault):
    """In every format: no linear is left with memory that nobody has set, or without its scale."""
    checked = 0
    model = tiny_llama(num_hidden_layers=2, tie_word_embeddings=False)
    for name in FORMATS:
        write(model, tmp_path, name)
        config = json.loads((tmp_path / "config.json").read_text())
        tensors = load_file(tmp_path / "model.safetensors")
        said = fault(tensors, config["quantization_config"])
        if said is None:
            continue
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=said):
            load(package, tmp_path)
        checked += 1
    assert checked >= 4


def sharded(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    places = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        part = names[i::2]
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return {}


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return {"use_safetensors": False}


WAYS = {
    "safetensors": lambda folder: {},
    "sharded": sharded,
    "pickled": pickled,
    "device_map": lambda folder: {"device_map": {"": "cpu"}},
    "offloaded": lambda folder: {
        "device_map": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu",
                       "model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers.1": "disk"},
        "offload_folder": folder / "offloaded",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["compressed-tensors, channel, none", "finegrained, tensor"])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_it_is_said_however_a_checkpoint_is_loaded(package, tmp_path, way, name):
    for complete in (True, False):
        folder = tmp_path / str(complete)
        write(tiny_llama(num_hidden_layers=2, tie_word_embeddings=False), folder, name)
        if not complete:
            change_tensors(folder, lambda tensors: no_scale(tensors, {}))
        options = WAYS[way](folder)
        if complete:
            load(package, folder, **options)
        else:
            with pytest.raises(ValueError, match=f"nothing for {MODULE}.weight_scale"):
                load(package, folder, **options)


@torch.no_grad()
def test_fp8_without_a_word_in_the_config_is_said(package, tmp_path):
    write(tiny_llama(tie_word_embeddings=False), tmp_path, "AutoFP8, static")
    change_config(tmp_path, lambda config: config.pop("quantization_config"))
    with pytest.raises(ValueError, match=r"config\.json has no quantization_config"):
        load(package, tmp_path)


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_scales_of_a_cache_disturb_no_loading(package, tmp_path, name):
    """Wherever they stand: of keys and values they have a place, the others are read over."""
    write(tiny_llama(num_hidden_layers=1, tie_word_embeddings=False), tmp_path, name)

    def add(tensors):
        attention = "model.layers.0.self_attn"
        names = [f"{attention}.{of}_scale" for of in ("q", "k", "v", "prob")]
        names += [f"{attention}.{of}_proj.{of}_scale" for of in ("k", "v")]
        names += [f"{attention}.{of}_proj.output_scale" for of in ("k", "v")]
        tensors.update({name: torch.tensor([0.5]) for name in names})

    change_tensors(tmp_path, add)
    with package.models.fp8_checkpoints():
        _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    ours = name.partition(",")[0] != "finegrained"
    assert not told["missing_keys"] and not (ours and told["unexpected_keys"])


def never_set(model):
    model.lm_head.weight_scale_inv.data.fill_(torch.nan)
    return "is not finite"


def below_zero(model):
    model.lm_head.weight_scale_inv.data.fill_(-1)
    return "is not finite, or below zero"


def in_no_file(model):
    model.lm_head.weight._is_hf_initialized = True  # as transformers marks what it has loaded
    return "was in no file"


@pytest.mark.parametrize("fault", [never_set, below_zero, in_no_file])
@torch.no_grad()
def test_a_scale_that_nobody_set_is_not_adopted(package, fault):
    """Of a model that was loaded without fp8_checkpoints."""
    model = tiny_llama()
    linear = FP8Linear(96, 160)
    linear.weight.data = torch.randn(160, 96).to(torch.float8_e4m3fn)
    model.lm_head = linear.requires_grad_(False)
    said = rf"lm_head is FP8, and its weight_scale_inv {fault(model)}"
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=said):
        package.models.quantize_model_(model, lm_head=True)
    assert all(torch.equal(before[n].float().nan_to_num(), t.float().nan_to_num())
               for n, t in model.state_dict().items())  # fmt: skip


@torch.no_grad()
def test_a_scale_that_the_makers_package_did_not_find_is_not_adopted(package, tmp_path):
    write(llama(tie_word_embeddings=False), tmp_path, "compressed-tensors, channel, none")
    change_tensors(tmp_path, lambda tensors: no_scale(tensors, {}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"{MODULE} is FP8, and its weight_scale"):
        package.models.quantize_model_(theirs)


def test_what_is_emptied_does_not_look_set(package):
    model = tiny_llama()
    package.models.quantize_model_(model)
    model.to("meta").to_empty(device="cpu")
    linears = [m for m in model.modules() if isinstance(m, package.models.FP8Linear)]
    assert linears and all(linear.weight_scale_inv.isnan().all() for linear in linears)
