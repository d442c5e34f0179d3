"""FP8 checkpoints as they are published: lists with names of any prefix, groups and fields of all
kinds, small blocks, embeddings and heads in FP8 or left out."""

import copy
import json
import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from published import (
    FP8,
    PROJECTION,
    change_config,
    change_tensors,
    check_same,
    checkpoint,
    compressed,
    group,
    llama,
    load,
    projections,
)
from safetensors.torch import load_file
from tiny_checkpoints import FORMATS, by_block, by_channel, by_tensor, write
from tiny_models import randomized, tokens
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)


@pytest.fixture
def package(best_package):
    return best_package


# ---- names


def listed(kind, left):
    """A config of a kind, and what quantises as it says, with a list of what stays in 16 bits."""
    name = {"compressed-tensors": "compressed-tensors, channel, none", "quark": "Quark, per token",
            "modelopt": "ModelOpt, per token", "autofp8": "AutoFP8, dynamic",
            "finegrained": "finegrained, tensor"}[kind]  # fmt: skip
    config, by, scale, _ = copy.deepcopy(FORMATS[name])
    fields = {"quark": "exclude", "autofp8": "ignored_layers"}
    fields["finegrained"] = "modules_to_not_convert"
    config[fields.get(kind, "ignore")] = left
    return config, by, scale


def write_listed(model, folder, kind, is_fp8, pattern, rename=lambda name: name):
    """Of linears that are not FP8, a list by whole names, or by one pattern."""
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    left = [rename(name) for name in linears if not is_fp8(name)]
    config, by, scale = listed(kind, [pattern] if pattern else left)
    return checkpoint(model, folder, config, lambda name: by if is_fp8(name) else None, scale)


KINDS = ("compressed-tensors", "quark", "modelopt", "autofp8", "finegrained")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_base_model_is_loaded_by_the_names_of_the_whole(package, tmp_path, kind):
    """AutoModel's modules have no prefix, lists and files have; and the other way round."""

    def is_fp8(name):
        return PROJECTION.search(f".{name}") and "down_proj" not in name

    whole = llama(tie_word_embeddings=False)
    meant = write_listed(whole, tmp_path / "whole", kind, is_fp8, None)
    loaded = load(package, tmp_path / "whole", AutoModel)
    assert len(check_same(package, loaded, meant.model).adopted) == 12
    meant = write_listed(whole.model, tmp_path / "base", kind, is_fp8, None)
    assert not any(name.startswith("model.") for name in load_file(
        tmp_path / "base" / "model.safetensors"))  # fmt: skip
    model = load(package, tmp_path / "base")
    assert len(check_same(package, model.model, meant).adopted) == 12


def multimodal():
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 160,
            "sliding_window": 8}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return randomized(Gemma3ForConditionalGeneration(config))


# As modules are called now, and as files were written before.
NAMES = {
    "of modules": lambda name: name,
    "of files": lambda name: re.sub(r"^model\.(language_model)", r"\1.model", name),
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [Gemma3ForConditionalGeneration, AutoModelForCausalLM, AutoModel])
@torch.no_grad()
def test_a_multimodal_file_is_loaded_whole_and_as_text(package, tmp_path, kind, names, cls):
    def is_fp8(name):
        left = name.endswith(("1.mlp.down_proj", "o_proj"))
        return ".language_model.layers" in name and not left

    meant = write_listed(multimodal(), tmp_path, kind, is_fp8, None, NAMES[names])
    loaded = load(package, tmp_path, cls)
    wanted = 11
    if cls is AutoModelForCausalLM:
        part, expected = loaded, meant
        ids = {"input_ids": tokens(2, 7)}
    else:
        part = loaded.model if cls is Gemma3ForConditionalGeneration else loaded
        part, expected = part.language_model, meant.model.language_model
        ids = {"input_ids": tokens(2, 7)}
    report = package.models.quantize_model_(loaded, activations="none")
    assert len(report.adopted) == wanted
    torch.testing.assert_close(part(**ids)[0], expected(**ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("compressed-tensors", r"re:.*(lm_head|down_proj)$"),
        ("compressed-tensors", r"re:^(model\.layers\.\d+\.mlp\.down_proj|lm_head)"),
        ("quark", r"re:.*(lm_head|down_proj)$"),
        ("quark", "*[mn]_[hp]*[dj]"),
        ("modelopt", "*[mn]_[hp]*[dj]"),
        ("autofp8", r"re:.*(lm_head|down_proj)$"),
    ],
)
@pytest.mark.parametrize("cls", [AutoModelForCausalLM, AutoModel])
@torch.no_grad()
def test_lists_have_patterns(package, tmp_path, kind, pattern, cls):
    def is_fp8(name):
        return PROJECTION.search(name) and "down_proj" not in name

    meant = write_listed(llama(tie_word_embeddings=False), tmp_path, kind, is_fp8, pattern)
    loaded = load(package, tmp_path, cls)
    wanted = meant if cls is AutoModelForCausalLM else meant.model
    assert len(check_same(package, loaded, wanted).adopted) == 12


# ---- compressed-tensors' groups and fields

DOWN, MLP, Q = "model.layers.0.mlp.down_proj", r"re:.*mlp\..*", "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "targets",
    [
        (["Linear"], [DOWN]),
        ([DOWN], ["Linear"]),
        (["Linear"], [MLP], [DOWN, Q]),
        ([MLP, Q], ["Linear"], [DOWN]),
        (["re:.*down_proj"], [MLP], ["Linear"]),
        ([MLP], ["re:.*down_proj"], ["Module"]),
        (["LlamaMLP"], [r"re:.*_proj$"], ["Linear"]),
    ],
)
def test_groups_go_by_name_before_class(package, targets):
    """As compressed-tensors' own package takes them: which group a linear is of."""
    kinds = (("tensor", "none"), ("channel", "none"), ("channel", "dynamic"))
    groups = [group(*kind, one) for kind, one in zip(kinds, targets, strict=False)]
    for ordered in (groups, groups[::-1]):
        config = compressed(*ordered, ignore=["lm_head", r"re:.*layers\.1\.mlp\.up_proj"])
        model = llama()
        apply_quantization_config(model, QuantizationConfig(**config))
        layout_of = package.models.formats.layouts_of(config)
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            scheme = getattr(module, "quantization_scheme", None)
            layout = layout_of(name, classes=[cls.__name__ for cls in type(module).__mro__])
            assert (scheme is None) == (layout is None), name
            if scheme is not None:
                inputs = "none" if scheme.input_activations is None else "dynamic"
                assert (layout.weights, layout.inputs) == (str(scheme.weights.strategy), inputs)


ATTENTION = {
    "targets": ["LlamaAttention"], "weights": None, "output_activations": None,
    "input_activations": {**FP8, "strategy": "tensor", "dynamic": False},
}  # fmt: skip
CACHE = {**group("channel", None, [r"re:.*k_proj$", r"re:.*v_proj$"]),
         "output_activations": {**FP8, "strategy": "tensor", "dynamic": False}}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        compressed(group(), ATTENTION),
        compressed(CACHE, group()),
        compressed(group(), kv_cache_scheme={**FP8, "strategy": "tensor", "dynamic": False}),
        compressed(group(), sparsity_config={}, transform_config={}, kv_cache_scheme=None),
        compressed(group(), sparsity_config={"format": "dense", "global_sparsity": 0.1}),
        compressed({**group(), "output_activations": None, "format": None}, version="0.12"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_fields_that_are_not_a_linears_are_read_over(package, tmp_path, config):
    meant = checkpoint(llama(tie_word_embeddings=False), tmp_path, config, projections)
    report = check_same(package, load(package, tmp_path), meant)
    assert len(report.adopted) == 14


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            compressed(group(), transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
            "quantization_config has a transform_config",
        ),
        (
            compressed(group(), sparsity_config={"format": "sparse-24-bitmask"}),
            "quantization_config has a sparsity_config",
        ),
        (
            compressed(group(), {**ATTENTION, "targets": [r"re:.*down_proj"]}),
            "down_proj is in a group of quantization_config that has no weights",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
            "ModelOpt's quant_algo must be one of FP8, .* got NVFP4",
        ),
    ],
)
@torch.no_grad()
def test_what_nothing_here_computes_is_refused(package, tmp_path, config, said):
    checkpoint(llama(tie_word_embeddings=False), tmp_path, config, projections)
    with pytest.raises(ValueError, match=said):
        load(package, tmp_path)


@torch.no_grad()
def test_a_scale_a_token_instead_of_one_is_reported(package, tmp_path):
    for name in ("compressed-tensors, channel, one for all tokens", "AutoFP8, dynamic"):
        write(llama(tie_word_embeddings=False), tmp_path, name)
        report = package.models.quantize_model_(load(package, tmp_path))
        said = "its inputs have a scale a token, where the checkpoint says one for all tokens"
        assert report.instead == dict.fromkeys(report.adopted, said) and len(report.adopted) == 14
        assert f"model.layers.*.mlp.up_proj: {said} (2)" in str(report)


# ---- Quark, ModelOpt


@torch.no_grad()
def test_quarks_layers_go_by_name_before_class(package, tmp_path):
    config, *_ = copy.deepcopy(FORMATS["Quark, per token"])
    channel = config["global_quant_config"]
    tensor, *_ = FORMATS["Quark, weights alone"]
    config["global_quant_config"] = {"weight": None, "input_tensors": None}
    config["layer_type_quant_config"] = {"<class 'torch.nn.modules.linear.Linear'>": channel}
    config["layer_quant_config"] = {
        "*up_proj": tensor["global_quant_config"],
        "re:.*down_proj": {"weight": None, "input_tensors": None, "bias": None},
    }

    def quantised(name):
        return (
            None if "down_proj" in name else by_tensor if "up_proj" in name else projections(name)
        )

    meant = checkpoint(llama(tie_word_embeddings=False), tmp_path, config, quantised)
    loaded = load(package, tmp_path)
    attention, mlp = loaded.model.layers[0].self_attn, loaded.model.layers[0].mlp
    assert attention.q_proj.activation_scheme == "dynamic"
    assert mlp.up_proj.activation_scheme == "none" and type(mlp.down_proj) is nn.Linear
    assert len(check_same(package, loaded, meant).adopted) == 12


@pytest.mark.parametrize("mixed", [False, True])
@torch.no_grad()
def test_modelopts_own_file_is_read(package, tmp_path, mixed):
    """hf_quant_config.json, where config.json says nothing."""
    model = llama(tie_word_embeddings=False)
    said = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "model.layers.1.mlp*"]}  # fmt: skip
    left = "layers.1.mlp"
    fp8 = [n for n, _ in model.named_modules() if PROJECTION.search(n) and left not in n]
    if mixed:
        layers = {name: {"quant_algo": said["quant_algo"]} for name in fp8}
        said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    by = {name: by_channel for name in fp8}
    meant = checkpoint(model, tmp_path, None, by.get)
    change_config(tmp_path, lambda config: config.pop("quantization_config"))
    file = {"producer": {"name": "modelopt"}, "quantization": said}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    report = check_same(package, load(package, tmp_path), meant)
    assert sorted(report.adopted) == sorted(fp8) and len(fp8) == 11


# ---- small blocks, whose scales are powers of two


def in_blocks(weight, rows, columns, spread):
    """FP8 in blocks of E8M0 scales whose exponents differ by up to ``spread``, and values that
    need no more of FP8's range."""
    n, k = weight.shape
    q = weight.div(weight.abs().max()).mul(7).round().mul(4).to(torch.float8_e4m3fn)
    exponents = torch.randint(-8, -8 + spread + 1, (-(-n // rows), -(-k // columns)))
    scale = torch.ldexp(torch.ones(exponents.shape), exponents)
    dense = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return q, scale.to(torch.float8_e8m0fnu), q.float() * dense


SMALL = {
    "compressed-tensors": ((1, 32), "weight_scale", torch.uint8, compressed({
        **group("channel"),
        "weights": {**FP8, "strategy": "group", "group_size": 32, "dynamic": False,
                    "scale_dtype": "torch.uint8"},
        "input_activations": {**FP8, "strategy": "group", "group_size": 32, "dynamic": True},
    }, format="mxfp8-quantized")),
    "modelopt": ((1, 32), "weight_scale", torch.uint8, {
        "quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}),
    "mxfp8": ((1, 32), "weight_scale_inv", torch.uint8, {
        "quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"]}),
    "finegrained": ((32, 32), "weight_scale_inv", None, {
        "quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}),
}  # fmt: skip


@pytest.mark.parametrize("spread", [4, 20])
@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_small_blocks_become_large_where_no_value_changes(package, tmp_path, name, spread):
    """Scales of one block may differ by what FP8's range leaves; else a sentence."""
    block, scale_name, dtype, config = SMALL[name]
    model, meant = llama(tie_word_embeddings=False), {}
    model.save_pretrained(tmp_path)

    def change(tensors):
        for key in [key for key in tensors if "_proj.weight" in key]:
            linear = key.removesuffix(".weight")
            q, scale, meant[linear] = in_blocks(tensors[key], *block, spread)
            tensors[key] = q
            tensors[f"{linear}.{scale_name}"] = scale if dtype is None else scale.view(dtype)

    change_tensors(tmp_path, change)
    change_config(tmp_path, lambda said: said.update(quantization_config=config))
    if spread > 15:
        with pytest.raises(ValueError, match="_proj has scale blocks of"):
            load(package, tmp_path)
        return
    loaded = load(package, tmp_path)
    report = package.models.quantize_model_(loaded)
    assert len(report.adopted) == 14
    said = "its inputs have a scale for 128 columns, where the checkpoint says one for 32"
    assert set(report.instead.values()) == {said}
    for linear, weight in meant.items():
        module = loaded.get_submodule(linear)
        assert module.weight_scale_inv.shape[1] == -(-module.in_features // 128)
        values = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
        assert torch.equal(values.float(), weight), linear


@torch.no_grad()
def test_small_blocks_that_are_offloaded_are_refused(package, tmp_path):
    block, scale_name, dtype, config = SMALL["mxfp8"]
    llama(tie_word_embeddings=False).save_pretrained(tmp_path)

    def change(tensors):
        for key in [key for key in tensors if "_proj.weight" in key]:
            tensors[key], scale, _ = in_blocks(tensors[key], *block, 4)
            tensors[f"{key.removesuffix('.weight')}.{scale_name}"] = scale.view(dtype)

    change_tensors(tmp_path, change)
    change_config(tmp_path, lambda said: said.update(quantization_config=config))
    places = {"": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"layers\.1\..*offloaded: give it a device in device_map"):
        load(package, tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")


@torch.no_grad()
def test_compressed_tensors_reads_the_same_mxfp8(package, tmp_path):
    """Its own package, on the file of the test before."""
    model = llama(tie_word_embeddings=False, num_hidden_layers=1)
    block, _, dtype, config = SMALL["compressed-tensors"]
    model.save_pretrained(tmp_path)

    def change(tensors):
        for key in [key for key in tensors if "_proj.weight" in key]:
            q, scale, _ = in_blocks(tensors[key], *block, 4)
            tensors[key], tensors[f"{key}_scale"] = q, scale.view(dtype)

    change_tensors(tmp_path, change)
    change_config(tmp_path, lambda said: said.update(quantization_config=config))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs(tokens(1, 3))  # decompresses
    ours = load(package, tmp_path)
    package.models.quantize_model_(ours, fuse=False)
    for name, module in ours.named_modules():
        if isinstance(module, package.models.FP8Linear):
            values = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
            assert torch.equal(values.float(), theirs.get_submodule(name).weight.float()), name


# ---- embeddings and heads


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("by", [by_tensor, by_channel, by_block])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_an_embedding_in_fp8_takes_the_models_dtype(package, tmp_path, tied, by, named):
    """Whether the config says so or not: the files have it. More rows than are made at once."""
    embeddings = [group("channel", None, ["Embedding"])] if named else []
    config = compressed(group(), *embeddings, ignore=["lm_head"])

    def quantised(name):
        return by if name.endswith("embed_tokens") else projections(name)

    model = llama(tie_word_embeddings=tied, num_hidden_layers=1, vocab_size=4300)
    meant = checkpoint(model, tmp_path, config, quantised)
    loaded = load(package, tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded.model.embed_tokens.weight, meant.model.embed_tokens.weight.bfloat16())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    loaded = load(package, tmp_path)
    report = check_same(package, loaded, meant)
    assert report.instead["model.embed_tokens"].startswith("its checkpoint has it in FP8")
    loaded.save_pretrained(tmp_path / "ours")
    check_same(package, load(package, tmp_path / "ours"), meant)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_tied_head_that_no_list_names_is_its_embeddings(package, tmp_path, kind):
    meant = write_listed(llama(tie_word_embeddings=True), tmp_path, kind,
                         lambda name: PROJECTION.search(name), "nothing")  # fmt: skip
    loaded = load(package, tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert len(check_same(package, loaded, meant).adopted) == 14


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_new_tasks_head_is_transformers_to_set(package, tmp_path, kind):
    """No list can name it, and no file has it."""
    write_listed(llama(tie_word_embeddings=False), tmp_path, kind,
                 lambda name: PROJECTION.search(name), None)  # fmt: skip
    loaded = load(package, tmp_path, AutoModelForSequenceClassification, num_labels=3)
    assert type(loaded.score) is nn.Linear and loaded.score.weight.isfinite().all()
    assert len(package.models.quantize_model_(loaded).adopted) == 14
