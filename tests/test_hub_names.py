"""Functions and layers by the names of the Hub's `activation` and `rmsnorm` packages."""

import inspect
from pathlib import Path

import pytest
import torch
from compare import Guarded, assert_close
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from tiny_models import tiny_llama, tokens
from torch import nn

# Name -> which half is the gate, and its activation.
GATED = {
    "silu_and_mul": (0, "silu"),
    "mul_and_silu": (1, "silu"),
    "gelu_and_mul": (0, "gelu"),
    "gelu_tanh_and_mul": (0, "gelu_tanh"),
}
LAYERS = dict(
    zip(("SiluAndMul", "MulAndSilu", "GeluAndMul", "GeluTanhAndMul"), GATED.values(), strict=True)
)


def expected(package, x, gate, activation):
    halves = x.cpu().chunk(2, -1)
    return package.reference.swiglu(halves[gate], halves[1 - gate], activation=activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GATED)
def test_gated_activations(backend, package, name, dtype):
    if backend.name == "reference":
        return  # its swiglu is what the others are held to
    x = torch.randn(5, 2 * 130, device=backend.device).to(dtype)
    out = Guarded(5, 130, dtype, backend.device)
    assert getattr(backend.ops, name)(out.view, x) is out.view
    out.assert_guards_intact()
    assert_close(out.view, expected(package, x, *GATED[name]), atol=1e-30)
    assert list(inspect.signature(getattr(backend.ops, name)).parameters) == ["out", "x"]


def test_apply_rms_norm(backend, package):
    if backend.name == "reference":
        return
    x, weight = torch.randn(2, 3, 96, device=backend.device), torch.rand(96, device=backend.device)
    out = backend.ops.apply_rms_norm(x, weight, 1e-5)
    assert_close(out, package.reference.rmsnorm(x.cpu(), weight.cpu(), 1e-5))


def repository(package, layer):
    """The variant's own folder: by how torch was built the client would look for another."""
    return LocalLayerRepository(Path(package.__file__).parent, layer_name=layer)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(package, name):
    class Own(nn.Module):
        kernel_layer_name = name

        def forward(self, x):
            raise AssertionError("the module's own forward ran")

    with use_kernel_mapping({name: {"cpu": repository(package, name)}}, inherit_mapping=False):
        module = kernelize(Own(), mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cpu")
    x = torch.randn(2, 3, 128).bfloat16()
    torch._dynamo.reset()
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        assert_close(run(x), expected(package, x, *LAYERS[name]))


def test_rmsnorm_leaves_training_to_the_model_and_compiles(package):
    """With modes as transformers registers its own: liger's norm has no TORCH_COMPILE."""
    norm = repository(package, "RMSNorm")
    mapping = {"RMSNorm": {"cpu": {Mode.INFERENCE | Mode.TORCH_COMPILE: norm}}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        trained = kernelize(tiny_llama(), mode=Mode.TRAINING, device="cpu")
        served = kernelize(tiny_llama(), mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cpu")
    assert package.models.kernelized_layers(trained) == {}
    trained(tokens(1, 4)).logits.sum().backward()
    assert trained.model.norm.weight.grad is not None
    runs = served.model.norm.forward.__func__
    assert runs.__module__.endswith("layers.norm") and runs.__qualname__ == "RMSNorm.forward"
    ids = tokens(1, 4)
    torch._dynamo.reset()
    with torch.inference_mode():
        eager = served(ids).logits
        compiled = torch.compile(served, fullgraph=True, backend="aot_eager")(ids).logits
    assert torch.equal(eager, compiled)
