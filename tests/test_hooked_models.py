"""Hooks on any module of a kernelized model see what they would see in the model's own forward:
plain tensors of the same shapes and values, which nobody writes to afterwards."""

import copy

import pytest
import torch
from test_families import tiny
from tiny_models import tiny_llama, tokens

FAMILIES = ("llama", "phi3", "gemma2", "granite", "olmo2", "qwen3_moe", "gpt_oss", "llama4_text",
            "deepseek_v3")  # fmt: skip
EVERY = torch.nn.modules.module


@pytest.fixture
def package(best_package):
    return best_package


def model_of(family):
    return tiny_llama() if family == "llama" else tiny(family)


def described(value):
    """Types, shapes and dtypes, of whatever is in it."""
    if isinstance(value, torch.Tensor):
        return type(value), tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), [described(each) for each in value]
    if isinstance(value, dict):
        return {name: described(each) for name, each in value.items()}
    return type(value)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


class Seen:
    """What hooks of every kind have seen of a module: once as it was, once as it is kept."""

    def __init__(self):
        self.calls, self.kept = [], []

    def note(self, value):
        self.kept.append((tensors_in(value), [t.clone() for t in tensors_in(value)]))

    def before(self, module, args):
        self.note(args)

    def before_with_keywords(self, module, args, kwargs):
        self.calls.append((described(args), described(kwargs), self.copied((args, kwargs))))
        self.note((args, kwargs))

    def after(self, module, args, kwargs, output):
        self.calls.append((described(args), described(output), self.copied(output)))
        self.note((args, kwargs, output))

    def copied(self, value):
        return [tensor.clone() for tensor in tensors_in(value)]

    def hook(self, module):
        return [
            module.register_forward_pre_hook(self.before),
            module.register_forward_pre_hook(self.before_with_keywords, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def untouched(self):
        """Of each tensor, whether it is still what it was."""
        return [
            torch.equal(tensor.nan_to_num(), copied.nan_to_num())
            for kept, copies in self.kept
            for tensor, copied in zip(kept, copies, strict=True)
        ]

    def assert_untouched(self):
        assert all(self.untouched())

    def assert_alike(self, reference, values):
        assert len(self.calls) == len(reference.calls)
        for own, other in zip(self.calls, reference.calls, strict=True):
            assert own[:2] == other[:2]
            if values:
                for one, expected in zip(own[2], other[2], strict=True):
                    torch.testing.assert_close(one, expected, rtol=2e-3, atol=2e-3)


def hooked_run(model, names, ids):
    seen = {name: Seen() for name in names}
    handles = [h for name in names for h in seen[name].hook(model.get_submodule(name))]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def is_exact(family):
    """Where kernels and reference compute in float32: fused_moe takes bfloat16."""
    return family in ("llama", "phi3", "gemma2", "granite", "olmo2")


@pytest.mark.parametrize("activations", ["none", "dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_hook_on_any_module(package, run_kernelized, device, family, activations):
    """Registered after kernelize: on one module at a time, and the layers around it find out."""
    model = model_of(family).to(device)
    package.models.quantize_model_(model, activations=activations)
    original, ids = copy.deepcopy(model), tokens(2, 7, device)
    names = [name for name, _ in original.named_modules()]
    expected = hooked_run(original, names, ids)
    run_kernelized(model)
    logits = model(ids, use_cache=False).logits
    for name in names:
        seen = hooked_run(model, [name], ids)[name]
        seen.assert_untouched()
        if expected[name].calls:
            exact = activations == "none" and is_exact(family)
            seen.assert_alike(expected[name], exact)
        for call in seen.calls:  # also where the model's own forward never goes: a joined linear
            assert not any("rocm_kernels" in text for text in types_in(call)), name
    assert torch.equal(model(ids, use_cache=False).logits, logits)


def types_in(value):
    if isinstance(value, type):
        return [value.__module__]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in types_in(each)]
    return []


@pytest.mark.parametrize("when", ["before quantize", "before kernelize"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
@torch.no_grad()
def test_a_hook_that_was_there_before(package, run_kernelized, device, family, when):
    fresh, ids = model_of(family), tokens(2, 7, device)
    original = copy.deepcopy(fresh).to(device)
    package.models.quantize_model_(original, activations="none")
    names = [name for name, _ in fresh.named_modules() if "layers.1" in name or "." not in name]
    expected = hooked_run(original, names, ids)
    for name in names:
        model, seen = copy.deepcopy(fresh).to(device), Seen()
        if when == "before quantize":
            seen.hook(model.get_submodule(name))
        package.models.quantize_model_(model, activations="none")
        if when == "before kernelize":
            seen.hook(model.get_submodule(name))
        run_kernelized(model)(ids, use_cache=False)
        seen.assert_untouched()
        seen.assert_alike(expected[name], True)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_hooks_of_all_modules(package, run_kernelized, device, family):
    """torch's global hooks: they come and go, and the model computes the same after."""
    model = model_of(family).to(device)
    package.models.quantize_model_(model, activations="none")
    original, ids = copy.deepcopy(model), tokens(2, 7, device)
    run_kernelized(model)
    logits = model(ids, use_cache=False).logits
    seen = []
    for each in (original, model):
        found, names = Seen(), {id(m): name for name, m in each.named_modules()}
        called = []

        def before(module, args, found=found, names=names, called=called):
            called.append((names.get(id(module)), described(args)))
            found.note(args)

        def after(module, args, output, found=found):
            found.note((args, output))

        handles = [
            EVERY.register_module_forward_pre_hook(before),
            EVERY.register_module_forward_hook(after),
        ]
        each(ids, use_cache=False)
        for handle in handles:
            handle.remove()
        seen.append((called, found.untouched()))
    assert seen[1] == seen[0]
    assert all(seen[1][1]) or family == "llama4_text"  # its own code adds to its shared expert's
    assert torch.equal(model(ids, use_cache=False).logits, logits)


@pytest.mark.parametrize("part", ["self_attn", "self_attn.o_proj", "mlp", "mlp.down_proj"])
@torch.no_grad()
def test_a_result_that_a_hook_puts_in_is_its_own(package, run_kernelized, device, part):
    model, ids = tiny_llama().to(device), tokens(1, 5, device)
    package.models.quantize_model_(model)
    run_kernelized(model)
    own = torch.randn(1, 5, 96, device=device)
    before, module = own.clone(), model.model.layers[0].get_submodule(part)
    results = {"self_attn": lambda output: (own, *output[1:])}
    put_in = results.get(part, lambda output: own)
    module.register_forward_hook(lambda module, args, output: put_in(output))
    model(ids)
    assert torch.equal(own, before)


@torch.no_grad()
def test_an_attention_may_keep_its_result(package, run_kernelized, device):
    """No hook tells: its own code does."""
    model, ids = tiny_llama().to(device), tokens(1, 5, device)
    package.models.quantize_model_(model)
    run_kernelized(model)
    attention, kept = model.model.layers[0].self_attn, []
    cls = type(attention)

    class Keeps(cls):
        def forward(self, *args, **kwargs):
            results = super().forward(*args, **kwargs)
            kept.append((results[0], results[0].clone()))
            return results

    attention.__class__ = Keeps
    model(ids)
    ((result, copied),) = kept
    assert torch.equal(result, copied)
