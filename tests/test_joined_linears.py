"""Linears of one input that become one: which may, and that nothing of a part is lost."""

import copy

import pytest
import torch
from test_families import tiny
from tiny_checkpoints import by_block, by_channel, by_tensor
from tiny_models import tiny_llama, tokens
from torch import nn

GATE_UP, QKV = "model.layers.0.mlp.gate_up_proj", "model.layers.0.self_attn.qkv_proj"
BY = {"tensor": by_tensor, "channel": by_channel, "block": by_block}


def quantised(package, model, by=None):
    """With an ``FP8Linear`` each, none joined; ``by`` says how weights are scaled."""
    package.models.quantize_model_(model, activations="dynamic", fuse=False)
    for linear in model.modules() if by else ():
        if isinstance(linear, package.models.FP8Linear):
            q, scale = BY[by](torch.randn(linear.weight.shape))
            scale = scale.reshape(1) if scale.dim() == 0 else scale
            linear.weight.data = q
            linear.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    return model


def llama(package, by=None, **changes):
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}  # fmt: skip
    return quantised(package, tiny_llama(**{**sizes, **changes}), by)


def static(scale):
    def change(linear):
        linear.activation_scheme = "static"
        linear.activation_scale = nn.Parameter(torch.tensor([scale]), requires_grad=False)

    return change


def set_to(name, value):
    return lambda linear: setattr(linear, name, value)


def with_bias(linear):
    linear.bias = nn.Parameter(torch.randn(linear.out_features), requires_grad=False)


# What linears may have otherwise than their neighbour: one's, the other's, and what is looked at.
DIFFERENCES = {
    "a static scale": (static(0.5), static(0.25), "activation_scale"),
    "how inputs are taken": (static(0.5), set_to("activation_scheme", "none"), "activation_scheme"),
    "inputs as they are": (set_to("activation_scheme", "none"), lambda _: None,
                           "activation_scheme"),
    "a bound": (set_to("scale_ub", 1200.0), lambda _: None, "scale_ub"),
    "powers of two": (set_to("scale_fmt", "ue8m0"), lambda _: None, "scale_fmt"),
    "a bias": (with_bias, lambda _: None, "bias"),
    "processes": (set_to("process_group", "some"), lambda _: None, "process_group"),
    "a dialect": (lambda linear: linear.convert_dialect(torch.float8_e4m3fnuz), lambda _: None,
                  "weight"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize("first", [True, False])
def test_linears_that_differ_stay_apart(package, what, first):
    model = llama(package)
    one, other, _ = DIFFERENCES[what]
    mlp = model.model.layers[0].mlp
    parts = (mlp.gate_proj, mlp.up_proj) if first else (mlp.up_proj, mlp.gate_proj)
    one(parts[0]), other(parts[1])
    before = copy.deepcopy(mlp.state_dict())
    assert list(package.models.quantize_model_(model).fused) == [QKV]
    after = mlp.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].float(), tensor.float()), name


@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_all_have_the_joined_one_has(package, what):
    model = llama(package)
    one, _, name = DIFFERENCES[what]
    mlp = model.model.layers[0].mlp
    linears = [mlp.gate_proj, mlp.up_proj]
    for linear in linears:
        one(linear)
    assert set(package.models.quantize_model_(model).fused) == {QKV, GATE_UP}
    joined = getattr(mlp.gate_up_proj, name)
    if name in ("bias", "weight"):
        parts = [getattr(linear, name) for linear in linears]
        assert joined.dtype == parts[0].dtype
        assert torch.equal(joined.float(), torch.cat([part.float() for part in parts]))
    else:
        assert joined == getattr(linears[0], name)
    for part in (mlp.gate_proj, mlp.up_proj):
        if name not in ("bias", "weight"):
            assert getattr(part, name) == joined


def values(package, linear):
    return package.reference.dequantize(linear.weight, linear.weight_scale_inv, 128)


@pytest.mark.parametrize("by", BY)
@torch.no_grad()
def test_each_part_keeps_its_own_scales(package, by):
    """Of a tensor, a channel, a block; and the model computes what it did."""
    model = llama(package, by)
    names = [n for n, m in model.named_modules() if isinstance(m, package.models.FP8Linear)]
    before = {name: values(package, model.get_submodule(name)) for name in names}
    ids = tokens(1, 7)
    logits = model(ids).logits
    assert set(package.models.quantize_model_(model).fused) == {QKV, GATE_UP}
    for name in names:
        assert torch.equal(values(package, model.get_submodule(name)), before[name]), name
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-3)


def test_one_scale_of_all_stays_one(package):
    model = llama(package, "tensor")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight_scale_inv.data = mlp.gate_proj.weight_scale_inv.data.clone()
    package.models.quantize_model_(model)
    assert mlp.gate_up_proj.weight_scale_inv.shape == (1,)
    assert model.model.layers[0].self_attn.qkv_proj.weight_scale_inv.shape == (1024, 1)


@pytest.mark.parametrize("inner, joined", [(192, False), (256, True), (320, False)])
def test_a_block_lies_in_one_linear(package, inner, joined):
    """Gate's last block would reach into up."""
    model = llama(package, "block", intermediate_size=inner)
    mlp = model.model.layers[0].mlp
    before = [values(package, linear) for linear in (mlp.gate_proj, mlp.up_proj)]
    assert (GATE_UP in package.models.quantize_model_(model).fused) == joined
    for linear, was in zip((mlp.gate_proj, mlp.up_proj), before, strict=True):
        assert torch.equal(values(package, linear), was)


@pytest.mark.parametrize("by", ["tensor", "channel"])
def test_blocks_are_not_joined_with_others(package, by):
    model = llama(package, by)
    up = model.model.layers[0].mlp.up_proj
    q, scale = by_block(torch.randn(up.weight.shape))
    up.weight.data, up.weight_scale_inv = q, nn.Parameter(scale, requires_grad=False)
    assert list(package.models.quantize_model_(model).fused) == [QKV]


@torch.no_grad()
def test_the_last_part_may_end_within_a_block(package, tmp_path):
    """Latent keys and values of 48 rows: their scales are a block's, joined, saved and loaded."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "q_lora_rank": 128,
             "first_k_dense_replace": 1}  # fmt: skip
    model = quantised(package, tiny("deepseek_v3", **sizes), "block")
    attention = model.model.layers[0].self_attn
    before = values(package, attention.kv_a_proj_with_mqa)
    assert attention.kv_a_proj_with_mqa.weight.shape == (48, 256)
    stored = attention.state_dict()
    report = package.models.quantize_model_(model)
    assert "model.layers.0.self_attn.qkv_a_proj" in report.fused
    assert torch.equal(values(package, attention.kv_a_proj_with_mqa), before)
    for name, tensor in attention.state_dict().items():
        assert torch.equal(tensor.float(), stored[name].float()), name
    model.save_pretrained(tmp_path)
    with package.models.fp8_checkpoints():
        loaded = type(model).from_pretrained(tmp_path)
    package.models.quantize_model_(loaded)
    attention = loaded.model.layers[0].self_attn
    assert torch.equal(values(package, attention.kv_a_proj_with_mqa), before)


def test_static_scales_have_the_weights_dialect(package):
    """Written by a model in one, read by a model in the other, joined or not: a file holds OCP's,
    and a scale doubles where FP8's numbers halve."""
    models = [llama(package) for _ in range(2)]
    for model in models:
        for linear in model.modules():
            if isinstance(linear, package.models.FP8Linear):
                static(0.5)(linear)
    fnuz, ocp = models
    for linear in fnuz.modules():
        if isinstance(linear, package.models.FP8Linear):
            linear.convert_dialect(torch.float8_e4m3fnuz)
    package.models.quantize_model_(fnuz)
    package.models.quantize_model_(ocp)
    assert fnuz.model.layers[0].mlp.gate_up_proj.weight.dtype == torch.float8_e4m3fnuz
    assert fnuz.model.layers[0].mlp.gate_up_proj.activation_scale.item() == 1.0
    assert fnuz.model.layers[0].mlp.down_proj.activation_scale.item() == 1.0
    state = fnuz.state_dict()
    scales = [tensor.item() for name, tensor in state.items() if "activation_scale" in name]
    assert scales == [0.5] * 7
    ocp.load_state_dict(state)
    fnuz.load_state_dict(ocp.state_dict())
    assert ocp.model.layers[0].mlp.gate_up_proj.activation_scale.item() == 0.5
    assert fnuz.model.layers[0].mlp.gate_up_proj.activation_scale.item() == 1.0
    for name, tensor in fnuz.state_dict().items():
        assert torch.equal(tensor.float(), ocp.state_dict()[name].float()), name
