"""Every layer leaves training to the module that it replaces, and says so where it cannot."""

import copy
import inspect

import pytest
import torch
from every_layer import cases
from kernels import Mode
from test_moe_models import tiny
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture(scope="module")
def every_case(best_package, device):
    torch.manual_seed(0)
    return {case.layer: case for case in cases(best_package, device)}


@pytest.fixture
def both(every_case, run_kernelized):
    """By name of a layer: the case as it is, and kernelized."""

    def pair(layer, mode=Mode.INFERENCE):
        own = copy.deepcopy(every_case[layer])
        kernelized = copy.deepcopy(own)
        run_kernelized(kernelized.root, mode)
        return own, kernelized

    return pair


TOLERANCE = 0.04  # of a result: FbgemmFp8Linear quantises its input, which its own forward does not
LAYERS = (
    "RMSNorm", "RMSNormZeroCentered", "FP8Linear", "FP8LinearPart", "FbgemmFp8Linear", "SwiGLUMLP",
    "LlamaDecoderLayer", "GemmaDecoderLayer", "Attention4AndOthers", "Experts", "Llama4TextMoe",
    "TopKRouter", "TopKRouterGivenBias", "SiluAndMul", "MulAndSilu", "GeluAndMul", "GeluTanhAndMul",
)  # fmt: skip
SHARED = ("DecoderLayer", "AndOthers")  # by forwards of any names
every_layer = pytest.mark.parametrize("layer", LAYERS)


def test_every_layer_has_a_case(package, every_case):
    """One that has none is not guarded by what follows.

    Whole decoder layers are one forward under a name for each signature; two of them have a case.
    Likewise attentions, and one.
    """
    decoders, attentions = package.layers.decoder.LAYERS, package.layers.attention.LAYERS
    defined = {
        name
        for name, value in vars(package.layers).items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    assert defined == {*package.layers.LAYERS.values()} and {*every_case} == {*LAYERS}
    many = {*decoders, *attentions}
    assert (
        defined - many == {*LAYERS} - many and {*decoders} & {*LAYERS} and {*attentions} & {*LAYERS}
    )


def gradients(case):
    """Its result and all its gradients: of inputs, then of parameters."""
    case.module.zero_grad()
    inputs = {name: x.clone() for name, x in case.inputs.items()}
    wanted = [x.requires_grad_() for x in inputs.values() if x.is_floating_point()]
    out = case.run(**inputs)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    wanted += [p for p in case.module.parameters() if p.requires_grad]
    assert all(x.grad is not None for x in wanted), "a gradient is missing"
    return [out.detach(), *(x.grad.clone() for x in wanted)]


def runs_a_layer(case, package):
    forward = case.module.__dict__["forward"]
    return forward.__func__ is getattr(package.layers, case.layer).forward


@every_layer
def test_in_training_the_modules_own_forward_runs(both, package, layer):
    own, kernelized = both(layer)
    assert runs_a_layer(kernelized, package)
    for case in (own, kernelized):
        case.root.train()
    for mine, theirs in zip(gradients(kernelized), gradients(own), strict=True):
        assert torch.equal(mine, theirs)


@every_layer
def test_checkpointing_computes_the_same_twice(both, package, layer):
    own, kernelized = both(layer)
    expected = gradients_of_trained(own)
    for reentrant in (True, False):
        run = kernelized.run
        kernelized.root.train()

        def checkpointed(*tensors, names=tuple(kernelized.inputs), run=run, reentrant=reentrant):
            inner = lambda *given: run(**dict(zip(names, given, strict=True)))  # noqa: E731
            return checkpoint(inner, *tensors, use_reentrant=reentrant)

        class Checkpointed:
            module, inputs = kernelized.module, kernelized.inputs

            def run(self, **inputs):
                return checkpointed(*inputs.values())

        (out, *grads), (own_out, *own_grads) = gradients(Checkpointed()), expected
        # A reentrant one's first pass is under no_grad.
        allowed = TOLERANCE if reentrant else 0
        assert (out - own_out).norm() <= allowed * own_out.norm()
        for mine, theirs in zip(grads, own_grads, strict=True):
            torch.testing.assert_close(mine, theirs)


def gradients_of_trained(case):
    case.root.train()
    return gradients(case)


@every_layer
def test_in_evaluation_a_wanted_gradient_is_refused(both, layer):
    own, kernelized = both(layer)
    for case in (own, kernelized):
        case.root.eval().requires_grad_(False)
    expected = own.run()
    assert not kernelized.run().requires_grad, "nothing wants a gradient"
    for name, x in kernelized.inputs.items():
        if not x.is_floating_point():
            continue
        with pytest.raises(RuntimeError, match=r"has no gradient, got .*requires_grad: call it"):
            kernelized.run(**{name: x.clone().requires_grad_()})
        with torch.no_grad():
            found = kernelized.run(**{name: x.clone().requires_grad_()})
        assert (found - expected).norm() <= TOLERANCE * expected.norm()
        with pytest.raises(RuntimeError, match=r"inside a torch\.func transform"):
            torch.func.grad(lambda x, name=name: kernelized.run(**{name: x}).sum())(x)


@every_layer
def test_transforms_of_torch_func_in_training(both, layer):
    own, kernelized = both(layer)
    for case in (own, kernelized):
        case.root.train().requires_grad_(False)
    (name, x), *_ = kernelized.inputs.items()
    found, expected = (
        torch.func.grad(lambda x, case=case: case.run(**{name: x}).square().sum())(x)
        for case in (kernelized, own)
    )
    assert torch.equal(found, expected) and expected.abs().sum() > 0


@every_layer
def test_in_training_without_a_gradient(both, layer):
    own, kernelized = both(layer)
    for case in (own, kernelized):
        case.root.train()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            found, expected = kernelized.run(), own.run()
        assert (found - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("layer", [name for name in LAYERS if not name.endswith(SHARED)])
def test_training_compiles(both, layer):
    _, kernelized = both(layer, Mode.INFERENCE | Mode.TORCH_COMPILE)
    kernelized.root.train().requires_grad_(False)
    expected = gradients(kernelized)
    torch._dynamo.reset()
    kernelized.module.forward = torch.compile(kernelized.module.forward, backend="aot_eager")
    for found, eager in zip(gradients(kernelized), expected, strict=True):
        torch.testing.assert_close(found, eager)


# ---- Calls by keyword


def renamed(module, names):
    """Has a module's own forward take other names, whatever runs in its place."""
    own = type(module)

    def forward(self, *args, **kwargs):
        return own.forward(self, *args, *kwargs.values())

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    self_ = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([self_, *parameters])
    module.__class__ = type(own.__name__, (own,), {"forward": forward})


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layer", [name for name in LAYERS if not name.endswith(SHARED)])
def test_a_layer_takes_the_call_of_the_module_that_it_replaces(both, layer, training):
    """By the names that its own forward has for its parameters; others say that they are wrong."""
    _, case = both(layer)
    case.module.train(training)
    signature = inspect.signature(type(case.module).forward)
    own = [*signature.parameters][1 : 1 + len(case.inputs)]
    with torch.set_grad_enabled(training):
        expected = case.run()
        for names in (own, [f"other_{name}" for name in own]):
            if names != own:
                renamed(case.module, names)
            out = case.module(**dict(zip(names, case.inputs.values(), strict=True)), **case.others)
            out = out[0] if isinstance(out, tuple) else out
            assert torch.equal(out, expected), names
        if not training:
            with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
                case.module(unknown=next(iter(case.inputs.values())))


@torch.no_grad()
def test_a_call_by_another_keyword_compiles(both):
    _, case = both("RMSNorm", Mode.INFERENCE | Mode.TORCH_COMPILE)
    expected = case.run()
    renamed(case.module, ["x"])
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: case.module(x=x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*case.inputs.values()), expected)


# ---- Activations that replace nothing


@pytest.mark.parametrize("name", ["SiluAndMul", "MulAndSilu", "GeluAndMul", "GeluTanhAndMul"])
def test_an_activation_by_itself(package, device, every_case, name):
    """It trains by the definition; in evaluation it is the kernel, which has no gradient."""
    layer = getattr(package.layers, name)().train()
    x = every_case[name].inputs["x"].clone().requires_grad_()
    own = every_case[name].module
    layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    own(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x.detach()), own(x.detach()))
    with pytest.raises(RuntimeError, match="swiglu has no gradient"):
        layer.eval()(x)
    compiled = torch.compile(layer.train(), fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    compiled(x)
    assert compiled(x).requires_grad


# ---- experts_forward, for transformers' own modules


def test_experts_forward_leaves_training_to_the_module(package, every_case, monkeypatch, device):
    model = tiny("qwen3_moe").to(device)
    case = every_case["Experts"]
    x, weights = (case.inputs[name] for name in ("hidden_states", "top_k_weights"))
    ids = case.inputs["top_k_index"]
    experts = model.get_submodule("model.layers.0.mlp.experts")

    def run(module):
        a, b = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = module(a, ids, b)
        out.square().sum().backward()
        grads = [a.grad, b.grad, experts.gate_up_proj.grad.clone(), experts.down_proj.grad.clone()]
        model.zero_grad()
        return [out.detach(), *grads]

    model.train()
    expected = run(experts)
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "ours", package.layers.experts_forward
    )
    experts.config._experts_implementation = "ours"
    for found, eager in zip(run(experts), expected, strict=True):
        torch.testing.assert_close(found, eager)
    model.eval()
    with pytest.raises(RuntimeError, match="fused_moe has no gradient"):
        run(experts)
