"""What a recorded step takes for granted of a model (models/model_state.py): each change of it is
seen, however the last look was made, and none is seen where nothing has changed."""

import types

import pytest
import torch
from tiny_models import tiny_llama
from transformers import LlamaConfig


def linear(model):
    return model.model.layers[1].mlp.down_proj


def another_class(model):
    module = linear(model)
    module.__class__ = type("Other", (type(module),), {})


def another_name(model):
    kept = vars(linear(model))
    kept["other_factor"] = kept.pop("factor")  # the last one: all stands where it stood


CHANGES = {
    "a weight": lambda model: setattr(
        linear(model), "weight", torch.nn.Parameter(linear(model).weight.detach().clone())
    ),
    "where a weight lies": lambda model: setattr(
        linear(model).weight, "data", linear(model).weight.detach().clone()
    ),
    "an equal weight of one element": lambda model: setattr(
        linear(model), "one", torch.nn.Parameter(linear(model).one.detach().clone())
    ),
    "a buffer": lambda model: linear(model).register_buffer("more", torch.ones(3)),
    "a module": lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.GELU()),
    "one more, behind all": lambda model: model.lm_head.add_module("more", torch.nn.Identity()),
    "the order of layers": lambda model: model.model.layers.insert(0, model.model.layers.pop(1)),
    "a class": another_class,
    "a forward": lambda model: setattr(
        linear(model), "forward", types.MethodType(torch.nn.Linear.forward, linear(model))
    ),
    "a hook": lambda model: linear(model).register_forward_hook(lambda *a: None),
    "a number": lambda model: setattr(linear(model), "factor", 2.5),
    "a name": another_name,
    "a list": lambda model: linear(model).names.append("b"),
    "a list within": lambda model: linear(model).scales["a"].append(2),
    "the order of names": lambda model: linear(model).scales.update(
        a=linear(model).scales.pop("a")
    ),
    "a list that held a module": lambda model: linear(model).modules_kept.clear(),
    "sums": lambda model: vars(linear(model)).update(sums=object()),
    "the attention": lambda model: setattr(model.config, "_attn_implementation", "eager"),
    "a number of the configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "a list of it": lambda model: model.config.kept.append(2),
    "a number of one within": lambda model: setattr(model.config.within, "hidden_size", 7),
    "one within": lambda model: setattr(model.config, "within", LlamaConfig(hidden_size=64)),
    "a module that trains": lambda model: linear(model).train(),
}


@pytest.fixture
def model():
    model = tiny_llama()
    module = linear(model)
    module.names, module.scales = ["a"], {"a": [1], "b": [1]}
    module.modules_kept = [torch.nn.Identity()]
    module.factor = 1000.5
    model.config.kept, model.config.within = [1], LlamaConfig()
    module.one = torch.nn.Parameter(torch.ones(1))
    module.register_buffer("moved", torch.ones(2))
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(cpu_package, model, change):
    state = cpu_package.models.model_state
    last = state.LastFingerprint()
    before = last.of(model)
    assert last.of(model) is before == state.fingerprint(model)
    CHANGES[change](model)
    after = last.of(model)
    assert after != before and after == state.fingerprint(model)
    assert last.of(model) is after


def test_answers_end_where_a_buffer_gets_another_owner(cpu_package, model):
    """Though the names and tensors of all modules stay in their order."""
    last = cpu_package.models.model_state.LastFingerprint()
    last.of(model)
    mlp, answers = model.model.layers[1].mlp, last.answers
    last.of(model)
    assert last.answers is answers
    mlp.act_fn.register_buffer("moved", mlp.down_proj._buffers.pop("moved"))
    last.of(model)
    assert last.answers is not answers


class Incomparable:
    def __eq__(self, other):
        return self.no_such_attribute


@pytest.mark.parametrize("make", [Incomparable, lambda: torch.ones(2)])
def test_answers_end_where_what_cannot_be_compared_becomes_another(cpu_package, model, make):
    last = cpu_package.models.model_state.LastFingerprint()
    linear(model).helper = make()
    last.of(model)
    answers = last.answers
    last.of(model)
    assert last.answers is answers
    linear(model).helper = make()
    last.of(model)
    assert last.answers is not answers


def test_what_is_the_same_again_is_no_change(cpu_package, model):
    last = cpu_package.models.model_state.LastFingerprint()
    before = last.of(model)
    linear(model).factor, linear(model).names = 1000.25 * 2 - 1000, ["a"]
    linear(model).training = False
    model.config.id2label = {0: "a"}
    model.config._experts_implementation_internal = "batched_mm"  # as generate does on a GPU
    assert last.of(model) == before


def test_a_module_that_a_hook_may_see_any_time(cpu_package, model):
    """A hook on all modules is in no module."""
    last = cpu_package.models.model_state.LastFingerprint()
    before = last.of(model)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        assert last.of(model) != before
    finally:
        handle.remove()
    assert last.of(model) == before
