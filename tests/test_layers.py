"""The layers, through kernelize as users reach them, against the reference."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from compare import assert_close, assert_product_close
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from kernels.layer.layer import _validate_layer
from project import ROOT
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

ROWS = (1, 5, 64, 100)  # 100: beyond skinny_gemm's 64


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture(autouse=True)
def without_gradients():
    """The layers have none: test_gradients.py."""
    with torch.no_grad():
        yield


@pytest.fixture
def mapping(package):
    return package.layers.kernel_mapping()


@pytest.fixture
def run_kernelized(mapping, device):
    """Kernelizes a module and moves it to the device."""

    def kernelized(module, mode=Mode.INFERENCE):
        with use_kernel_mapping(mapping, inherit_mapping=False):
            return kernelize(module.eval().to(device), mode=mode)

    return kernelized


@pytest.fixture
def register_layer(monkeypatch):
    """``replace_kernel_forward_from_hub`` for one test."""

    def known(cls, layer_name):
        monkeypatch.setattr(cls, "kernel_layer_name", layer_name, raising=False)
        monkeypatch.setattr(cls, "kernel_condition", staticmethod(lambda _: True), raising=False)

    return known


def runs(module, package, layer):
    return module.forward.__func__ is getattr(package.layers, layer).forward


def exact_product(package, q, scale, w, scale_w):
    """In float64; and the dequantised operands."""
    reference = package.reference
    a, w = reference.dequantize(q, scale, 1), reference.dequantize(w, scale_w, 128)
    return a @ w.t(), (a, w)


def assert_linear_close(package, actual, x, linear, scale_w, bias=None, **quantization):
    """``linear(x)`` against the float64 product of operands quantised by the reference."""
    q, scale = package.reference.quantize_fp8(
        x.flatten(0, -2), fp8_dtype=linear.weight.dtype, **quantization
    )
    exact, operands = exact_product(package, q, scale, linear.weight, scale_w)
    exact = exact if bias is None else exact + bias.double()
    assert actual.shape == (*x.shape[:-1], linear.weight.shape[0]) and actual.dtype == x.dtype
    # Plain quantisation has one definition for every backend, so the operands are the same bits:
    # what remains is the rounding of the result and the order of a float32 sum.
    a, w = operands
    error = (actual.flatten(0, -2).double() - exact).abs()
    product = a.abs() @ w.abs().t()
    allowed = torch.finfo(x.dtype).eps * exact.abs() + 1e-6 * product
    path = package.fp8_linear_path(len(q), linear.weight, scale_w, scale)
    if path == "gemm" and x.is_cuda:
        # FP8 tensor cores add up products in about 14 bits; every 128 of them go to float32 sums.
        allowed += 2**-14 * product
    if path == "scaled_mm":
        # The library sums FP8 products in about 14 bits.
        allowed += 2**-14 * product
    assert (error <= allowed).all(), (error - allowed).max()


# ---- what kernelize requires --------------------------------------------------------------------


def layers_of(mapping):
    """What the mapping replaces: name -> layer of each device."""
    return {name: {d: repo.load() for d, repo in devices.items()}
            for name, devices in mapping.items() if devices}  # fmt: skip


def test_mapping_names_every_layer_for_every_backend(package, mapping):
    replaced = layers_of(mapping)
    for name, devices in replaced.items():
        assert set(devices) == {"cpu", "cuda", "rocm"}, name
    defined = {
        value
        for value in vars(package.layers).values()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    assert defined == {layer for devices in replaced.values() for layer in devices.values()}


def test_mapping_through_a_repository_of_the_client(package, mapping):
    build = Path(package.__file__).parent
    looked_up = package.layers.kernel_mapping(LocalLayerRepository, build)
    assert layers_of(looked_up) == layers_of(mapping)


def test_mapping_knows_every_name_of_transformers(mapping):
    """Or kernelize would warn of each module: of 64 in a model of 32 layers, and of twice as many
    in one of states, whose functions are modules with a name too."""
    names = set()
    for path in Path(transformers.__file__).parent.rglob("*.py"):
        names |= set(re.findall(r"use_kernel_\w+_from_hub\w*\(\s*\"(\w+)\"", path.read_text()))
    assert len(names) > 10 and names <= set(mapping), names - set(mapping)


def test_layers_are_pure(package, mapping):
    replaced = {
        "RMSNorm": LlamaRMSNorm,
        "RMSNormZeroCentered": Qwen3_5RMSNorm,
        "FP8Linear": FP8Linear,
        "FP8LinearPart": package.models.FP8LinearPart,
        "FbgemmFp8Linear": FbgemmFp8Linear,
        "LlamaMLP": LlamaMLP,
        "SwiGLUMLP": LlamaMLP,
        "LlamaDecoderLayer": LlamaDecoderLayer,
        "GemmaDecoderLayer": Gemma2DecoderLayer,
        "Experts": package.models.Experts,
        "Llama4TextMoe": Llama4TextMoe,
        "TopKRouter": Qwen3MoeTopKRouter,
        "TopKRouterGivenBias": MiniMaxM2TopKRouter,
    }
    for name, devices in layers_of(mapping).items():
        layer = devices["cpu"]
        if name.endswith("AndMul") or name == "MulAndSilu":
            continue  # no class of transformers: tests/test_hub_names.py kernelizes one for each
        if name.startswith("DecoderLayer"):
            continue  # tests/test_decoder_layers.py has a class for each
        if name.startswith("Attention"):
            continue  # likewise tests/test_unnamed_classes.py
        _validate_layer(check_cls=replaced[name], cls=layer, repo=name)
        assert layer.has_backward is False and layer.can_torch_compile is True
    _validate_layer(check_cls=package.models.FP8Linear, cls=package.layers.FP8Linear, repo="ours")


# ---- RMSNorm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rmsnorm(package, device, run_kernelized, dtype):
    norm = LlamaRMSNorm(96, eps=1e-5)
    # As quantize_model_ does: transformers names the class only beside its own version of kernels.
    package.models.registration.register_layer(LlamaRMSNorm, "RMSNorm", lambda module: True)
    norm.weight.data = torch.randn(96)
    norm = run_kernelized(norm.to(dtype))
    assert runs(norm, package, "RMSNorm")
    x = torch.randn(2, 3, 96, device=device).to(dtype)
    assert_close(norm(x), package.reference.rmsnorm(x, norm.weight, 1e-5))


def test_rmsnorm_takes_eps_by_either_name(package, device, run_kernelized):
    class Norm(nn.Module):
        kernel_layer_name = "RMSNorm"

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40))
            self.eps = 0.5

        def forward(self, hidden_states):
            raise AssertionError("not replaced")

    x = torch.randn(4, 40, device=device)
    norm = run_kernelized(Norm())
    assert_close(norm(x), package.reference.rmsnorm(x, norm.weight, 0.5))


# ---- FP8 linears in their several conventions ---------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_linear_dynamic(package, device, run_kernelized, dtype, with_bias, rows):
    dialect = package.native_fp8_dtype(device)
    q, scale = package.reference.quantize_fp8(torch.randn(80, 96), fp8_dtype=dialect)
    bias = nn.Parameter(torch.randn(80, dtype=dtype)) if with_bias else None
    linear = run_kernelized(package.models.FP8Linear(q, scale, bias))
    assert runs(linear, package, "FP8Linear")
    x = torch.randn(1, rows, 96, device=device).to(dtype)
    assert_linear_close(package, linear(x), x, linear, linear.weight_scale_inv, linear.bias)


@pytest.mark.parametrize("rows", ROWS)
def test_fp8_linear_weight_only(package, device, run_kernelized, rows):
    dialect = package.native_fp8_dtype(device)
    q, scale = package.reference.quantize_fp8(torch.randn(80, 96), fp8_dtype=dialect)
    bias = torch.randn(80).half()  # of neither the input's nor the scales' dtype
    linear = run_kernelized(package.models.FP8Linear(q, scale, nn.Parameter(bias), "none"))
    x = torch.randn(rows, 96, device=device).to(torch.bfloat16)
    exact, operands = exact_product(package, x, None, linear.weight, linear.weight_scale_inv)
    exact += bias.to(device)
    if package.fp8_linear_path(rows, linear.weight, linear.weight_scale_inv) == "scaled_mm":
        # There the weight is unpacked to 16 bits for the library's product.
        torch.testing.assert_close(linear(x).double(), exact, rtol=0.02, atol=0.1)
    else:
        assert_product_close(linear(x), exact, operands)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(384, 256), (200, 300)])
def test_finegrained_blocks(package, device, run_kernelized, register_layer, n, k, rows):
    register_layer(FP8Linear, "FP8Linear")
    linear = FP8Linear(k, n, block_size=(128, 128), has_bias=True)
    linear.weight.data = torch.randn(n, k).to(torch.float8_e4m3fn)
    linear.weight_scale_inv.data = torch.rand(-(-n // 128), -(-k // 128)) + 0.5
    linear.bias.data = torch.randn(n)
    linear.weight.data, linear.weight_scale_inv.data = package.to_native_fp8(
        linear.weight.data.to(device), linear.weight_scale_inv.data.to(device)
    )
    linear = run_kernelized(linear)
    assert runs(linear, package, "FP8Linear")
    x = torch.randn(rows, k, device=device).to(torch.bfloat16)
    scale_w, bias = linear.weight_scale_inv, linear.bias
    assert_linear_close(package, linear(x), x, linear, scale_w, bias, group_size=128)


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_finegrained_per_tensor(package, device, run_kernelized, register_layer, scheme):
    register_layer(FP8Linear, "FP8Linear")
    linear = FP8Linear(64, 48, activation_scheme=scheme)
    linear.weight.data, linear.weight_scale_inv.data = package.to_native_fp8(
        torch.randn(48, 64).to(torch.float8_e4m3fn).to(device), torch.tensor(0.25, device=device)
    )
    quantization = {}
    if scheme == "static":
        linear.activation_scale.data = torch.tensor(0.02)
        quantization["scale"] = torch.tensor(0.02, device=device)
    linear = run_kernelized(linear)
    x = torch.randn(5, 64, device=device).to(torch.bfloat16)
    assert_linear_close(package, linear(x), x, linear, linear.weight_scale_inv, **quantization)


@pytest.mark.parametrize("rows", ROWS)
def test_fbgemm(package, device, run_kernelized, register_layer, rows):
    register_layer(FbgemmFp8Linear, "FbgemmFp8Linear")
    linear = FbgemmFp8Linear(64, 48, bias=True)
    linear.requires_grad_(False)
    linear.weight.data, linear.weight_scale.data = package.to_native_fp8(
        torch.randn(48, 64).to(torch.float8_e4m3fn).to(device), torch.rand(48, 1, device=device)
    )
    linear.bias.data = torch.randn(48)
    linear.input_scale_ub.fill_(1.5)  # normal inputs go beyond: the bound has to work
    linear = run_kernelized(linear)
    assert runs(linear, package, "FbgemmFp8Linear")
    x = torch.randn(rows, 64, device=device).to(torch.bfloat16)
    assert x.abs().max() > 1.5
    assert_linear_close(
        package, linear(x), x, linear, linear.weight_scale, linear.bias, scale_ub=1.5
    )


# ---- MLP -----------------------------------------------------------------------------------------


def make_mlp(activation, dtype=torch.bfloat16):
    config = LlamaConfig(
        hidden_size=48, intermediate_size=160, num_attention_heads=3, hidden_act=activation
    )
    return LlamaMLP(config).to(dtype).eval()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_mlp_with_16_bit_weights(package, device, run_kernelized, register_layer, activation):
    register_layer(LlamaMLP, "LlamaMLP")
    mlp = make_mlp(activation, torch.float32)
    x = torch.randn(2, 3, 48)
    expected = mlp(x)
    mlp = run_kernelized(mlp)
    assert runs(mlp, package, "SwiGLUMLP")
    torch.testing.assert_close(mlp(x.to(device)).cpu(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("fuse", [True, False])
def test_mlp_with_fp8_weights(package, device, run_kernelized, activation, fuse):
    mlp = make_mlp(activation, torch.float32).to(device)
    package.models.quantize_model_(mlp, activations="dynamic", fuse=fuse)
    assert hasattr(mlp, "gate_up_proj") == fuse
    x = torch.randn(2, 3, 48, device=device)

    def linear(x, projection):
        scale_w = projection.weight_scale_inv
        return package.reference.fp8_linear(x, projection.weight, scale_w)

    act = ACT2FN[activation]
    hidden = act(linear(x, mlp.gate_proj)) * linear(x, mlp.up_proj)
    expected = linear(hidden, mlp.down_proj)
    mlp = run_kernelized(mlp)
    assert runs(mlp, package, "SwiGLUMLP")
    # float32 around the FP8 operands: only inputs on a tie may be quantised differently.
    torch.testing.assert_close(mlp(x), expected, rtol=1e-3, atol=2e-3 * expected.abs().max())
    if fuse:
        gate_up = package.fp8_linear(x, mlp.gate_up_proj.weight, mlp.gate_up_proj.weight_scale_inv)
        projected = package.models.linear.Projected(gate_up)
        assert torch.equal(mlp(projected), mlp(x)), "an input that is projected already"


def test_mlp_of_a_finegrained_checkpoint(package, device, run_kernelized, register_layer):
    register_layer(LlamaMLP, "LlamaMLP")
    mlp = make_mlp("silu")
    for name, n, k in (("gate_proj", 160, 48), ("up_proj", 160, 48), ("down_proj", 48, 160)):
        linear = FP8Linear(k, n, block_size=(128, 128))
        w = (torch.randn(n, k) * 20).to(torch.float8_e4m3fn).to(device)
        scale = (torch.rand(-(-n // 128), -(-k // 128)) * 0.01 + 0.005).to(device)
        linear.weight.data, linear.weight_scale_inv.data = package.to_native_fp8(w, scale)
        setattr(mlp, name, linear.requires_grad_(False))
    mlp = run_kernelized(mlp)
    x = torch.randn(3, 48, device=device)

    def linear(x, projection):
        scale_w = projection.weight_scale_inv
        return package.reference.fp8_linear(x, projection.weight, scale_w)

    hidden = nn.functional.silu(linear(x, mlp.gate_proj)) * linear(x, mlp.up_proj)
    expected = linear(hidden, mlp.down_proj)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-3, atol=2e-3 * expected.abs().max())


# ---- torch.compile -------------------------------------------------------------------------------


def compiled_equals_eager(module, *inputs):
    """Under inference mode, as users run it, with no graph break."""
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(*inputs), module(*inputs))


def test_norm_and_linears_compile(package, device, run_kernelized, register_layer):
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE
    x = torch.randn(3, 64, device=device).to(torch.bfloat16)
    compiled_equals_eager(run_kernelized(LlamaRMSNorm(64).to(x.dtype), mode), x)
    dialect = package.native_fp8_dtype(device)
    q, scale = package.reference.quantize_fp8(torch.randn(48, 64), fp8_dtype=dialect)
    for scheme in ("dynamic", "none"):
        linear = package.models.FP8Linear(q, scale, activation_scheme=scheme)
        compiled_equals_eager(run_kernelized(linear, mode), x)
    register_layer(FbgemmFp8Linear, "FbgemmFp8Linear")
    linear = FbgemmFp8Linear(64, 48, bias=False).requires_grad_(False)
    linear.weight.data, linear.weight_scale.data = q, scale
    linear.input_scale_ub.fill_(2.0)
    compiled_equals_eager(run_kernelized(linear, mode), x)


@pytest.mark.parametrize("quantize", [False, True])
def test_mlp_compiles(package, device, run_kernelized, register_layer, quantize):
    register_layer(LlamaMLP, "LlamaMLP")
    mlp = make_mlp("silu").to(device)
    if quantize:
        package.models.quantize_model_(mlp)
    mlp = run_kernelized(mlp, Mode.INFERENCE | Mode.TORCH_COMPILE)
    compiled_equals_eager(mlp, torch.randn(3, 48, device=device).to(torch.bfloat16))


def test_methods_are_not_asked_for_their_function_with_a_default():
    """torch.compile of torch 2.11 takes the default: hooks.function_of does without."""
    for path in (ROOT / "torch-ext").rglob("*.py"):
        assert not re.search(r'getattr\([^\n]*"__func__"', path.read_text()), path
