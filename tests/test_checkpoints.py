"""FP8 checkpoints: built as their makers write them, loaded, adopted, kernelized; and our own."""

import importlib
import json
import sys

import pytest
import torch
from project import REPO_ID, ROOT
from safetensors.torch import load_file, save_file
from test_package import run_python
from tiny_checkpoints import FORMATS, static_scale, to_torchao_, write
from tiny_models import quantizing_inputs, tiny_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
from transformers.integrations.finegrained_fp8 import FP8Linear


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def quantize_(package):
    return package.models.quantize_model_


def wide_llama():
    """Wide enough for several blocks, q, k and v of whole ones."""
    return tiny_llama(
        hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, num_hidden_layers=2,
    )  # fmt: skip


# ---- what others wrote


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_a_checkpoint_is_loaded_adopted_and_fused(
    package, quantize_, run_kernelized, device, tmp_path, name
):
    """FP8 all the way, also on the CPU: the same values, with whole decoder layers."""
    meant = write(wide_llama(), tmp_path, name)
    with package.models.fp8_checkpoints():
        model, reference = (
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
            for _ in range(2)
        )
    report = quantize_(model)
    assert len(report.adopted) == 14 and report.converted == ()
    assert set(report.skipped) == {"lm_head"} and len(report.fused) == 4
    for linear, weight in meant.items():
        module = model.get_submodule(linear)
        values = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
        torch.testing.assert_close(values.float(), weight, rtol=1e-6, atol=0)
        assert module.weight.dtype == torch.float8_e4m3fn
        scheme = {"static": "static", "weights alone": "none", "none": "none"}
        assert module.activation_scheme == scheme.get(name.rpartition(", ")[2], "dynamic")
        assert module.scale_fmt == ("ue8m0" if name.endswith("ue8m0") else None)
        if module.activation_scheme == "static":
            assert module.activation_scale.item() == pytest.approx(static_scale(linear))
    quantize_(reference, fuse=False)
    ids = tokens(2, 9)
    unquantised = model(ids).logits.to(device)
    expected = quantizing_inputs(package, reference)(ids).logits.to(device)
    run_kernelized(model)
    counts = package.models.kernelized_layers(model)
    assert counts["LlamaDecoderLayer", "LlamaDecoderLayer"] == 2
    actual = model(ids.to(device)).logits
    if "none" in name or "alone" in name:
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    else:
        noise = (expected - unquantised).abs().mean()
        assert (actual - expected).abs().mean() < 0.1 * noise


def test_nothing_is_left_of_the_loader(package):
    from transformers.quantizers import auto

    before = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    with pytest.raises(KeyError), package.models.fp8_checkpoints():
        assert before[0] != auto.AUTO_QUANTIZER_MAPPING
        raise KeyError
    assert before == (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)


@pytest.mark.parametrize(
    "name", ["finegrained, blocks", "finegrained, ue8m0", "compressed-tensors, tensor, static"]
)
@pytest.mark.parametrize("activations", ["dynamic", "none"])
@torch.no_grad()
def test_inputs_are_taken_as_asked(
    package, quantize_, run_kernelized, device, tmp_path, name, activations
):
    write(wide_llama(), tmp_path, name)
    with package.models.fp8_checkpoints():
        model, reference = (
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval() for _ in range(2)
        )
    quantize_(model, activations=activations)
    linears = [m for m in model.modules() if isinstance(m, package.models.FP8Linear)]
    assert {m.activation_scheme for m in linears} == {activations}
    assert all(m.activation_scale is None for m in linears)
    kept = "ue8m0" if name.endswith("ue8m0") and activations == "dynamic" else None
    assert {m.scale_fmt for m in linears} == {kept}
    ids = tokens(1, 5)
    exact = model(ids).logits.to(device)
    quantize_(reference, activations=activations, fuse=False)
    expected = quantizing_inputs(package, reference)(ids).logits.to(device)
    actual = run_kernelized(model)(ids.to(device)).logits
    if activations == "none":
        torch.testing.assert_close(actual, exact, rtol=1e-3, atol=1e-3)
    else:
        assert (actual - expected).abs().mean() < 0.1 * (expected - exact).abs().mean()


def finegrained(n, k, **arguments):
    linear = FP8Linear(k, n, **arguments)
    linear.weight.data = torch.randn(n, k).to(torch.float8_e4m3fn)
    linear.weight_scale_inv.data = torch.rand_like(linear.weight_scale_inv.data) + 0.5
    return linear.requires_grad_(False)


@pytest.mark.parametrize("dialect", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_linears_of_transformers_are_adopted(package, quantize_, dialect):
    model = nn.ModuleDict(
        {
            "blocks": finegrained(200, 300, block_size=(128, 128)),
            "narrow": finegrained(200, 96, block_size=(128, 128)),
            "static": finegrained(48, 64, activation_scheme="static"),
            "other_blocks": finegrained(64, 64, block_size=(32, 32)),
            "fbgemm": FbgemmFp8Linear(64, 48, bias=False).requires_grad_(False),
            "plain": nn.Linear(64, 48),
        }
    )
    model["static"].activation_scale.data = torch.tensor(0.5)
    model["fbgemm"].weight.data = torch.randn(48, 64).to(torch.float8_e4m3fn)
    model["fbgemm"].weight_scale.data = torch.rand(48, 1)
    model["fbgemm"].input_scale_ub.fill_(1200)
    expected = {
        name: package.reference.dequantize(linear.weight, scale, 128)
        for name, linear, scale in (
            ("blocks", model["blocks"], model["blocks"].weight_scale_inv),
            ("static", model["static"], model["static"].weight_scale_inv),
            ("fbgemm", model["fbgemm"], model["fbgemm"].weight_scale),
        )
    }
    narrow = model["narrow"].weight_scale_inv.data.repeat_interleave(128, 0)[:200]
    expected["narrow"] = model["narrow"].weight.double() * narrow
    report = quantize_(model, fp8_dtype=dialect)
    assert report.adopted == ("blocks", "narrow", "static", "fbgemm")
    assert report.converted == ("plain",)
    assert report.skipped == {"other_blocks": "has scale blocks of (32, 32), not (128, 128)"}
    for name, values in expected.items():
        module = model[name]
        assert module.weight.dtype == dialect and isinstance(module, package.models.FP8Linear)
        ours = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
        assert torch.equal(ours, values), name
    doubled = 2.0 if dialect == torch.float8_e4m3fnuz else 1.0
    assert model["static"].activation_scale.item() == 0.5 * doubled
    assert model["fbgemm"].scale_ub == 1200


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("compressed")])
@torch.no_grad()
def test_what_its_makers_package_loads_is_adopted(package, quantize_, tmp_path, name):
    write(wide_llama(), tmp_path, name)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with package.models.fp8_checkpoints():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert len(quantize_(theirs).adopted) == len(quantize_(ours).adopted) == 14
    ids = tokens(1, 7)
    for one, other in zip(ours.modules(), theirs.modules(), strict=True):
        assert type(one) is type(other)
        if isinstance(one, package.models.FP8Linear):
            assert one.activation_scheme == other.activation_scheme
    assert torch.equal(theirs(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("inputs", [True, False])
@torch.no_grad()
def test_torchao_is_adopted(package, quantize_, inputs):
    model = wide_llama().bfloat16()
    to_torchao_(model, inputs)
    weight = model.model.layers[0].mlp.up_proj.weight.dequantize()
    report = quantize_(model)
    assert len(report.adopted) == 14 and len(report.fused) == 4
    up = model.model.layers[0].mlp.up_proj
    assert up.activation_scheme == ("dynamic" if inputs else "none")
    values = package.reference.dequantize(up.weight, up.weight_scale_inv, 128)
    torch.testing.assert_close(values.bfloat16(), weight)


@pytest.mark.slow
def test_the_page_has_what_the_script_finds(package, device):
    """Two rows of docs/results/models.md: all of them take minutes."""
    if device.type != "cpu":
        pytest.skip("the script runs models on a CPU, and a program has one variant's layers")
    sys.path.insert(0, str(ROOT / "tools"))
    models_table = importlib.import_module("models_table")
    *_, row, moe = models_table.table(package, rows=("llama", "mixtral")).splitlines()
    page = models_table.PAGE.read_text()
    table = page.partition(models_table.BEGIN)[2].partition(models_table.END)[0]
    assert row in table and moe in table and "wrong" not in table
    for made in (row, moe):
        assert made.count("whole layers") == len(models_table.COLUMNS)


# ---- what we write


def save_and_load(package, model, folder):
    """In this process, as it is loaded with the package and nothing else."""
    model.save_pretrained(folder)
    with package.models.fp8_checkpoints():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("activations", ["dynamic", "none"])
@torch.no_grad()
def test_saved_and_loaded(package, quantize_, run_kernelized, device, tmp_path, fuse, activations):
    """The same logits to the bit, fused or not, before kernelize and after."""
    wide_llama().save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype="bfloat16").eval()
    quantize_(model, activations=activations, fuse=fuse, skip=["*.1.mlp.*"])
    ids = tokens(2, 7)
    before = model(ids).logits
    loaded = save_and_load(package, model, tmp_path)
    assert torch.equal(loaded(ids).logits, before)
    report = quantize_(loaded, fuse=fuse)
    assert len(report.adopted) == 11 and report.converted == ()
    left = report.skipped["model.layers.1.mlp.up_proj"]
    assert left == "its checkpoint has it in 16 bits"
    assert torch.equal(loaded(ids).logits, before)
    run_kernelized(model), run_kernelized(loaded)
    assert package.models.kernelized_layers(loaded) == package.models.kernelized_layers(model)
    ids = ids.to(device)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    other = save_and_load(package, loaded, tmp_path / "again")  # kernelized, adopted
    assert torch.equal(other(ids.cpu()).logits, before)


def told_by_a_clean_process(model, folder, asked, **options):
    """Saves the model; a process that has the package and the file, and has quantised nothing,
    loads it with the options. Returns what that prints: the model's dtype, `asked` of the report,
    and whether the logits are the same to the bit."""
    model.save_pretrained(folder / "fp8")
    ids = tokens(2, 7)
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, folder / "expected")
    code = f"""
import torch
from kernels import get_kernel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
package = get_kernel({REPO_ID!r}, version=1, backend="cpu")
with package.models.fp8_checkpoints():
    model = AutoModelForCausalLM.from_pretrained({str(folder / "fp8")!r}, **{options!r}).eval()
expected = load_file({str(folder / "expected")!r})
report = package.models.quantize_model_(model)
with torch.no_grad():
    same = torch.equal(model(expected["ids"]).logits, expected["logits"])
print(model.dtype, {asked}, same)
"""
    return run_python(code, LOCAL_KERNELS=f"{REPO_ID}={ROOT}")


@torch.no_grad()
def test_loaded_in_a_process_of_its_own(package, quantize_, run_kernelized, device, tmp_path):
    wide_llama().save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype="bfloat16").eval()
    quantize_(model)
    asked = "len(report.adopted), len(report.fused)"
    assert told_by_a_clean_process(model, tmp_path, asked) == "torch.bfloat16 14 4 True"


@torch.no_grad()
def test_others_read_what_we_saved(package, quantize_, tmp_path):
    """compressed-tensors' own package, which computes in 16 bits from the same FP8 values."""
    model = wide_llama()
    quantize_(model, activations="dynamic")
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = tokens(1, 7)
    close = torch.nn.functional.cosine_similarity(theirs(ids).logits, model(ids).logits, dim=-1)
    assert close.min() > 0.99  # its inputs are quantised on the fly, ours not before kernelize
    state = {n: t for n, t in theirs.state_dict().items() if n.endswith("_proj.weight")}
    assert len(state) == 14
    for name, weight in state.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        values = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
        torch.testing.assert_close(weight.double(), values, rtol=1e-6, atol=0)


def test_what_is_saved_is_compressed_tensors(package, quantize_, tmp_path):
    """As others read it: names, shapes, dtypes, and what the config says."""
    model = wide_llama().bfloat16()
    quantize_(model, activations="dynamic")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.self_attn.k_proj."
    assert tensors[f"{prefix}weight"].dtype == torch.float8_e4m3fn
    assert tensors[f"{prefix}weight"].shape == (256, 256)
    assert tensors[f"{prefix}weight_scale"].shape == (256, 1)
    assert tensors[f"{prefix}weight_scale"].dtype == torch.float32
    assert not any("qkv_proj" in name or "scale_inv" in name for name in tensors)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    assert group["weights"]["strategy"] == "channel"
    assert group["input_activations"]["strategy"] == "token"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "FBGEMM"])
@torch.no_grad()
def test_an_adopted_checkpoint_is_saved_again(package, quantize_, tmp_path, name):
    write(wide_llama(), tmp_path / "theirs", name)
    with package.models.fp8_checkpoints():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype="float32").eval()
    quantize_(model)
    loaded = save_and_load(package, model, tmp_path / "ours")
    quantize_(loaded)
    ids = tokens(1, 7)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    for one, other in zip(model.modules(), loaded.modules(), strict=True):
        if isinstance(one, package.models.FP8Linear):
            assert one.activation_scheme == other.activation_scheme
            assert one.scale_fmt == other.scale_fmt


def test_what_one_file_cannot_hold_is_refused(package, quantize_, tmp_path):
    write(wide_llama(), tmp_path, "FBGEMM")
    with package.models.fp8_checkpoints():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    quantize_(model)
    with pytest.raises(ValueError, match="bound on its input's scale, as FBGEMM does"):
        model.save_pretrained(tmp_path / "again")


@torch.no_grad()
def test_powers_of_two_are_saved_where_a_file_can_say_so(package, quantize_, tmp_path):
    write(wide_llama(), tmp_path, "finegrained, ue8m0")
    with package.models.fp8_checkpoints():
        model, other = (AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    quantize_(model)
    model.save_pretrained(tmp_path / "again")
    described = json.loads((tmp_path / "again" / "config.json").read_text())
    assert described["quantization_config"]["scale_fmt"] == "ue8m0"
    up = model.model.layers[0].mlp.up_proj
    up.weight_scale_inv[0, 0] *= 1.5
    with pytest.raises(ValueError, match=r"gate_up_proj.weight_scale_inv must be powers of two"):
        model.save_pretrained(tmp_path / "rounded")
    up.weight_scale_inv[0, 0] /= 1.5
    # One linear of another layout, and the file is compressed-tensors.
    quantize_(other, lm_head=True)
    with pytest.raises(ValueError, match=r"powers of two, and compressed-tensors cannot say so"):
        other.save_pretrained(tmp_path / "mixed")


def test_a_state_dict_does_not_show_fusing(quantize_):
    fused, unfused = tiny_llama(), tiny_llama()
    quantize_(fused)
    quantize_(unfused, fuse=False)
    assert fused.state_dict().keys() == unfused.state_dict().keys()
    unfused.load_state_dict(fused.state_dict())
    ids = tokens(1, 7)
    with torch.no_grad():
        assert torch.equal(unfused(ids).logits, fused(ids).logits)
    state = fused.state_dict()
    weight = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(RuntimeError, match=f"{weight} must be FP8, got torch.float32"):
        unfused.load_state_dict({**state, weight: state[weight].float()})
    del state[weight]
    with pytest.raises(RuntimeError, match=f"Missing key.*{weight}"):
        unfused.load_state_dict(state)


def test_fnuz_weights_are_saved_as_ocp(package, quantize_, tmp_path):
    ocp = wide_llama()
    quantize_(ocp)
    moved = wide_llama()
    quantize_(moved, fp8_dtype=torch.float8_e4m3fnuz)
    assert moved.model.layers[0].mlp.down_proj.weight.dtype == torch.float8_e4m3fnuz
    moved.load_state_dict(ocp.state_dict())
    for name, tensor in moved.state_dict().items():
        expected = ocp.state_dict()[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.float(), expected.float()), name
