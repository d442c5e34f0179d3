"""Experts of FP8 checkpoints in each form that files have, beside the model that they mean."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import by_block, dequantised
from tiny_experts import FAMILIES, config_of, finegrained, tiny, write
from tiny_models import quantizing_inputs, tokens
from transformers import AutoModelForCausalLM

DEQUANTISED = "16 bits, dequantised from the checkpoint's FP8: "
NO_GATE = DEQUANTISED + "has no gate, and fused_moe computes gated experts alone"
GATED = [family for family in FAMILIES if family != "nemotron_h"]


@pytest.fixture
def package(best_package):
    return best_package


def load(package, folder):
    with package.models.fp8_checkpoints():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def logits_meant(folder, ids):
    meant = AutoModelForCausalLM.from_pretrained(
        folder / "meant", dtype=torch.float32, attn_implementation="eager"
    )
    return meant.eval()(ids).logits


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def assert_alike(actual, expected):
    """To the bit. Not of logits in float32: a product's sums depend on where a file lies in
    memory."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name].float(), tensor.float()), name


@pytest.fixture
def check(package, tmp_path, run_kernelized, device):
    """Call it with what the report must say of a checkpoint's experts. It means what its files
    mean; saved and loaded it is the same to
    the bit, out of tensors of the same shapes;
    and the kernels compute what the reference does. Returns the model and the saved tensors."""

    def checked(told):
        model = load(package, tmp_path / "fp8")
        report = package.models.quantize_model_(model)
        assert set(report.experts.values()) == {told}
        ids = tokens(2, 9)
        before = model(ids).logits
        close(before, logits_meant(tmp_path, ids))
        model.save_pretrained(tmp_path / "saved")
        again = load(package, tmp_path / "saved")
        assert_alike(again.state_dict(), model.state_dict())
        close(again(ids).logits, before)
        first = load_file(tmp_path / "fp8" / "model.safetensors")
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        sizes = {n: t.numel() for n, t in first.items() if re.search(r"experts.*weight$", n)}
        assert all(saved[n].numel() == size for n, size in sizes.items() if n in saved)
        expected = quantizing_inputs(package, model)(ids).logits.to(device)
        run_kernelized(model)
        actual = model(ids.to(device)).logits
        noise = (expected - before.to(device)).abs().mean()
        assert (actual - expected).abs().mean() < 0.1 * noise + 5e-3 * expected.abs().mean()
        return model, saved

    return checked


@pytest.mark.parametrize("by", ["tensor", "channel", "block"])
@pytest.mark.parametrize("apart", [True, False], ids=["one by one", "in one tensor"])
@pytest.mark.parametrize("family", GATED)
@torch.no_grad()
def test_each_form(check, tmp_path, family, apart, by):
    """gate's and up's scales differ, and each expert's."""
    if by == "block" and not apart and family == "gpt_oss":
        pytest.skip("rows of gate and up in turn have blocks of both")
    write(tiny(family), tmp_path, by, apart)
    check("FP8 of the checkpoint")


@pytest.mark.parametrize("apart", [True, False], ids=["one by one", "in one tensor"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_16_bits_that_no_list_names(package, check, tmp_path, family, apart):
    """The config says FP8 of all linears. The files hold the experts in 16 bits."""
    if not apart and family in ("mixtral", "qwen3_moe", "nemotron_h"):
        pytest.skip("transformers itself has no name for it")
    model = tiny(family)
    model.save_pretrained(tmp_path / "meant")
    write(model, tmp_path, "16 bits", apart=apart) if apart else in_own_form(model, tmp_path)
    loaded = load(package, tmp_path / "fp8")
    assert not any(isinstance(m, package.models.Experts) for m in loaded.modules())
    ids = tokens(2, 9)
    close(loaded(ids).logits, logits_meant(tmp_path, ids))
    report = package.models.quantize_model_(loaded)
    told = "stays: has no gate, and fused_moe computes gated experts alone"
    told = told if family == "nemotron_h" else "FP8, a scale a channel"
    assert set(report.experts.values()) == {told}
    share = sum(part for name, part in report.kept.items() if "experts." in name)
    assert (share > 0.2) == (family == "nemotron_h")


def in_own_form(model, folder):
    write(model, folder, "16 bits")
    tensors = load_file(folder / "meant" / "model.safetensors")
    save_file(tensors, folder / "fp8" / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("config", ["compressed-tensors", "finegrained"])
@pytest.mark.parametrize("inner", [320, 192, 40])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "llama4_text"])
@torch.no_grad()
def test_blocks_that_gate_and_up_do_not_fill(check, tmp_path, family, inner, config):
    model = tiny(family, inner)
    if config == "finegrained":
        write(model, tmp_path, "block", config=finegrained([128, 128]), scale="_scale_inv")
    else:
        write(model, tmp_path, "block", config=config_of("block", inputs="dynamic"))
    held = -(-inner // 128) * 128
    loaded, saved = check(f"FP8 of the checkpoint, {inner} rows of gate and up each held as {held}")
    for module in loaded.modules():
        if type(module).__name__ == "Experts":
            assert module.gate_up_proj.shape[1:] == (2 * held, 256)
            assert module.intermediate_size == inner
    first = load_file(tmp_path / "fp8" / "model.safetensors")
    experts = [name for name in first if re.search(r"\.experts\.\d+\.", name)]
    saved = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in saved.items()}
    stored = {name: saved[name.replace("_scale_inv", "_scale")] for name in experts}
    assert stored and all(torch.equal(stored[n].float(), first[n].float()) for n in stored)


@pytest.mark.parametrize("inner", [192, 320, 40])
@pytest.mark.parametrize("by", ["tensor", "channel", "block"])
@pytest.mark.parametrize("apart", [True, False], ids=["one by one", "in one tensor"])
@pytest.mark.parametrize("family", GATED)
@torch.no_grad()
def test_any_size(package, tmp_path, family, apart, by, inner):
    """In one tensor, too, gate's last block and up's first have a scale each."""
    if by == "block" and not apart and family == "gpt_oss":
        pytest.skip("rows of gate and up in turn have blocks of both")
    write(tiny(family, inner), tmp_path, by, apart)
    is_what_the_files_mean(package, tmp_path)


@pytest.mark.parametrize("inner", [96, 160, 80])
@pytest.mark.parametrize("apart", [True, False], ids=["one by one", "in one tensor"])
@pytest.mark.parametrize("family", GATED)
@torch.no_grad()
def test_mxfp4_of_any_size(package, tmp_path, family, apart, inner):
    """80 columns are two blocks of 32 and a half."""
    write(tiny(family, inner), tmp_path, "mxfp4", apart)
    report = is_what_the_files_mean(package, tmp_path)
    held = -(-inner // 32) * 32
    padding = "" if held == inner else f", {inner} rows of gate and up each held as {held}"
    assert set(report.experts.values()) == {f"MXFP4 of the checkpoint{padding}"}


def is_what_the_files_mean(package, folder):
    """Loaded; and saved again. Returns the report."""
    model = load(package, folder / "fp8")
    linears = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    report = package.models.quantize_model_(model, activations="none", skip=linears)
    ids = tokens(2, 9)
    expected = logits_meant(folder, ids)
    close(model(ids).logits, expected)
    model.save_pretrained(folder / "saved")
    close(load(package, folder / "saved")(ids).logits, expected)
    return report


@pytest.mark.parametrize("by", ["tensor", "channel", "block"])
@pytest.mark.parametrize("apart", [True, False], ids=["one by one", "in one tensor"])
@torch.no_grad()
def test_experts_without_a_gate(check, tmp_path, apart, by):
    write(tiny("nemotron_h"), tmp_path, by, apart)
    model, _ = check(NO_GATE)
    (experts,) = [m for n, m in model.named_modules() if n.endswith(".experts")]
    assert experts.up_proj.dtype == torch.float32


@torch.no_grad()
def test_experts_without_a_gate_in_finegrained_files(check, tmp_path):
    config = finegrained([128, 128])
    write(tiny("nemotron_h"), tmp_path, "block", config=config, scale="_scale_inv")
    check(NO_GATE)


@pytest.mark.parametrize("by", ["32 x 32", "1 x 32"])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text", "nemotron_h"])
@torch.no_grad()
def test_small_blocks_are_dequantised(check, tmp_path, family, by):
    """With scales that are powers of two this changes no value, in bfloat16 either."""
    write(tiny(family), tmp_path, by)
    why = DEQUANTISED + f"has {by} blocks"
    check(why)


@pytest.mark.parametrize("family", GATED)
@torch.no_grad()
def test_formats_that_are_mixed_are_dequantised(check, tmp_path, family):
    """As of files that have down_proj, or some experts, in 16 bits."""

    def by(name):
        return "16 bits" if name.startswith("2.") or "down" in name or "w2" in name else "channel"

    write(tiny(family), tmp_path, by, config=config_of("channel"))
    check(DEQUANTISED + "has its weights in more than one format")


@torch.no_grad()
def test_a_gate_that_fused_moe_lacks(check, tmp_path):
    model = tiny("mixtral")
    model.config.hidden_act = "relu"
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = torch.nn.ReLU()
    write(model, tmp_path, "channel")
    check(DEQUANTISED + "computes its gate in a way of its own")


@torch.no_grad()
def test_a_missing_scale_is_named(package, tmp_path):
    write(tiny("mixtral"), tmp_path, "channel")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight_scale"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight is .* have no scale for it"):
        load(package, tmp_path / "fp8")


@pytest.mark.parametrize("by", ["channel", "mxfp4", "32 x 32"])
@torch.no_grad()
def test_a_missing_expert_is_no_zero(package, tmp_path, by):
    """Of one linear, weight and scale: nothing is made of the others."""
    write(tiny("mixtral"), tmp_path, by)
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".layers.0." in name and ".experts.2.w1." in name]:
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)):
        load(package, tmp_path / "fp8")


@torch.no_grad()
def test_another_fp8_is_dequantised(check, tmp_path):
    """float8_e5m2, which no kernel here takes."""
    write(tiny("mixtral"), tmp_path, "channel")
    files = [tmp_path / folder / "model.safetensors" for folder in ("fp8", "meant")]
    stored, meant = map(load_file, files)
    for name in [name for name in stored if re.search(r"experts\..*\.weight$", name)]:
        stored[name] = stored[name].float().to(torch.float8_e5m2)
        meant[name] = stored[name].float() * stored[f"{name}_scale"]
    for tensors, file in zip((stored, meant), files, strict=True):
        save_file(tensors, file, {"format": "pt"})
    check(DEQUANTISED + "has weights of float8_e5m2")


@torch.no_grad()
def test_mxfp4_whose_rows_end_within_a_block(package, tmp_path):
    write(tiny("qwen3_moe", 96, hidden_size=240), tmp_path, "mxfp4")
    model = load(package, tmp_path / "fp8")
    ids = tokens(2, 9)
    close(model(ids).logits, logits_meant(tmp_path, ids))
    told = set(package.models.quantize_model_(model).experts.values())
    why = "has rows of 240 values, not whole blocks of 32"
    assert told == {DEQUANTISED.replace("FP8", "MXFP4") + why}


@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
@torch.no_grad()
def test_inputs_of_experts_have_scales_that_are_powers_of_two(package, tmp_path, family):
    config = {**finegrained([128, 128]), "scale_fmt": "ue8m0"}
    write(tiny(family, 192), tmp_path, "block", config=config, scale="_scale_inv")
    model = load(package, tmp_path / "fp8")
    package.models.quantize_model_(model)
    found = [m for m in model.modules() if isinstance(m, package.models.Experts)]
    assert found and {experts.scale_fmt for experts in found} == {"ue8m0"}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
@torch.no_grad()
def test_blocks_of_gate_and_up_in_one(package, tmp_path, family):
    """As of a tool that quantised one tensor: the scale of a block is of gate's last rows and of
    up's first. No file of linears can hold that, and saving says so."""
    write(tiny(family, 192), tmp_path, "block", apart=False)
    files = [tmp_path / folder / "model.safetensors" for folder in ("fp8", "meant")]
    stored, meant = map(load_file, files)
    for name in [name for name in stored if name.endswith("gate_up_proj")]:
        made = [by_block(torch.randn(384, 256)) for _ in range(4)]
        stored[name], stored[f"{name}_scale"] = map(torch.stack, zip(*made, strict=True))
        values = [dequantised(*pair) for pair in made]
        if name in meant:
            meant[name] = torch.stack(values)
            continue
        for i, value in enumerate(values):
            gate, up = value.chunk(2)
            experts = f"{name.rpartition('.')[0]}.{i}"
            meant[f"{experts}.gate_proj.weight"] = gate.contiguous()
            meant[f"{experts}.up_proj.weight"] = up.contiguous()
    for tensors, file in zip((stored, meant), files, strict=True):
        save_file(tensors, file, {"format": "pt"})
    model = load(package, tmp_path / "fp8")
    ids = tokens(2, 9)
    close(model(ids).logits, logits_meant(tmp_path, ids))
    report = package.models.quantize_model_(model)
    assert set(report.experts.values()) == {"FP8 of the checkpoint"}
    with pytest.raises(ValueError, match="192 rows each of gate and up, which are not whole"):
        model.save_pretrained(tmp_path / "saved")


@torch.no_grad()
def test_saved_as_loaded_without_quantize_model_(package, tmp_path):
    """Conversions that a file came by are not those that it is saved by."""
    write(tiny("qwen3_moe", 192), tmp_path, "block")
    model = load(package, tmp_path / "fp8")
    model.save_pretrained(tmp_path / "saved")
    assert_alike(load(package, tmp_path / "saved").state_dict(), model.state_dict())
