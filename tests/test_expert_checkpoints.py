"""Experts of FP8 checkpoints: one by one or in one tensor, as their makers write them; and ours."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoints import told_by_a_clean_process
from test_families import tiny
from tiny_checkpoints import write
from tiny_models import quantizing_inputs, randomized, tokens
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

# Whole blocks of gate and up; all experts for each token, so that no router can choose anew.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
SIZES = {
    "mixtral": WIDE,
    "qwen3_moe": {**WIDE, "moe_intermediate_size": 128, "head_dim": 64},
    "deepseek_v3": {**WIDE, "moe_intermediate_size": 128, "num_key_value_heads": 4},
    "llama4_text": {**WIDE, "head_dim": 64},
    "gpt_oss": {**WIDE, "head_dim": 64},
}
# Whole blocks everywhere, for transformers dequantises nothing else, and more than one along K.
LATENT = {
    "deepseek_v3": {
        "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 128,
        "v_head_dim": 128, "moe_intermediate_size": 256,
    },
}  # fmt: skip
ONE_BY_ONE = ("mixtral", "qwen3_moe", "deepseek_v3", "llama4_text")
FORMATS = (
    "finegrained, blocks",
    "finegrained, static",
    "finegrained, ue8m0",
    "FBGEMM",
    "compressed-tensors, channel, dynamic",
    "compressed-tensors, tensor, dynamic",
    "compressed-tensors, tensor, static",
    "compressed-tensors, channel, none",
    "compressed-tensors, block, dynamic",
    "Quark, static",
    "Quark, weights alone",
)


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def quantize_(package):
    return package.models.quantize_model_


def load(package, folder, dtype=torch.float32):
    with package.models.fp8_checkpoints():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()


def experts_of(package, model):
    modules = model.named_modules()
    return {n: m for n, m in modules if isinstance(m, package.models.Experts)}


def values(package, experts, name):
    """``[E, N, K]`` in float32."""
    pairs = zip(getattr(experts, name), getattr(experts, f"{name}_scale_inv"), strict=True)
    return torch.stack([package.reference.dequantize_expert(*pair) for pair in pairs]).float()


def values_meant(meant, name, which):
    """The same, of a module of that name, out of what a file has."""
    block = r"\.(block_sparse_moe|mlp|feed_forward)\."
    stored = next(key for key in meant if re.sub(block, ".mlp.", key).startswith(f"{name}."))
    experts = stored.partition(".experts")[0] + ".experts"
    if f"{experts}.{which}" in meant:
        return meant[f"{experts}.{which}"]
    mixtral = f"{experts}.0.w1" in meant
    linears = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
    if mixtral:
        linears = ("w1", "w3") if which == "gate_up_proj" else ("w2",)
    count = sum(key.startswith(f"{experts}.") and key.endswith(linears[0]) for key in meant)
    rows = [[meant[f"{experts}.{i}.{linear}"] for linear in linears] for i in range(count)]
    return torch.stack([torch.cat(parts) for parts in rows])


@pytest.mark.parametrize(
    ("family", "name"),
    # transformers' FP8Experts have no forward for Llama 4's.
    [
        (family, name)
        for family in ONE_BY_ONE
        for name in FORMATS
        if family != "llama4_text" or not name.startswith("finegrained")
    ],
)
@torch.no_grad()
def test_a_checkpoints_experts_are_adopted(
    package, quantize_, run_kernelized, device, tmp_path, family, name
):
    meant = write(tiny(family, **SIZES[family]), tmp_path, name, experts=True)
    model = load(package, tmp_path)
    report = quantize_(model)
    inputs = ", its inputs' static scales replaced by one a token" if "static" in name else ""
    bound = ", without a bound on its inputs' scales" if name == "FBGEMM" else ""
    found = experts_of(package, model)
    assert found and report.experts == dict.fromkeys(found, f"FP8 of the checkpoint{inputs}{bound}")
    assert not [key for key in report.kept if "experts" in key]
    for experts_name, experts in found.items():
        for which in ("gate_up_proj", "down_proj"):
            wanted = values_meant(meant, experts_name.replace("feed_forward", "mlp"), which)
            torch.testing.assert_close(values(package, experts, which), wanted, rtol=1e-6, atol=0)
        scheme = "none" if name.endswith(("none", "alone")) else "dynamic"
        assert experts.activation_scheme == scheme
        assert experts.scale_fmt == ("ue8m0" if name.endswith("ue8m0") else None)
    # On one device: where the last bits of an input differ, other codes of FP8 come out.
    ids = tokens(2, 9, device)
    unquantised = model.to(device)(ids).logits
    expected = quantizing_inputs(package, model)(ids).logits
    run_kernelized(model)
    assert ("Experts", "Experts") in package.models.kernelized_layers(model)
    actual = model(ids).logits
    noise = (expected - unquantised).abs().mean()
    # Experts take a float32 input as bfloat16.
    rounding = 5e-3 * expected.abs().mean()
    # An embedding that is off by 1e-6 gives a tenth of the noise, by other codes of FP8 behind it;
    # tensor cores round sums of FP8 sooner, and an H200 gave four tenths.
    part = 0.1 if device.type == "cpu" else 0.6
    assert (actual - expected).abs().mean() < part * noise + rounding


@torch.no_grad()
def test_what_cannot_be_taken_over_is_dequantised_and_named(package, tmp_path):
    model = tiny("mixtral", hidden_act="relu")
    meant = write(model, tmp_path, "Quark, static", experts=True)
    loaded = load(package, tmp_path)
    report = package.models.quantize_model_(loaded, activations="none")
    for what in report.experts.values():
        assert what.startswith("16 bits, dequantised from the checkpoint's FP8"), what
        assert "computes its gate in a way of its own" in what
    for layer, block in enumerate(loaded.model.layers):
        for i in range(4):
            stored = f"model.layers.{layer}.block_sparse_moe.experts.{i}"
            gate, up, down = (meant[f"{stored}.{name}"] for name in ("w1", "w3", "w2"))
            both = torch.cat([gate, up]).float()
            torch.testing.assert_close(block.mlp.experts.gate_up_proj[i], both)
            torch.testing.assert_close(block.mlp.experts.down_proj[i], down.float())


@torch.no_grad()
def test_a_missing_scale_is_no_checkpoint(package, tmp_path):
    write(tiny("mixtral"), tmp_path, "compressed-tensors, channel, dynamic", experts=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight_scale"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight is .* have no scale for it"):
        load(package, tmp_path)


# ---- what we write


def quantized(package, folder, family, activations):
    tiny(family, **SIZES[family]).save_pretrained(folder)
    model = load(package, folder, torch.bfloat16)
    package.models.quantize_model_(model, activations=activations)
    return model


@pytest.fixture
def check_saved(package, quantize_, run_kernelized, device, tmp_path):
    """Call it with a quantised model and what its experts are: saved and loaded, it has the same
    logits to the bit, before kernelize and after. Returns the loaded one and its report."""

    def check(model, experts):
        ids = tokens(2, 7)
        before = model(ids).logits
        model.save_pretrained(tmp_path / "fp8")
        loaded = load(package, tmp_path / "fp8", torch.bfloat16)
        assert torch.equal(loaded(ids).logits, before)
        report = quantize_(loaded)
        assert set(report.experts.values()) == {experts} and not report.converted
        loaded.save_pretrained(tmp_path / "again")
        again = load_file(tmp_path / "again" / "model.safetensors")
        first = load_file(tmp_path / "fp8" / "model.safetensors")
        assert again.keys() == first.keys()
        assert all(torch.equal(again[k].float(), first[k].float()) for k in first)
        run_kernelized(model), run_kernelized(loaded)
        ids = ids.to(device)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        return loaded, report

    return check


@pytest.mark.parametrize("activations", ["dynamic", "none"])
@pytest.mark.parametrize("family", SIZES)
@torch.no_grad()
def test_saved_and_loaded(package, check_saved, tmp_path, family, activations):
    model = quantized(package, tmp_path / "float", family, activations)
    loaded, _ = check_saved(model, "FP8 of the checkpoint")
    schemes = {experts.activation_scheme for experts in experts_of(package, loaded).values()}
    assert schemes == {activations}


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_loaded_in_a_process_of_its_own(package, tmp_path, family):
    model = quantized(package, tmp_path / "float", family, None)
    asked = "set(report.experts.values())"
    printed = told_by_a_clean_process(model, tmp_path, asked, attn_implementation="eager")
    assert printed == "torch.bfloat16 {'FP8 of the checkpoint'} True"


def assert_read_by_others(model, folder):
    """compressed-tensors' own package gives the logits that ours gave before it was saved."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = tokens(1, 7)
    close = torch.nn.functional.cosine_similarity(
        theirs(ids).logits.float(), model(ids).logits.float(), dim=-1
    )
    assert close.min() > 0.999


@pytest.mark.parametrize("family", ONE_BY_ONE)
@torch.no_grad()
def test_others_read_what_we_saved(package, tmp_path, family):
    """compressed-tensors' own package, which computes in 16 bits from the same FP8 values."""
    model = quantized(package, tmp_path / "float", family, "none")
    model.save_pretrained(tmp_path / "fp8")
    assert_read_by_others(model, tmp_path / "fp8")


@torch.no_grad()
def test_what_is_saved_is_compressed_tensors(package, tmp_path):
    """A linear for each expert, and its router named as one that is not FP8."""
    model = quantized(package, tmp_path / "float", "mixtral", "dynamic")
    model.save_pretrained(tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    w1 = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    assert tensors[w1].dtype == torch.float8_e4m3fn and tensors[w1].shape == (256, 256)
    assert tensors[f"{w1}_scale"].dtype == torch.float32
    assert tensors[f"{w1}_scale"].shape == (256, 1)
    assert not any("gate_up_proj" in name or "scale_inv" in name for name in tensors)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    blocks = ("mlp", "block_sparse_moe")  # in transformers, and in its files
    gates = [f"model.layers.{i}.{block}.gate" for i in range(2) for block in blocks]
    assert config["ignore"] == [*gates, "lm_head"]
    assert len(config["config_groups"]) == 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_blocks_are_saved_as_transformers_finegrained_fp8(package, quantize_, tmp_path, family):
    """Which it loads by itself: dequantised here, as without a GPU, for the kernel that it
    takes on one is the Hub's."""
    model = tiny(family, **{**SIZES[family], **LATENT.get(family, {})})
    write(model, tmp_path / "theirs", "finegrained, blocks", experts=True)
    model = load(package, tmp_path / "theirs")
    quantize_(model)
    ids = tokens(1, 7)
    before = model(ids).logits
    model.save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    loaded = load(package, tmp_path / "ours")
    quantize_(loaded)
    assert torch.equal(loaded(ids).logits, before)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    ).eval()
    torch.testing.assert_close(theirs(ids).logits, before, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_16_bit_experts_stay_so_in_a_file(package, quantize_, tmp_path):
    tiny("mixtral").save_pretrained(tmp_path / "float")
    model = load(package, tmp_path / "float", torch.bfloat16)
    quantize_(model, skip=["*.0.mlp.experts"])
    ids = tokens(2, 7)
    before = model(ids).logits
    model.save_pretrained(tmp_path / "fp8")
    loaded = load(package, tmp_path / "fp8", torch.bfloat16)
    assert torch.equal(loaded(ids).logits, before)
    assert list(experts_of(package, loaded)) == ["model.layers.1.mlp.experts"]


def of_mxfp4_(package, model):
    """Puts values of MXFP4 into a model's experts, as transformers dequantises them."""
    for module in model.modules():
        for which in ("gate_up_proj", "down_proj"):
            parameter = getattr(module, which, None)
            if not isinstance(parameter, torch.nn.Parameter) or parameter.dim() != 3:
                continue
            transposed = getattr(module, "is_transposed", "Llama4" in type(module).__name__)
            experts, n, k = parameter.mT.shape if transposed else parameter.shape
            codes = torch.randint(256, (experts, n, k // 2), dtype=torch.uint8)
            scales = torch.randint(120, 123, (experts, n, k // 32), dtype=torch.uint8)
            pairs = zip(codes, scales, strict=True)
            made = torch.stack([package.reference.dequantize_expert(*pair) for pair in pairs])
            parameter.data = (made.mT if transposed else made).contiguous().to(parameter.dtype)
    return model


MXFP4 = {**SIZES, "granitemoe": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}}


def with_mxfp4(package, folder, family, **options):
    """A model of 16 bits whose experts hold values of MXFP4, quantised."""
    of_mxfp4_(package, tiny(family, **MXFP4[family])).save_pretrained(folder)
    model = load(package, folder, torch.bfloat16)
    report = package.models.quantize_model_(model, **options)
    assert set(report.experts.values()) == {"MXFP4 of the checkpoint"}
    return model


@pytest.mark.parametrize("family", MXFP4)
@torch.no_grad()
def test_mxfp4_experts_are_saved_beside_fp8_linears(package, check_saved, tmp_path, family):
    model = with_mxfp4(package, tmp_path / "float", family, activations="dynamic")
    loaded, report = check_saved(model, "MXFP4 of the checkpoint")
    assert report.adopted
    for name, module in experts_of(package, loaded).items():
        assert module.activation_scheme == "none"
        for key, tensor in model.get_submodule(name).state_dict().items():
            assert torch.equal(module.state_dict()[key], tensor)


@torch.no_grad()
def test_gpt_oss_checkpoints_are_adopted(package, quantize_, tmp_path):
    """As they are published: experts in MXFP4, all else in 16 bits. No value is dequantised."""
    model = with_mxfp4(package, tmp_path, "gpt_oss", skip=["*.self_attn.*"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, module in experts_of(package, model).items():
        for which in ("gate_up_proj", "down_proj"):
            del tensors[f"{name}.{which}"]
            blocks = getattr(module, which).unflatten(2, (-1, 16))
            tensors[f"{name}.{which}_blocks"] = blocks.clone()
            tensors[f"{name}.{which}_scales"] = getattr(module, f"{which}_scale_inv").clone()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": others}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(package, tmp_path, torch.bfloat16)
    report = quantize_(loaded)
    assert set(report.experts.values()) == {"MXFP4 of the checkpoint"} and report.converted
    theirs, ours = experts_of(package, loaded), experts_of(package, model)
    for name in ours:
        for key, tensor in ours[name].state_dict().items():
            assert torch.equal(theirs[name].state_dict()[key], tensor)


@torch.no_grad()
def test_mxfp4_and_fp8_experts_in_one_file(package, quantize_, tmp_path):
    model = tiny("mixtral", **SIZES["mixtral"])
    of_mxfp4_(package, model.model.layers[1])
    model.save_pretrained(tmp_path / "float")
    model = load(package, tmp_path / "float", torch.bfloat16)
    quantize_(model)
    ids = tokens(2, 7)
    before = model(ids).logits
    model.save_pretrained(tmp_path / "fp8")
    loaded = load(package, tmp_path / "fp8", torch.bfloat16)
    assert torch.equal(loaded(ids).logits, before)
    told = quantize_(loaded).experts
    assert [*told.values()] == ["FP8 of the checkpoint", "MXFP4 of the checkpoint"]


@torch.no_grad()
def test_mxfp4_experts_in_a_process_of_its_own(package, tmp_path):
    model = with_mxfp4(package, tmp_path / "float", "gpt_oss")
    asked = "set(report.experts.values())"
    printed = told_by_a_clean_process(model, tmp_path, asked, attn_implementation="eager")
    assert printed == "torch.bfloat16 {'MXFP4 of the checkpoint'} True"


@pytest.mark.parametrize("family", ONE_BY_ONE)
@torch.no_grad()
def test_others_read_mxfp4_experts_beside_fp8_linears(package, tmp_path, family):
    """compressed-tensors' own package, which dequantises both."""
    model = with_mxfp4(package, tmp_path / "float", family, activations="none")
    model.save_pretrained(tmp_path / "fp8")
    assert_read_by_others(model, tmp_path / "fp8")


@torch.no_grad()
def test_mxfp4_experts_in_files(package, tmp_path):
    """As GPT-OSS's own files have them, and as compressed-tensors packs them; the config says
    which linears are what."""
    with_mxfp4(package, tmp_path / "float", "gpt_oss").save_pretrained(tmp_path / "gpt_oss")
    tensors = load_file(tmp_path / "gpt_oss" / "model.safetensors")
    blocks = tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"]
    scales = tensors["model.layers.1.mlp.experts.gate_up_proj_scales"]
    assert blocks.dtype == scales.dtype == torch.uint8
    assert blocks.shape == (*scales.shape, 16) and blocks.shape[1:3] == (512, 8)
    with_mxfp4(package, tmp_path / "float", "mixtral").save_pretrained(tmp_path / "mixtral")
    tensors = load_file(tmp_path / "mixtral" / "model.safetensors")
    w1 = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    assert tensors[f"{w1}_packed"].shape == (256, 128) and tensors[f"{w1}_scale"].shape == (256, 8)
    config = json.loads((tmp_path / "mixtral" / "config.json").read_text())["quantization_config"]
    groups = {group["format"]: group for group in config["config_groups"].values()}
    assert config["format"] == "mixed-precision"
    assert groups.keys() == {"float-quantized", "mxfp4-pack-quantized"}
    assert groups["mxfp4-pack-quantized"]["weights"]["group_size"] == 32
    assert all("experts" in target for target in groups["mxfp4-pack-quantized"]["targets"])
    assert "model.layers.1.self_attn.q_proj" in groups["float-quantized"]["targets"]


@torch.no_grad()
def test_a_state_dict_of_experts_is_ocps(package, quantize_):
    """Whatever dialect the device has, and it loads into any."""
    model = tiny("mixtral", **SIZES["mixtral"])
    ocp, fnuz = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(ocp)
    quantize_(fnuz, fp8_dtype=torch.float8_e4m3fnuz)
    name = "model.layers.1.mlp.experts"
    assert fnuz.get_submodule(name).down_proj.dtype == torch.float8_e4m3fnuz
    fnuz.load_state_dict(ocp.state_dict())
    assert fnuz.get_submodule(name).down_proj.dtype == torch.float8_e4m3fnuz
    state = fnuz.state_dict()
    assert all(torch.equal(state[k].float(), v.float()) for k, v in ocp.state_dict().items())
    with pytest.raises(RuntimeError, match=r"down_proj must be torch.float8_e4m3fn, got"):
        state = ocp.state_dict()
        ocp.load_state_dict({**state, f"{name}.down_proj": state[f"{name}.down_proj"].float()})


# Whose names in files differ from the model's in other ways: experts under a name of their own, in
# one tensor; a gate of another name beside a shared expert; a vision tower and a tied head.
RENAMED = {
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {
        "text_config": {
            "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 160, "head_dim": 16,
        },
        "vision_config": {
            "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        "mm_tokens_per_image": 4, "image_token_index": 159,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", RENAMED)
@torch.no_grad()
def test_names_in_files_are_found_again(package, quantize_, tmp_path, family):
    """For this package, and for compressed-tensors' own where transformers can join experts."""
    sizes = {
        "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 2, "vocab_size": 160,
        "num_attention_heads": 6, "num_key_value_heads": 2,
    }  # fmt: skip
    own = RENAMED[family]
    config = AutoConfig.for_model(family, **({} if "text_config" in own else sizes), **own)
    randomized(AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "float")
    model = load(package, tmp_path / "float")
    converted = quantize_(model, activations="none").converted
    ids = tokens(1, 7, vocabulary=150)
    before = model(ids).logits
    model.save_pretrained(tmp_path / "fp8")
    loaded = load(package, tmp_path / "fp8")
    assert torch.equal(loaded(ids).logits, before)
    assert set(quantize_(loaded).adopted) == set(converted)
    if family != "granitemoe":
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32).eval()
        torch.testing.assert_close(theirs(ids).logits, before, rtol=1e-3, atol=1e-3)
