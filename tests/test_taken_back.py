"""What use_decode_step leaves on a model beside its forward, and how it is taken back: from models
of peft's, from under another's wrapper, and where a second call is refused."""

import copy
import json

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from test_changed_between_answers import GIVEN, OPTIONS, beside
from tiny_attention import tiny
from transformers import CompileConfig, GenerationConfig, StaticCache

SAMPLED = {**OPTIONS, "do_sample": True}


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


def answers(model, **options):
    torch.manual_seed(0)
    return model.generate(**GIVEN, **options)


def test_a_model_of_pefts(package):
    """Its generate calls the base model."""
    peft = pytest.importorskip("peft")
    _, model = tiny("Llama")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    for _ in range(2):
        assert torch.equal(answers(step, **OPTIONS), answers(model, **OPTIONS))
    with step.disable_adapter(), model.disable_adapter():
        without = answers(step, **OPTIONS)
        assert torch.equal(without, answers(model, **OPTIONS))
    assert not torch.equal(without, answers(step, **OPTIONS))
    steps = package.models.decode_steps(step)
    assert steps.replayed >= 18 and steps == package.models.decode_steps(step.get_base_model())
    package.models.stop_decode_step(step)
    assert "forward" not in vars(step.get_base_model())


def test_a_refusal_leaves_an_earlier_one(package, monkeypatch):
    _, model = tiny("Llama")
    _, step = beside(package, model)
    answers(step, **OPTIONS)
    before = package.models.decode_steps(step)
    monkeypatch.setattr(package.models.decode_step, "why_not_in_place", lambda *a, **k: "so")
    with pytest.raises(ValueError, match="which cannot: so"):
        package.models.use_decode_step(step, kv_cache_dtype="fp8")
    assert package.models.decode_steps(step) == before and before.replayed > 0
    assert torch.equal(answers(step, **OPTIONS), answers(model, **OPTIONS))
    assert package.models.decode_steps(step).replayed > before.replayed


def test_nothing_of_it_is_saved(package, tmp_path):
    model, step = beside(package, tiny("Llama")[1])
    saved = []
    for each in (model, step):
        each.save_pretrained(tmp_path)
        saved.append(json.loads((tmp_path / "generation_config.json").read_text()))
    assert saved[0] == saved[1]


def test_a_step_with_a_static_cache_is_not_compiled(package):
    """It is recorded; torch.compile would see the model without what stands before it."""
    model, step = beside(package, tiny("Llama")[1])
    config = GenerationConfig(compile_config=CompileConfig())
    config.compile_config._compile_all_devices = True
    given = {"past_key_values": StaticCache(config=model.config, max_cache_len=32)}
    assert model._valid_auto_compile_criteria(given, config)
    assert not step._valid_auto_compile_criteria(given, config)
    package.models.stop_decode_step(step)
    assert step._valid_auto_compile_criteria(given, config)


class Counts(ModelHook):
    def __init__(self):
        self.count = 0

    def pre_forward(self, module, *args, **kwargs):
        self.count += 1
        return args, kwargs


@pytest.mark.parametrize("by", ["a wrapper", "accelerate"])
@pytest.mark.parametrize("options", [OPTIONS, SAMPLED])
def test_under_anothers_wrapper(package, by, options):
    """Which sees each call. A step that is stopped under it passes calls on."""
    model, step = beside(package, tiny("Llama")[1])
    inner, hook = step.forward, Counts()
    if by == "accelerate":
        add_hook_to_module(step, hook)
    else:
        step.forward = lambda *a, **k: hook.pre_forward(step) and inner(*a, **k)
    expected = answers(model, **options)
    assert torch.equal(answers(step, **options), expected) and hook.count == 8
    replayed = package.models.decode_steps(step).replayed
    assert replayed == 6
    package.models.use_decode_step(step)  # before the wrapper
    assert torch.equal(answers(step, **options), expected)
    package.models.stop_decode_step(step)
    with pytest.raises(ValueError, match="use_decode_step was not called"):
        package.models.decode_steps(step)
    assert torch.equal(answers(step, **options), expected)
    assert inner.replayed == replayed
    if by == "accelerate":
        remove_hook_from_module(step)
        assert torch.equal(answers(step, **options), expected) and inner.replayed == replayed


def test_stopped_under_a_wrapper(package):
    model, step = beside(package, tiny("Llama")[1])
    inner = step.forward
    step.forward = lambda *a, **k: inner(*a, **k)
    package.models.stop_decode_step(step)
    assert torch.equal(answers(step, **SAMPLED), answers(model, **SAMPLED))
    assert inner.replayed == 0 and not inner.passed_on
