"""Ops as torch sees them: schemas, fakes, opcheck, torch.compile and inference mode."""

import sys

import pytest
import torch
from compare import bits
from torch._dynamo.testing import CompileCounterWithBackend

FP8 = torch.float8_e4m3fn


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def ops(package):
    return package.functional.ops


# torch's schema check computes with its inputs, which FP8 does not support.
FP8_UTILS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op, arguments):
    fp8 = any(isinstance(a, torch.Tensor) and a.dtype.itemsize == 1 for a in arguments)
    utils = FP8_UTILS if fp8 else ("test_schema", *FP8_UTILS)
    torch.library.opcheck(op, arguments, test_utils=utils)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("residuals", [0, 1, 2])
def test_opcheck_rmsnorm_fp8(ops, package, device, residuals, scales):
    fp8 = package.native_fp8_dtype(device)
    x = torch.randn(4, 64, device=device)
    out = torch.empty_like(x, dtype=fp8 if scales else x.dtype)
    computed = torch.empty(4, 1, device=device) if scales else None
    residual = torch.randn_like(x) if residuals else None
    addend = torch.randn_like(x) if residuals == 2 else None
    weight = torch.randn(64, device=device)
    arguments = (out, computed, x, residual, weight, None, 1e-6, 0, 0.0, scales, 1.0, addend)
    opcheck(ops.rmsnorm_fp8.default, arguments)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("with_up", [False, True])
def test_opcheck_swiglu_fp8(ops, package, device, with_up, scales):
    gate = torch.randn(4, 64, device=device)
    dtype = package.native_fp8_dtype(device) if scales else gate.dtype
    out = torch.empty_like(gate, dtype=dtype)
    computed = torch.empty(4, 1, device=device) if scales else None
    up = torch.randn_like(gate) if with_up else None
    opcheck(ops.swiglu_fp8.default, (out, computed, gate, up, None, "silu", 0, 0.0, scales))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [3, 70])
def test_opcheck_gemm(ops, package, device, rows, with_bias, fp8):
    dtype = package.native_fp8_dtype(device) if fp8 else torch.bfloat16
    a, w = (torch.randn(n, 64, device=device).to(dtype) for n in (rows, 32))
    scale = torch.ones(1, device=device) if fp8 else None
    out = torch.empty(rows, 32, device=device)
    bias = torch.randn(32, device=device) if with_bias else None
    opcheck(ops.gemm.default, (out, a, w, scale, None, bias))


def mlp_block(package, x, residual, weight, w, scale_w):
    """Every op of a decoder's MLP, with the residual updated in place."""
    q, scale = package.rmsnorm_fp8(x, weight, residual=residual)
    hidden = package.skinny_gemm(q, w, scale, scale_w, out_dtype=torch.bfloat16)
    q, scale = package.swiglu_fp8(hidden)
    return package.swiglu(hidden), package.rmsnorm(x, weight), q.float() * scale, residual + 1


@pytest.fixture
def block_inputs(package, device):
    x = torch.randn(3, 128, device=device).bfloat16()
    residual = torch.randn(3, 128, device=device).bfloat16()
    weight = torch.randn(128, device=device).bfloat16()
    w = torch.randn(256, 128, device=device).to(package.native_fp8_dtype(device))
    return x, residual, weight, w, torch.rand(256, 1, device=device)


@pytest.mark.kernels_ci
@pytest.mark.skipif(" " in sys.prefix, reason="Inductor's link line does not quote torch's path")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_has_no_graph_break(package, block_inputs, dynamic):
    x, residual, *rest = block_inputs
    expected_residual, actual_residual = residual.clone(), residual.clone()
    expected = mlp_block(package, x, expected_residual, *rest)
    compiled = torch.compile(mlp_block, fullgraph=True, dynamic=dynamic)
    actual = compiled(package, x, actual_residual, *rest)
    assert torch.equal(actual_residual, expected_residual)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fp8_linear(package, block_inputs, device, dynamic):
    """Few rows and many. With `dynamic` one graph serves them, but for each side of a limit beyond
    which the product is the library's."""
    _, _, _, w, scale_w = block_inputs
    graphs = CompileCounterWithBackend("inductor")
    compiled = torch.compile(package.fp8_linear, fullgraph=True, dynamic=dynamic, backend=graphs)
    for rows in (3, 30, 70, 90) if dynamic else (3, 70):
        x = torch.randn(rows, 128, device=device).bfloat16()
        assert torch.equal(bits(compiled(x, w, scale_w)), bits(package.fp8_linear(x, w, scale_w)))
    limited = package.fp8_linear_path(90, w, scale_w) != package.fp8_linear_path(3, w, scale_w)
    assert graphs.frame_count == (2 if limited or not dynamic else 1)


def test_a_compiled_linear_has_one_product(package, block_inputs):
    x, _, _, w, scale_w = block_inputs
    called = []

    def record(graph, _):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(package.fp8_linear, fullgraph=True, backend=record)(x, w, scale_w)
    products = [name for name in called if "gemm" in name]
    assert len(products) == 1, called


def test_inference_mode(package, block_inputs):
    x, residual, *rest = block_inputs
    expected = mlp_block(package, x, residual.clone(), *rest)
    with torch.inference_mode():
        actual = mlp_block(package, x, residual.clone(), *rest)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(bits(one), bits(other))


def test_meta_tensors_have_shapes(package):
    x = torch.empty(2, 5, 256, dtype=torch.bfloat16, device="meta")
    w = torch.empty(64, 256, dtype=FP8, device="meta")
    q, scale = package.swiglu_fp8(x, fp8_dtype=FP8)
    assert q.shape == (2, 5, 128) and scale.shape == (2, 5, 1)
    q, scale = package.rmsnorm_fp8(x, x[0, 0], group_size=128, fp8_dtype=FP8)
    assert scale.shape == (2, 5, 2)
    assert package.skinny_gemm(q, w).shape == (2, 5, 64)
