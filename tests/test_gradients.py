"""Gradients: never lost without a word."""

import pytest
import torch
from kernels import Mode
from tiny_models import tiny_llama, tokens
from torch import nn
from torch.autograd import forward_ad
from transformers.models.llama.modeling_llama import LlamaRMSNorm


@pytest.fixture
def package(best_package):
    return best_package


def calls(package, device):
    """Name -> (a call of one tensor, that tensor), for every function that computes."""
    fp8 = package.native_fp8_dtype(device)
    weight = torch.ones(64, device=device)
    w = torch.randn(48, 64, device=device).to(fp8)
    scale = torch.ones(48, 1, device=device)
    x = torch.randn(3, 64, device=device)
    half = x.bfloat16()
    return {
        "rms_norm": (lambda x: package.rms_norm(x, weight), x),
        "rms_norm_fp8": (lambda x: package.rms_norm_fp8(x, weight)[1], x),
        "swiglu": (package.swiglu, x),
        "swiglu_fp8": (lambda x: package.swiglu_fp8(x)[1], x),
        "quantize_fp8": (lambda x: package.quantize_fp8(x)[1], x),
        "fp8_linear": (lambda x: package.fp8_linear(x, w, scale), x),
        "skinny_gemm": (lambda x: package.skinny_gemm(x, w, None, scale), half),
        "gemm": (lambda x: package.gemm(x, w, None, scale), half),
    }


# ---- functions


def test_a_gradient_that_is_wanted_is_refused(package, device):
    for name, (call, x) in calls(package, device).items():
        wanting = x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=r"has no gradient, got .* with requires_grad: call"):
            call(wanting)
        with torch.no_grad():
            assert torch.equal(call(wanting), call(x)), name


def test_any_argument_may_want_it(package, device):
    x, weight = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    residual = x.clone()
    with pytest.raises(RuntimeError, match="rms_norm has no gradient, got weight with"):
        package.rms_norm(x, weight.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="got residual with"):
        package.rms_norm_fp8(x, weight, residual=residual.clone().requires_grad_() * 1)
    w = torch.randn(48, 64, device=device).to(package.native_fp8_dtype(device))
    bias = torch.zeros(48, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="fp8_linear has no gradient, got bias with"):
        package.fp8_linear(x, w, torch.ones(1, device=device), bias=bias)


def test_transforms_of_torch_func_are_refused(package, device):
    for name, (call, x) in calls(package, device).items():
        total = lambda x, call=call: call(x).sum()  # noqa: E731
        for transformed in (
            lambda x, f=total: torch.func.grad(f)(x.float()),
            lambda x, f=total: torch.func.jacrev(f)(x.float()),
            lambda x, f=total: torch.func.jvp(f, (x,), (x,)),
            lambda x, f=total: torch.func.vmap(f)(x[None]),
        ):
            with pytest.raises(RuntimeError, match=r"inside a torch\.func transform|must be"):
                transformed(x)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"torch\.func transform"):
            torch.func.vmap(call)(x[None])
        with forward_ad.dual_level():
            call(x)  # nothing to differentiate
            with pytest.raises(RuntimeError, match="a tangent"):
                call(forward_ad.make_dual(x, x)), name


def test_what_is_written_bumps_its_version(package, device):
    x, weight = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    residual = torch.randn_like(x)
    for write in (
        lambda t: package.rms_norm(x, weight, residual=t),
        lambda t: package.rms_norm_fp8(x, weight, residual=t.view(3, 64)),
        lambda t: package.rms_norm(x, weight, out=t),
        lambda t: package.swiglu(torch.cat([x, x], 1), out=t),
        lambda t: package.skinny_gemm(x.bfloat16(), x.new_ones(64, 64).bfloat16(), out=t),
        lambda t: package.gemm(x.bfloat16(), x.new_ones(64, 64).bfloat16(), out=t),
    ):
        before = residual._version
        write(residual)
        assert residual._version > before
    factor = torch.ones(64, device=device, requires_grad=True)
    product = factor * residual  # saves the residual
    package.rms_norm(x, weight, residual=residual)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():  # tensors made there have no version
        package.rms_norm(x.clone(), weight, residual=residual.clone())


# ---- kernelized models


def test_a_kernelized_forward_that_would_need_a_gradient_says_so(package, run_kernelized, device):
    model = tiny_llama().to(device)
    package.models.quantize_model_(model)
    run_kernelized(model)
    ids = tokens(1, 5, device)
    with pytest.raises(RuntimeError, match=r"has no gradient.*torch\.inference_mode"):
        model(ids)
    with torch.no_grad():
        expected = model(ids).logits
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(model(ids).logits, expected), "nothing wants a gradient"


def test_in_training_the_models_own_forward_runs(package, run_kernelized, device):
    model = tiny_llama().to(device)
    package.models.quantize_model_(model, activations="none")
    ids = tokens(2, 5, device)
    model(ids, labels=ids).loss.backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert "model.layers.0.input_layernorm.weight" in own and "model.embed_tokens.weight" in own
    model.zero_grad()
    run_kernelized(model)
    with torch.no_grad():
        inferred = model(ids).logits
    model.train()
    trained = model(ids, labels=ids)
    assert trained.logits.requires_grad
    trained.loss.backward()
    for name, parameter in model.named_parameters():
        if name in own:
            torch.testing.assert_close(parameter.grad, own[name])
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, inferred), "and afterwards the kernels again"


def test_training_mode_of_kernelize_keeps_the_models_own_forward(package, run_kernelized, device):
    norm = run_kernelized(LlamaRMSNorm(32), mode=Mode.TRAINING)
    assert norm.forward.__func__ is LlamaRMSNorm.forward
    q, scale = package.reference.quantize_fp8(torch.randn(16, 32))
    linear = run_kernelized(package.models.FP8Linear(q, scale), mode=Mode.TRAINING)
    assert linear.forward.__func__ is package.models.FP8Linear.forward
    x = torch.randn(3, 32, device=device, requires_grad=True)
    linear(norm(x)).sum().backward()
    assert x.grad.abs().sum() > 0


def test_a_quantised_model_keeps_its_mode(package):
    for training in (True, False):
        model = nn.Sequential(nn.Linear(8, 8)).train(training)
        package.models.quantize_model_(model)
        assert model[0].training is training
