"""Gradients: never lost without a word."""

import inspect

import pytest
import torch
from every_call import (
    FLOATS,
    FP8_DTYPES,
    OTHERS,
    REFUSED,
    calls,
    function,
    public_functions,
    same,
)
from kernels import Mode
from tiny_models import tiny_llama, tokens
from torch import nn
from torch.autograd import forward_ad
from transformers.models.llama.modeling_llama import LlamaRMSNorm


@pytest.fixture
def package(best_package):
    return best_package


# ---- functions: every public one, in each of its forms


@pytest.fixture(scope="module")
def every_call(best_package, device):
    torch.manual_seed(0)
    return [*calls(best_package, device)]


def wants(call, path):
    """The call with a gradient wanted of one of its tensors."""
    return call.with_tensor(path, call.tensors()[path].clone().requires_grad_())


def floats(call):
    dtypes = (*FLOATS, *FP8_DTYPES)
    return [path for path, tensor in call.tensors().items() if tensor.dtype in dtypes]


def test_every_public_function_has_a_call(package, every_call, device):
    """One that has none here, and no reason, is not guarded by what follows."""
    public = public_functions(package)
    if device.type != "cpu":
        public = public - {"decode_layers"}  # every_call.py calls it on the CPU alone
    called = {call.name for call in every_call}
    assert not called & {*OTHERS} and public == called | {*OTHERS}
    for name in called:
        taken = {path for call in every_call if call.name == name for path in call.arguments}
        parameters = inspect.signature(function(package, name)).parameters.values()
        tensors = {p.name for p in parameters if "Tensor" in str(p.annotation)}
        tensors -= REFUSED
        assert tensors <= taken, f"{name} is called without {tensors - taken}"


def test_a_gradient_that_is_wanted_is_refused(package, every_call):
    for call in every_call:
        expected = call.fresh().run(package)
        for path in floats(call):
            wanting = wants(call, path)
            before = {p: t.detach().clone() for p, t in wanting.tensors().items()}
            with pytest.raises(RuntimeError, match=r"has no gradient, got .* with requires_grad"):
                wanting.run(package)
            for p, tensor in wanting.tensors().items():
                assert same(tensor, before[p]), f"{call} wrote {p}"
            with torch.no_grad():
                found = wanting.fresh().run(package)
            assert all(map(same, found, expected)), f"{call}: {path}"


def test_transforms_of_torch_func_are_refused(package, every_call):
    for call in every_call:
        for path in floats(call):
            tensor = call.tensors()[path]

            def total(tensor, call=call, path=path):
                return call.with_tensor(path, tensor).fresh().run(package)[0].float().sum()

            transforms = [lambda t, f=total: torch.func.vmap(f)(t[None])]
            if tensor.dtype in FLOATS:
                transforms += [
                    lambda t, f=total: torch.func.grad(f)(t),
                    lambda t, f=total: torch.func.jacrev(f)(t),
                    lambda t, f=total: torch.func.jvp(f, (t,), (t,)),
                ]
            for transformed in transforms:
                with torch.no_grad(), pytest.raises(RuntimeError, match=r"torch\.func transform"):
                    transformed(tensor)
        with forward_ad.dual_level():
            call.fresh().run(package)  # nothing to differentiate
            for path in floats(call):
                tensor = call.tensors()[path]
                if tensor.dtype not in FLOATS:
                    continue  # torch has no tangents of FP8
                dual = call.with_tensor(path, forward_ad.make_dual(tensor, tensor))
                with pytest.raises(RuntimeError, match="a tangent"):
                    dual.run(package)


def test_what_is_written_bumps_its_version(package, every_call):
    for call in every_call:
        fresh = call.fresh()
        tensors = fresh.tensors()
        before = {path: tensor._version for path, tensor in tensors.items()}
        fresh.run(package)
        for path, tensor in tensors.items():
            assert (tensor._version > before[path]) == (path in call.written), f"{call}: {path}"


def test_a_saved_value_that_was_overwritten_is_noticed(package, device):
    x, weight = torch.randn(3, 64, device=device), torch.ones(64, device=device)
    residual = torch.randn_like(x)
    factor = torch.ones(64, device=device, requires_grad=True)
    product = factor * residual  # saves the residual
    package.rmsnorm(x, weight, residual=residual)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    before = residual._version
    package.rmsnorm(x, weight, residual=residual.view(3, 8, 8).view(3, 64))
    assert residual._version > before, "through a view"
    with torch.inference_mode():  # tensors made there have no version
        package.rmsnorm(x.clone(), weight, residual=residual.clone())


def test_the_scale_of_a_converted_weight_keeps_its_gradient(package, device):
    w = torch.randn(4, 8, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(1, device=device, requires_grad=True)
    for dialect in FP8_DTYPES:
        _, converted = package.to_native_fp8(w, scale, fp8_dtype=dialect)
        assert converted.requires_grad


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
