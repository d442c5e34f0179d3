"""The plugin's FP8 linears behind vLLM's fused activation, without a model."""

import pytest
import torch
from rocm_kernels_vllm import activation, devices, kernels, linear
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)

N, K = 64, 128
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def settings():
    activation.swiglu()
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield


@pytest.fixture
def layer():
    """A linear with a scale a channel, its weight as vLLM's methods leave it."""
    torch.manual_seed(0)
    found = torch.nn.Module()
    found.weight = torch.randn(N, K).to(FP8).t()
    found.weight_scale = torch.rand(N, 1)
    return found


def loaded(layer):
    """Its kernel, once the weights are there."""
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8StaticChannelSym, activation_quant_key=kFp8DynamicTokenSym,
        weight_shape=(N, K), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
    )  # fmt: skip
    names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    kernel = linear.RocmKernelsFP8Linear(config, names)
    kernel.process_weights_after_loading(layer)
    return kernel


def expected(layer, x, most=None):
    """Of each row's largest number its scale, which ``most`` bounds."""
    gate, up = x.double().chunk(2, -1)
    y = (torch.nn.functional.silu(gate) * up).reshape(-1, K)
    largest = y.abs().amax(1, keepdim=True)
    scale = (largest if most is None else largest.clamp(max=most)) / torch.finfo(FP8).max
    q = (y / scale).clamp(-448, 448).float().to(FP8).double()
    w = layer.weight.t().double() * layer.weight_scale.double()
    return ((q * scale) @ w.t()).view(*x.shape[:-1], N)


def check(out, wanted):
    assert out.shape == wanted.shape
    # Activations that are rounded to 16 bits first may round to FP8's neighbour.
    assert (out.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("shape", [(5, 2 * K), (1, 5, 2 * K), (2, 3, 2 * K)])
def test_a_fused_activation_of_any_dimensions(layer, shape):
    """Pixtral's vision has [1, patches, K]."""
    kernel, x = loaded(layer), torch.randn(shape).bfloat16()
    y = maybe_fused_act_quant(SiluAndMul(), x, layer)
    assert isinstance(y, QuantizedActivation) and not kernels.why_not()
    check(kernel.apply_weights(layer, y), expected(layer, x))


def test_a_bound_of_scales_is_kept(layer):
    """FBGEMM's checkpoints have one, which a fused activation would not see."""
    layer.input_scale_ub = torch.tensor(0.5)
    kernel, x = loaded(layer), torch.randn(5, 2 * K).bfloat16()
    y = maybe_fused_act_quant(SiluAndMul(), x, layer)
    assert not isinstance(y, QuantizedActivation)
    out = kernel.apply_weights(layer, y)
    check(out, expected(layer, x, most=0.5))
    without = expected(layer, x)
    assert (out.double() - without).norm() > 0.2 * without.norm()


@pytest.mark.parametrize(
    "device, taken",
    [
        (devices.Device(), (True, True, True)),
        (devices.Device(arch="gfx950"), (True, True, True)),
        (devices.Device(arch="gfx1201"), (False, False, False)),
        (devices.Device(capability=(8, 0)), (False, False, False)),
        (devices.Device(capability=(9, 0)), (True, True, True)),
        (devices.Device(capability=(10, 0)), (True, False, False)),
    ],
    ids=str,
)
def test_linears_say_where_they_are_off(monkeypatch, device, taken):
    """FP8, in blocks, and weights alone."""
    monkeypatch.delenv("ROCM_KERNELS_VLLM_ON", raising=False)
    monkeypatch.setattr(devices, "here", lambda: device)
    kinds = (
        linear.RocmKernelsFP8Linear,
        linear.RocmKernelsFP8BlockLinear,
        linear.RocmKernelsWeightOnlyLinear,
    )
    found = [kind.is_supported() for kind in kinds]
    assert tuple(supported for supported, _ in found) == taken
    assert all((reason is None) == supported for supported, reason in found)
