"""Products that quantise their rows, or gate their results: the bits of the functions that they
stand for, from the op to a model's layers."""

import pytest
import torch
from compare import bits
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_models import tiny_llama

# Rows, N and K; the first and the last are joined where a GPU joins.
SHAPES = [(1, 6144, 4096), (3, 96, 384), (1, 4000, 1152)]
FP8 = torch.float8_e4m3fn


def weight(package, n, k, device):
    w = torch.randn(n, k, device=device)
    return package.quantize_fp8(w, fp8_dtype=package.native_fp8_dtype(device))


def poisoned(*shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows, n, k", SHAPES)
def test_quantized_gemm_has_the_bits_of_two_ops(best_package, device, rows, n, k, dtype):
    package = best_package
    w, scale_w = weight(package, n, k, device)
    bias = torch.randn(n, device=device).bfloat16()
    # Rows of other magnitudes, with a stride of their own; what lies beyond them is no number.
    x = poisoned(rows, k + 64, dtype=dtype, device=device)[:, :k]
    x.copy_(torch.randn(rows, k) * 10.0 ** torch.arange(-2, rows - 2)[:, None])
    q, scale = package.quantize_fp8(x, fp8_dtype=w.dtype)
    for b in (None, bias):
        expected = package.gemm(q, w, scale, scale_w, bias=b, out_dtype=torch.bfloat16)
        out = poisoned(rows, n, dtype=torch.bfloat16, device=device)
        package.functional.ops.quantized_gemm(out, x, w, scale_w, b)
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, n, k", SHAPES)
def test_gated_gemm_has_the_bits_of_two_ops(best_package, device, rows, n, k, rounded, activation):
    package = best_package
    w, scale_w = weight(package, n, k, device)
    limits = package.functional.ops.linear_limits(
        -1 if device.type == "cpu" else device.index or 0, n, k, "row"
    )
    if device.type != "cpu" and rows > limits[3]:
        pytest.skip("no kernel here gates so many rows")
    x = 0.1 * torch.randn(rows, k, device=device)
    q, scale = package.quantize_fp8(x, fp8_dtype=w.dtype)
    bias = torch.randn(n, device=device).to(rounded)
    for b in (None, bias):
        both = package.gemm(q, w, scale, scale_w, bias=b, out_dtype=rounded)
        expected = package.swiglu(both.float(), activation=activation)
        out = poisoned(rows, n // 2 + 8, dtype=torch.float32, device=device)[:, : n // 2]
        name = str(rounded).rpartition(".")[2]
        package.functional.ops.gated_gemm(out, q, w, scale, scale_w, b, activation, name)
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("joined", [(8, 8), (8, 0), (0, 8)])
def test_layers_that_join_have_the_bits_of_those_that_do_not(package, monkeypatch, joined):
    """The CPU's package, told that its products join."""
    model = tiny_llama(torch.bfloat16)
    package.models.quantize_model_(model, activations="dynamic")
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cpu")
    tokens = torch.randint(0, 50, (1, 5))
    with torch.inference_mode():
        expected = model(tokens).logits
    product, called = package.functional.product, []
    for name in ("_quantized_gemm", "_gated_gemm"):
        op = getattr(product, name)
        monkeypatch.setattr(
            product, name, lambda *args, op=op, name=name: (called.append(name), op(*args))
        )
    limits = product._known_linear_limits
    monkeypatch.setattr(
        product, "_known_linear_limits", lambda *shape: (*limits(*shape)[:2], *joined)
    )
    with torch.inference_mode():
        assert torch.equal(bits(model(tokens).logits), bits(expected))
    layers = model.config.num_hidden_layers
    assert called.count("_gated_gemm") == (layers if min(joined) else 0)
    assert called.count("_quantized_gemm") >= (2 * layers if min(joined) else 0)
    if joined[0] == 0:
        assert not called
