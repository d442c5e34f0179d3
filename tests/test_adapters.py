"""What changes weights in FP8: peft's adapters merged into them and taken out again, and heads that
transformers resizes."""

import copy
import io

import peft
import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_models import tiny_llama, tokens
from torch import nn


@pytest.fixture
def kernelized(package):
    def replace(model):
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            return kernelize(model, mode=Mode.INFERENCE)

    return replace


# ---- merging

LORA = {"r": 2, "init_lora_weights": False}
CONFIGS = {
    "lora": lambda names: peft.LoraConfig(target_modules=names, **LORA),
    "lora with biases": lambda names: peft.LoraConfig(target_modules=names, lora_bias=True, **LORA),
    "dora": lambda names: peft.LoraConfig(target_modules=names, use_dora=True, **LORA),
    "ia3": lambda names: peft.IA3Config(
        target_modules=names, feedforward_modules=[], init_ia3_weights=False
    ),
    "oft": lambda names: peft.OFTConfig(target_modules=names, oft_block_size=8, init_weights=False),
}
NAMES = ["q_proj", "v_proj", "down_proj"]


def weights(package, model):
    """What each FP8 linear means, by the end of its name: peft puts base_layer there."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (package.models.FP8Linear, package.models.FP8LinearPart)):
            values = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
            found[name.partition("layers.")[2].removesuffix(".base_layer")] = values
    return found


def use_other_codes(package, model):
    """Weights as calibrated checkpoints have them: their greatest code is not FP8's greatest, so
    quantised once more they have other bits."""
    for module in model.modules():
        if isinstance(module, package.models.FP8Linear):
            module.weight.copy_(module.weight.float() * 0.7)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_an_adapter_is_merged_and_taken_out(package, kernelized, kind, safe):
    """Quantised first, as QLoRA is; the other linears, a joined one's other parts too, stay."""
    torch.manual_seed(5)
    model, ids = tiny_llama(attention_bias="biases" in kind), tokens(2, 7)
    names = NAMES[:2] if "biases" in kind else NAMES
    package.models.quantize_model_(model)
    before = weights(package, model)
    adapted = peft.get_peft_model(model, CONFIGS[kind](names)).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.mul_(0.3)
    expected, plain = adapted(ids).logits, None
    with adapted.disable_adapter():
        plain = adapted(ids).logits
    changed = (expected - plain).norm()
    assert changed > 0.02 * plain.norm()
    adapted.merge_adapter(safe_merge=safe)
    merged = weights(package, adapted)
    for name, values in merged.items():
        same = torch.equal(values, before[name])
        whole = name.endswith(("qkv_proj", "gate_up_proj"))
        assert same == (name.rpartition(".")[2] not in names) or whole, name
    assert (adapted(ids).logits - expected).norm() < 0.4 * changed
    adapted.unmerge_adapter()
    for name, values in weights(package, adapted).items():
        assert (values - before[name]).norm() < 0.06 * before[name].norm(), name
    again = adapted.merge_and_unload(safe_merge=safe)
    assert isinstance(again.model.layers[0].self_attn.q_proj, package.models.FP8LinearPart)
    assert (again(ids).logits - expected).norm() < 0.6 * changed
    assert (kernelized(again)(ids).logits - expected).norm() < 0.6 * changed
    assert package.models.kernelized_layers(again)[("LlamaDecoderLayer",) * 2] == 2


@torch.no_grad()
def test_a_model_that_had_its_adapters_first(package):
    model, ids = tiny_llama(), tokens(2, 7)
    adapted = peft.get_peft_model(model, CONFIGS["lora"](NAMES)).eval()
    package.models.quantize_model_(adapted)
    expected = adapted(ids).logits
    merged = adapted.merge_and_unload()
    assert (merged(ids).logits - expected).norm() < 0.2 * expected.norm()
    assert merged.model.layers[0].mlp.down_proj.weight.dtype == torch.float8_e4m3fn


def dequantized(package, model):
    """The model with linears in float32 that mean what those in FP8 do."""
    for name, module in list(model.named_modules()):
        if isinstance(module, (package.models.FP8Linear, package.models.FP8LinearPart)):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            values = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
            linear.weight.data = values.float()
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("order", ["quantised first", "adapted first"])
def test_dora_reads_what_fp8_weights_mean(package, order):
    """Results and gradients are those of the same adapters on linears in float32."""
    model, ids = tiny_llama(), tokens(2, 7)
    config = CONFIGS["dora"](NAMES)
    package.models.quantize_model_(model)
    exact = peft.get_peft_model(dequantized(package, copy.deepcopy(model)), config)
    if order == "adapted first":
        plain = peft.get_peft_model(dequantized(package, model), config)
        package.models.quantize_model_(plain)
        model = plain
    else:
        model = peft.get_peft_model(model, config)
    own = dict(model.named_parameters())
    trained = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    assert any("magnitude" in name for name in trained)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            own[name].copy_(parameter)
    logits = [each(ids).logits for each in (model, exact)]
    # Quantised again, weights in FP8 of a scale of their own round once more, to themselves.
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    weights_of_logits = torch.randn_like(logits[0])
    for each in logits:
        (each * weights_of_logits).sum().backward()
    for name, parameter in trained.items():
        actual, expected = own[name].grad, parameter.grad
        assert (actual - expected).norm() <= 1e-3 * expected.norm(), name


READERS = {
    "HRAConfig": {}, "HiraConfig": {}, "DeloraConfig": {}, "OSFConfig": {}, "PeanutConfig": {},
    "FrodConfig": {}, "LNTuningConfig": {}, "SupertuningConfig": {}, "TinyLoraConfig": {},
    "PsoftConfig": {}, "RandLoraConfig": {}, "ShiraConfig": {"r": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_adapters_that_read_the_codes_of_fp8_are_refused(package, name):
    model = tiny_llama()
    package.models.quantize_model_(model)
    config = getattr(peft, name)(target_modules=NAMES, **READERS[name])
    with pytest.raises(TypeError, match=r"reads the weights of .*got a linear in FP8"):
        peft.get_peft_model(model, config)


@torch.no_grad()
def test_what_nothing_is_merged_into_keeps_its_bits(package):
    model = tiny_llama()
    package.models.quantize_model_(model)
    use_other_codes(package, model)
    state = copy.deepcopy(model.state_dict())
    config = peft.LoraConfig(target_modules=NAMES, r=2)  # zeros yet
    merged = peft.get_peft_model(model, config).merge_and_unload().state_dict()
    assert all(torch.equal(merged[key].float(), state[key].float()) for key in state)


def layouts(package, w, dialect):
    """An FP8 linear of each form of scales, near w."""
    largest = 448 if dialect == torch.float8_e4m3fn else 240
    n, k = w.shape
    blocks = w.view(n // 128, 128, k // 128, 128).abs().amax((1, 3)) / largest
    spread = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {
        "one": ((w / (w.abs().max() / largest)).to(dialect), (w.abs().max() / largest).view(1)),
        "rows": package.reference.quantize_fp8(w, fp8_dtype=dialect),
        "blocks": ((w / spread).clamp(-largest, largest).to(dialect), blocks),
    }


@pytest.mark.parametrize("dialect", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("form", ["one", "rows", "blocks"])
@pytest.mark.parametrize("joined", [True, False])
@torch.no_grad()
def test_scales_keep_their_form(package, form, joined, dialect):
    models = package.models
    q, scale = layouts(package, torch.randn(256, 256), dialect)[form]
    fused = models.FP8Linear(q, scale.clone())
    part = models.FP8LinearPart(fused, 128, 256) if joined else fused
    before = package.reference.dequantize(q, scale, 128)
    own = slice(128, 256) if joined else slice(0, 256)
    model = nn.Sequential(part, nn.Linear(2, 2))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], **LORA))
    delta = adapted.base_model.model[0].get_delta_weight("default").double()
    adapted.merge_and_unload()
    assert fused.weight.dtype == dialect and fused.weight_scale_inv.shape == scale.shape
    after = package.reference.dequantize(fused.weight, fused.weight_scale_inv, 128)
    wanted = before.clone()
    wanted[own] += delta
    largest = wanted[own].abs().amax(0 if form == "one" else 1, keepdim=True).amax()
    # Half a step of FP8's three bits, and of its least number beside the greatest of a scale.
    assert ((after - wanted).abs() <= wanted.abs() / 15 + largest / 100000).all()
    others = torch.ones(256, dtype=torch.bool)
    others[own] = False
    if form != "one":
        assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("why", ["share", "offloaded"])
@torch.no_grad()
def test_what_cannot_be_merged_says_so(package, why):
    model = tiny_llama()
    package.models.quantize_model_(model)
    down = model.model.layers[0].mlp.down_proj
    adapted = peft.get_peft_model(model, CONFIGS["lora"](["down_proj"]))
    if why == "share":
        down.is_shard = True
    else:
        down.to("meta")
    found = {
        "share": "must be whole to be read or changed",
        "offloaded": "must be on a device to be read or changed",
    }
    with pytest.raises(RuntimeError, match=found[why]):
        adapted.merge_adapter()
    layer = adapted.base_model.model.model.layers[0].mlp.down_proj
    assert layer.base_layer is down, "and is as it was"


# ---- resizing


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [150, 160, 173])
@torch.no_grad()
def test_a_head_in_fp8_is_resized(package, kernelized, tied, size, mean):
    model, ids = tiny_llama(tie_word_embeddings=tied), tokens(2, 5, vocabulary=150)
    package.models.quantize_model_(model, lm_head=True)
    use_other_codes(package, model)
    kernelized(model)
    expected = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=mean)
    head, kept = model.lm_head, min(size, 160)
    assert head.weight.dtype == torch.float8_e4m3fn and head.weight.shape == (size, 96)
    assert head.out_features == size == model.config.vocab_size
    logits = model(ids).logits
    assert logits.shape[-1] == size and logits.isfinite().all()
    assert torch.equal(logits[..., :kept], expected[..., :kept])
    assert ("FP8Linear", "FP8Linear") in package.models.kernelized_layers(model)


@torch.no_grad()
def test_a_pickled_models_head_is_resized(package):
    """In a process that has not seen its class quantised yet."""
    model = tiny_llama()
    package.models.quantize_model_(model, lm_head=True)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    del type(model)._get_resized_lm_head
    buffer.seek(0)
    torch.load(buffer, weights_only=False).resize_token_embeddings(170)
