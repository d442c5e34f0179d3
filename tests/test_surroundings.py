"""What surrounds a model: accelerate, tensor parallelism, peft, dtypes, failures."""

import copy
import functools
import os
import socket
import subprocess
import sys

import peft
import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from project import REPO_ID, ROOT
from test_families import tiny
from tiny_models import dequantized, tiny_llama, tokens
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def run_kernelized(package, device):
    mapping = package.layers.kernel_mapping()

    def kernelized(model, mode=Mode.INFERENCE):
        with use_kernel_mapping(mapping, inherit_mapping=False):
            return kernelize(model, mode=mode)

    return kernelized


@pytest.fixture
def quantize_(package):
    return package.models.quantize_model_


# ---- accelerate


@pytest.mark.parametrize("offloaded", ["disk", "cpu"])
@torch.no_grad()
def test_offloaded_layers_stay_and_the_rest_is_served(
    package, quantize_, run_kernelized, device, tmp_path, offloaded
):
    tiny_llama().save_pretrained(tmp_path / "model")
    load = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path / "model")
    ids = tokens(2, 7, device)
    here = str(ids.device)  # with its number
    whole = load(dtype=torch.float32).to(device).eval()
    quantize_(whole, skip=["*.1.*"])
    run_kernelized(whole)
    if offloaded == "disk":
        parts = {"model.embed_tokens": here, "model.rotary_emb": here, "model.layers.0": here,
                 "model.layers.1": "disk", "model.norm": "disk", "lm_head": here}  # fmt: skip
        model = load(dtype=torch.float32, device_map=parts, offload_folder=tmp_path / "off").eval()
    else:
        from accelerate import cpu_offload

        model = load(dtype=torch.float32).to(device).eval()
        cpu_offload(model.model.layers[1], execution_device=here)
        cpu_offload(model.model.norm, execution_device=here)
    report = quantize_(model)
    assert len(report.converted) == 7
    assert report.skipped["model.layers.1.mlp.up_proj"] == "its weight is offloaded by accelerate"
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    run_kernelized(model)
    counts = package.models.kernelized_layers(model)
    assert counts["LlamaDecoderLayer", "LlamaDecoderLayer"] == 1
    torch.testing.assert_close(model(ids).logits, whole(ids).logits)
    assert model.model.norm.weight.device.type == "meta", "and its weight is put away again"


# ---- tensor parallelism

TENSOR_PARALLEL = """
import sys, torch, torch.distributed as dist
from kernels import Mode, get_kernel, kernelize, use_kernel_mapping
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
folder, activations = sys.argv[1:]
dist.init_process_group("gloo")
torch.set_num_threads(1)
package = get_kernel("{repo}", version=1, backend="cpu")
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).eval()
report = package.models.quantize_model_(model, activations=activations)
with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
    kernelize(model, mode=Mode.INFERENCE, device="cpu")
expected = load_file(folder + "/expected")
with torch.no_grad():
    logits = model(expected["ids"]).logits
counts = package.models.kernelized_layers(model)
values = all(
    torch.equal(
        model.get_submodule(name).weight.float(),
        expected[name].chunk(2, dim)[dist.get_rank()],
    )
    for name, dim in (("model.layers.0.self_attn.k_proj", 0), ("model.layers.1.mlp.down_proj", 1))
)
try:
    model.state_dict()
    saved = "saved"
except RuntimeError as refusal:
    saved = "one process's share" in str(refusal)
error = (logits - expected["logits"]).abs().mean() / expected["logits"].abs().mean()
report = [len(report.converted), counts.get(("LlamaDecoderLayer", "LlamaDecoderLayer"))]
print("RESULT", dist.get_rank(), report, values, saved, f"{{error:.6f}}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["none", "dynamic"])
@torch.no_grad()
def test_two_processes_equal_one(cpu_package, tmp_path, activations):
    """tp_plan="auto": each process quantises its share, to the same FP8 values as the whole."""
    from safetensors.torch import save_file

    tiny_llama().save_pretrained(tmp_path)
    one = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    cpu_package.models.quantize_model_(one, activations=activations)
    ids = tokens(2, 7)
    values = {
        name: one.get_submodule(name).weight.detach().float().clone()
        for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
    }
    with use_kernel_mapping(cpu_package.layers.kernel_mapping(), inherit_mapping=False):
        kernelize(one, mode=Mode.INFERENCE, device="cpu")
    save_file({"ids": ids, "logits": one(ids).logits, **values}, tmp_path / "expected")
    script = tmp_path / "run.py"
    script.write_text(TENSOR_PARALLEL.format(repo=REPO_ID))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), activations],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "",
                 "LOCAL_KERNELS": f"{REPO_ID}={ROOT}"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for rank, output in enumerate(outputs):
        result = next((line for line in output.splitlines() if line.startswith("RESULT")), output)
        expected, _, error = result.rpartition(" ")
        assert expected == f"RESULT {rank} [14, 2] True True"
        # Inputs of what divides K are quantised share by share, with a scale of each share's own.
        assert float(error) < (1e-5 if activations == "none" else 0.1)


# ---- peft


@pytest.mark.parametrize("first", ["quantise", "adapt"])
def test_lora(package, quantize_, run_kernelized, device, first):
    """Adapters stay in 16 bits and train, the linears under them are FP8 and do not."""
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(3)
    model = tiny_llama().to(device)
    if first == "quantise":
        quantize_(model)
        model = peft.get_peft_model(model, config).eval()
    else:
        model = peft.get_peft_model(model, config).eval()
        report = quantize_(model)
        adapters = [name for name, why in report.skipped.items() if why == "adapter"]
        assert len(adapters) == 8 and len(report.converted) == 14
    layer = model.base_model.model.model.layers[0]
    assert layer.self_attn.q_proj.lora_A["default"].weight.dtype == torch.float32
    assert layer.self_attn.q_proj.base_layer.weight.dtype == torch.float8_e4m3fn
    ids = tokens(2, 5, device)
    with torch.no_grad():
        expected = model(ids).logits
        with model.disable_adapter():
            assert (model(ids).logits - expected).abs().max() > 0.1
    run_kernelized(model)
    assert package.models.kernelized_layers(model)
    with torch.no_grad():
        actual = model(ids).logits
    close = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    assert close.min() > 0.99
    model.train()
    model(ids, labels=ids).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    assert all(parameter.grad.abs().sum() > 0 for parameter in trained.values())


@torch.no_grad()
def test_lora_on_a_kernelized_model(package, quantize_, run_kernelized, device):
    """The decoder layer, replaced already, sees that something has come between."""
    model = tiny_llama().to(device)
    quantize_(model)
    own = copy.deepcopy(model)
    run_kernelized(model)
    config = peft.LoraConfig(target_modules=["v_proj", "gate_proj"], r=4, init_lora_weights=False)
    logits = []
    ids = tokens(2, 5, device)
    for each in (own, model):
        torch.manual_seed(3)
        logits.append(peft.get_peft_model(each, config).eval()(ids).logits)
    close = torch.nn.functional.cosine_similarity(*logits, dim=-1)
    assert close.min() > 0.99


# ---- dtypes


@torch.no_grad()
def test_float32_models_with_16_bit_weights_alone(package, quantize_, run_kernelized, device):
    """In float32 all the way: the kernels multiply 16 bits, so an input is three of those."""
    model = tiny_llama().to(device)
    quantize_(model, activations="none")
    exact = dequantized(package, model).to(device).double()
    for _ in range(2):
        for length in (1, 40):
            ids = tokens(2, length, device)
            expected = exact(ids).logits
            torch.testing.assert_close(model(ids).logits.double(), expected, rtol=1e-4, atol=1e-4)
        run_kernelized(model)


@pytest.mark.parametrize("activations", ["none", "dynamic"])
@torch.no_grad()
def test_autocast(package, quantize_, run_kernelized, device, activations):
    model = tiny_llama().to(device)
    quantize_(model, activations=activations)
    ids = tokens(2, 9, device)
    exact = model(ids).logits
    run_kernelized(model)
    with torch.autocast(device.type, torch.bfloat16):
        actual = model(ids).logits
    close = torch.nn.functional.cosine_similarity(actual.float(), exact, dim=-1)
    assert close.min() > 0.98


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_a_default_device_that_is_not_the_models(
    package, quantize_, run_kernelized, device, family
):
    """Nothing of a model is made on it, nor asked of it: on meta there are no values."""
    answers, ids = [], tokens(1, 5, device)
    for default in (device, torch.device("meta")):
        torch.manual_seed(3)
        model = (tiny_llama() if family == "llama" else tiny(family)).to(device)
        with default:
            quantize_(model, activations="dynamic")
            package.models.use_attention(model)
            run_kernelized(model)
            package.models.use_decode_step(model)
        said = model.generate(
            ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append((said, package.models.kernelized_layers(model)))
    assert torch.equal(answers[0][0], answers[1][0]) and answers[0][1] == answers[1][1]


@torch.no_grad()
def test_to_empty(package, quantize_):
    """A quantised model without data gets memory, then data."""
    model = tiny_llama()
    quantize_(model)
    state = model.state_dict()
    hollow = copy.deepcopy(model).to("meta")
    linear = hollow.model.layers[0].mlp.down_proj
    assert linear.weight.device.type == "meta" and linear.weight.dtype == torch.float8_e4m3fn
    hollow.to_empty(device="cpu")
    assert linear.weight.dtype == torch.float8_e4m3fn
    assert linear.weight_scale_inv.dtype == torch.float32
    hollow.load_state_dict(state)
    hollow.model.rotary_emb = model.model.rotary_emb  # its buffers are in no state dict
    ids = tokens(1, 5)
    assert torch.equal(hollow(ids).logits, model(ids).logits)


# ---- heads, bare linears, failures


def test_heads_stay_unless_asked_for(package, quantize_):
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=64,
                         num_attention_heads=4, num_labels=3, pad_token_id=0)  # fmt: skip
    llama = LlamaForSequenceClassification(config)
    assert quantize_(llama).skipped == {"score": "output head"}
    assert isinstance(llama.score, nn.Linear) and llama.score.weight.dtype == torch.float32
    assert quantize_(llama, lm_head=True).converted == ("score",)
    config = BertConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=64,
                        num_attention_heads=4)  # fmt: skip
    bert = BertForSequenceClassification(config)
    report = quantize_(bert)
    assert report.skipped == {"classifier": "output head"}
    assert "bert.encoder.layer.0.attention.self.query" in report.converted


def test_a_bare_linear_is_refused(package, quantize_):
    linear = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"a bare Linear.*put it into an nn.Sequential"):
        quantize_(linear)
    assert quantize_(nn.Sequential(linear)).converted == ("0",)


def test_after_a_failure_the_model_is_as_it_was(package, quantize_, monkeypatch):
    model = tiny_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = {name: type(module) for name, module in model.named_modules()}
    down = model.model.layers[1].mlp.down_proj
    down._parameters["weight"] = nn.Parameter(down.weight.detach().to(torch.float32))
    down.weight.data = down.weight.data.new_empty(96, 272).fill_(1.0)
    before["model.layers.1.mlp.down_proj.weight"] = down.weight.detach().clone()
    linear = sys.modules[quantize_.__module__]
    original, calls = linear.quantize_weight, []

    def fails_on_the_last(weight, *args, **kwargs):
        calls.append(tuple(weight.shape))
        if (weight == 1.0).all():
            raise torch.OutOfMemoryError("no memory is left")
        return original(weight, *args, **kwargs)

    monkeypatch.setattr(linear, "quantize_weight", fails_on_the_last)
    with pytest.raises(
        RuntimeError, match=r"layers.1.mlp.down_proj cannot be quantised.*as it was"
    ):
        quantize_(model)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert not hasattr(model.config, "quantization_config")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    report = quantize_(model, skip=["model.layers.1.mlp.down_proj"])
    assert len(report.converted) == 13


def test_linears_that_are_more_than_linears_stay(package, quantize_):
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.Linear(8, 8, device="meta"),
        nn.Linear(8, 8),
    )
    model[2].forward = lambda x: x
    report = quantize_(model)
    assert report.converted == ()
    assert report.skipped == {
        "0": "is a ParametrizedLinear",
        "1": "its weight has no data, on the meta device",
        "2": "its forward was replaced",
    }


@pytest.mark.parametrize("given", [str, lambda pattern: [pattern], lambda pattern: iter([pattern])])
def test_what_to_skip_may_be_one_pattern(package, quantize_, given):
    """Linears and experts, which both read it."""
    report = quantize_(tiny_llama(), skip=given("*.down_proj"))
    assert len(report.converted) == 12
    names = {name.rpartition(".")[2] for name, why in report.skipped.items() if "skip" in why}
    assert names == {"down_proj"}


def test_experts_are_skipped_by_one_pattern(package, quantize_):
    report = quantize_(tiny("mixtral"), skip="*.experts")
    assert set(report.experts.values()) == {"stays: asked to skip"} and report.converted
    report = quantize_(tiny("mixtral"), skip=iter(["*.experts"]))
    assert set(report.experts.values()) == {"stays: asked to skip"}
