"""Hooks of every kind, on every module of a model, before and after its forwards are replaced; and
modules that move to a device of another dialect."""

import functools

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_models import quantizing_inputs, tiny_llama, tokens
from torch import nn


@pytest.fixture
def kernelized(package):
    """Quantises a tiny Llama, which ``prepare`` may change first, and replaces its forwards."""

    def make(prepare=lambda model: None, **arguments):
        torch.manual_seed(7)
        model = tiny_llama()
        prepare(model)
        package.models.quantize_model_(model, **arguments)
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            return kernelize(model, mode=Mode.INFERENCE)

    return make


LAYER = "model.layers.1"
JOINED = ("qkv_proj", "gate_up_proj")
INSIDE = ["", *(name for name, _ in tiny_llama().model.layers[1].named_modules() if name)]


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("inside", INSIDE)
@torch.no_grad()
def test_one_hook_is_called_once_and_changes_nothing(kernelized, inside, when, kind):
    """On any module of a decoder layer whose other modules have none."""
    name, seen = f"{LAYER}.{inside}".rstrip("."), []

    def hook(model):
        register = getattr(model.get_submodule(name), f"register_{kind}_hook")
        register(lambda module, args, *output: seen.append(type(module)))

    ids = tokens(2, 5)
    expected = kernelized()(ids).logits
    model = kernelized(hook if when == "before" else lambda model: None)
    if when == "after":
        hook(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=2e-2, atol=2e-2)
    assert len(seen) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_hooks_on_all_modules_are_called_once(kernelized, when):
    """Until they are removed. Not on joined projections: the model's own code calls none."""
    seen, handles = [], []

    def hook(model):
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList) and not name.endswith(JOINED):
                note = functools.partial(lambda name, *_: seen.append(name), name)
                handles.append(module.register_forward_hook(note))

    ids = tokens(1, 5)
    model = kernelized(hook if when == "before" else lambda model: None)
    if when == "after":
        hook(model)
    model(ids)
    assert sorted(seen) == sorted(
        name for name, module in model.named_modules() if module._forward_hooks
    )
    assert {f"{LAYER}.{name}".rstrip(".") for name in INSIDE} < set(seen)
    seen.clear()
    for handle in handles:
        handle.remove()
    model(ids)
    assert seen == []


NORMS = [name for name in INSIDE if name.endswith("norm")]


@pytest.mark.parametrize("inside", [*NORMS, "self_attn.v_proj"])
@torch.no_grad()
def test_what_a_hook_returns_counts(kernelized, inside):
    """Of a norm or a joined projection, which a whole layer would compute by itself."""
    ids = tokens(2, 5)
    before = kernelized()(ids).logits
    model = kernelized()
    module = model.get_submodule(f"{LAYER}.{inside}")
    handle = module.register_forward_hook(lambda module, args, output: output * 3)
    assert (model(ids).logits - before).abs().max() > 0.1
    handle.remove()
    assert torch.equal(model(ids).logits, before)


# Every kind of hook that a module of torch takes: the method, and what it is told.
KINDS = {
    "forward": ("register_forward_hook", {}),
    "forward, keywords": ("register_forward_hook", {"with_kwargs": True}),
    "forward, always": ("register_forward_hook", {"always_call": True}),
    "before forward": ("register_forward_pre_hook", {}),
    "before forward, keywords": ("register_forward_pre_hook", {"with_kwargs": True}),
    "backward": ("register_full_backward_hook", {}),
    "before backward": ("register_full_backward_pre_hook", {}),
}


def test_every_kind_of_hook_is_known():
    names = {name for name in dir(nn.Module) if name.startswith("register_") and "ward" in name}
    assert names == {method for method, _ in KINDS.values()} | {"register_backward_hook"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linear", ["self_attn.k_proj", "mlp.down_proj"])
def test_hooks_of_every_kind_are_handed_over(package, kind, linear):
    """To the FP8 linear that takes a module's place: with what they are told, and removable."""
    method, options = KINDS[kind]
    model, seen = tiny_llama(), []
    old = model.get_submodule(f"{LAYER}.{linear}")
    handle = getattr(old, method)(lambda module, *told: seen.append(told), **options)
    package.models.quantize_model_(model)
    new = model.get_submodule(f"{LAYER}.{linear}")
    assert type(new) is not nn.Linear
    x = torch.randn(3, new.in_features, requires_grad=True)
    y = new(input=x) if "keywords" in kind else new(x)
    y.sum().backward()
    assert len(seen) == 1
    if "keywords" in kind:
        assert seen[0][0] == () and seen[0][1]["input"] is x
    elif "backward" not in kind:
        assert seen[0][0][0] is x
    if "always" in kind:
        with pytest.raises(RuntimeError):
            new(torch.randn(3, new.in_features + 1))
        assert len(seen) == 2 and seen[1][1] is None, "called though the forward has failed"
    handle.remove()
    count = len(seen)
    new(x)
    assert len(seen) == count


@torch.no_grad()
def test_a_hook_that_is_always_called_is_after_a_kernel_too(kernelized):
    seen = []

    def hook(model):
        for name in ("self_attn.o_proj", "mlp.down_proj", "mlp", "input_layernorm", ""):
            module = model.get_submodule(f"{LAYER}.{name}".rstrip("."))
            module.register_forward_hook(lambda m, *_: seen.append(m), always_call=True)

    model = kernelized(hook)
    hooked = [module for module in model.modules() if module._forward_hooks_always_called]
    assert len(hooked) == 5
    for module in hooked:
        seen.clear()
        with pytest.raises((RuntimeError, ValueError, AttributeError, TypeError)):
            module(torch.randn(3, 7))
        assert seen[-1] is module


# ---- accelerate's


class Counts:
    """Made a hook of accelerate's below, which is imported with the test."""

    def __init__(self):
        self.calls = []

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append("before")
        return args, kwargs

    def post_forward(self, module, output):
        self.calls.append("after")
        return output


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("inside", INSIDE)
@torch.no_grad()
def test_accelerates_hooks_are_all_called(kernelized, inside, count):
    """One, and a sequence of them."""
    from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module

    counting = type("Counting", (Counts, ModelHook), {})
    hooks = [counting() for _ in range(count)]

    def add(model):
        module = model.get_submodule(f"{LAYER}.{inside}".rstrip("."))
        for hook in hooks:
            add_hook_to_module(module, hook, append=True)
        assert isinstance(module._hf_hook, SequentialHook) == (count > 1)

    ids = tokens(1, 5)
    expected = kernelized()(ids).logits
    model = kernelized(add)
    torch.testing.assert_close(model(ids).logits, expected, rtol=2e-2, atol=2e-2)
    assert [hook.calls for hook in hooks] == count * [["before", "after"]]


@torch.no_grad()
def test_accelerates_hook_on_an_activation_that_kernelize_does_not_see(kernelized):
    """As most are beside a transformers that decorates none: its hook stays in its forward."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    hook = type("Counting", (Counts, ModelHook), {})()

    def add(model):
        mlp = model.get_submodule(f"{LAYER}.mlp")
        mlp.act_fn = add_hook_to_module(nn.SiLU(), hook)

    model = kernelized(add)
    model(tokens(1, 5))
    assert hook.calls == ["before", "after"]


@pytest.mark.parametrize("place", ["first", "last"])
@torch.no_grad()
def test_a_weight_that_one_hook_in_a_sequence_offloads_stays(kernelized, package, place):
    from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module

    counts = type("Counting", (Counts, ModelHook), {})()
    weights = {}

    def offload(model):
        module = model.get_submodule(f"{LAYER}.mlp.down_proj")
        weights.update({"weight": module.weight.detach().clone()})
        align = AlignDevicesHook("cpu", offload=True, weights_map=weights)
        for hook in (align, counts) if place == "first" else (counts, align):
            add_hook_to_module(module, hook, append=True)

    ids = tokens(1, 5)
    expected = kernelized(skip=[f"{LAYER}.mlp.down_proj"])(ids).logits
    model = kernelized(offload)
    down = model.get_submodule(f"{LAYER}.mlp.down_proj")
    assert type(down) is nn.Linear and down.weight.device.type == "meta"
    torch.testing.assert_close(model(ids).logits, expected, rtol=2e-2, atol=2e-2)
    assert counts.calls == ["before", "after"]


@pytest.mark.parametrize("around", [None, "cpu", "meta"])
def test_a_hook_that_brings_inputs_elsewhere_stays(package, around):
    """One that brings them to where the module around has brought them is dropped."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny_llama()
    for name, device in {
        "model": around,
        f"{LAYER}.mlp": "cpu",
        f"{LAYER}.mlp.act_fn": "cpu",
    }.items():
        if device:
            hook = AlignDevicesHook(execution_device=device)
            add_hook_to_module(model.get_submodule(name), hook)
    package.models.quantize_model_(model)
    assert ("_hf_hook" in vars(model.get_submodule(f"{LAYER}.mlp"))) == (around != "cpu")
    assert "_hf_hook" not in vars(model.get_submodule(f"{LAYER}.mlp.act_fn"))
    if around != "meta":
        model(tokens(1, 3))


# ---- moves


class Elsewhere(torch.Tensor):
    """On the CPU, and says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))


@pytest.fixture
def moves():
    """Modules get new parameters as they move, for a parameter's class is what lies here."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield lambda module: module._apply(lambda tensor: tensor.as_subclass(torch.Tensor))
    torch.__future__.set_overwrite_module_params_on_conversion(False)


OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def elsewhere(module):
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.data.as_subclass(Elsewhere), False)
    return module


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_a_linear_takes_the_dialect_of_the_device_that_it_moves_to(package, moves, scheme):
    """From an MI300X, say, to a CPU: with its scales, and the values as they were."""
    weight, scale = package.reference.quantize_fp8(torch.randn(16, 32), fp8_dtype=FNUZ)
    static = torch.tensor([0.5]) if scheme == "static" else None
    linear = package.models.FP8Linear(weight, scale, None, scheme, activation_scale=static)
    before = weight.float().clamp(-224, 224) * scale  # OCP has no 240
    moves(elsewhere(linear))
    assert linear.weight.dtype == OCP and linear.weight.device.type == "cpu"
    assert torch.equal(linear.weight.data.float() * linear.weight_scale_inv.data, before)
    if scheme == "static":  # what a code of the input means is twice as much in OCP's dialect
        assert linear.activation_scale.item() == 0.25


def test_experts_take_the_dialect_of_the_device_that_they_move_to(package, moves):
    quantised = [
        package.reference.quantize_fp8(torch.randn(2 * n, k), fp8_dtype=FNUZ)
        for n, k in ((64, 32), (32, 32))
    ]
    pairs = [(q.view(2, -1, q.shape[1]), s.view(2, -1, 1)) for q, s in quantised]
    before = [q.float().clamp(-224, 224) * s for q, s in pairs]
    gate = ("silu", float("inf"), False)
    experts = package.models.Experts(*pairs, (None, None), gate, "dynamic")
    moves(elsewhere(experts))
    after = [(experts.gate_up_proj, experts.gate_up_proj_scale_inv),
             (experts.down_proj, experts.down_proj_scale_inv)]  # fmt: skip
    for (weight, scale), values in zip(after, before, strict=True):
        assert weight.dtype == OCP
        torch.testing.assert_close(weight.data.float() * scale.data, values, rtol=0, atol=0)


@torch.no_grad()
def test_a_model_takes_the_dialect_of_the_gpu_that_it_moves_to(package, gpu):
    model = tiny_llama()
    package.models.quantize_model_(model, fp8_dtype=FNUZ)
    linears = [m for m in model.modules() if isinstance(m, package.models.FP8Linear)]
    values = [m.weight.float().clamp(-224, 224) * m.weight_scale_inv for m in linears]
    model.to(gpu)
    native = package.native_fp8_dtype(gpu)
    assert linears and {linear.weight.dtype for linear in linears} == {native}
    for linear, expected in zip(linears, values, strict=True):
        actual = linear.weight.float() * linear.weight_scale_inv
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=0)
    ids = tokens(1, 5, gpu)
    expected = quantizing_inputs(package, model)(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_weights_of_a_dialect_are_kept_where_nothing_moves(package):
    model = tiny_llama()
    package.models.quantize_model_(model, fp8_dtype=FNUZ)
    assert model.to("cpu").half().model.layers[0].mlp.down_proj.weight.dtype == FNUZ


def test_hooks_that_collect_nothing_leave_layers_whole(package, kernelized):
    """transformers leaves some in a model whose states were asked for once. Those that collect see
    what they ask for."""
    model = kernelized()
    layer = model.get_submodule(LAYER)
    with torch.inference_mode():
        states = model(tokens(2, 5), output_hidden_states=True).hidden_states
    assert len(states) == 3
    is_hooked = package.models.hooks.is_hooked
    assert layer._forward_hooks and not is_hooked(layer)
    handle = layer.register_forward_hook(lambda *a: None)
    assert is_hooked(layer)
    handle.remove()
    assert not is_hooked(layer)
