"""What a recorded step would not notice, and what becomes of its cache in other hands."""

import contextlib
import copy
import pickle

import pytest
import torch
from tiny_attention import SIZES, WITH_LOGITS, assert_same_answers, prompt, tiny
from tiny_models import randomized
from transformers import DynamicCache, LlamaModel, Phi3Config, Phi3ForCausalLM

GIVEN = prompt()
LONG_ROTATION = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 18,
    "short_factor": [1.0] * 8, "long_factor": [float(i + 2) for i in range(8)],
}  # fmt: skip
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


@pytest.fixture
def pair(package):
    """A model, and one of the same weights with use_decode_step."""
    _, model = tiny("Llama")
    package.models.use_attention(model)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    return model, step


class Switched(torch.nn.Module):
    """As adapters of peft are."""

    def __init__(self, inner, kept):
        super().__init__()
        self.inner, self.kept = inner, kept

    def forward(self, x):
        kept = self.kept
        while not isinstance(kept, float):
            kept = kept["default"] if isinstance(kept, dict) else kept[0]
        return self.inner(x) * kept


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: [x], lambda x: {"default": x}])
def test_a_number_of_a_module_is_seen(package, pair, wrapped):
    """That an adapter is off, its factor, which one is on."""
    said = []
    for each in pair:
        mlp = each.model.layers[1].mlp
        mlp.down_proj = Switched(mlp.down_proj, wrapped(1.0))
        for factor in (1.0, -1.0, -1.0, 0.0):
            mlp.down_proj.kept = wrapped(factor)
            said.append(each.generate(**GIVEN, **OPTIONS))
    for expected, got in zip(said[:4], said[4:], strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(said[0], said[1])
    assert package.models.decode_steps(pair[1]).recorded == 3


def test_peft_turns_an_adapter_off(package, pair):
    peft = pytest.importorskip("peft")
    said = []
    for each in pair:
        config = peft.LoraConfig(target_modules=["down_proj"], r=4, init_lora_weights=False)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(each, config).eval()
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_()
        said.append(adapted.generate(**GIVEN, **OPTIONS))
        with adapted.disable_adapter():
            said.append(adapted.generate(**GIVEN, **OPTIONS))
    assert torch.equal(said[0], said[2]) and torch.equal(said[1], said[3])
    assert not torch.equal(said[0], said[1])


class Counting(torch.nn.Module):
    """Its result depends on how often it was called: what it keeps is no parameter."""

    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind = inner, kind
        self.count = {"number": 0, "tensor": torch.zeros(())}.get(kind)
        if "buffer" in kind:
            del self.count
            self.register_buffer("count", torch.zeros(()), persistent=kind == "buffer")

    def forward(self, x):
        self.count = self.count + 1
        return self.inner(x) * (1 + 0.1 * self.count)


@pytest.mark.parametrize("kind", ["number", "tensor", "buffer", "buffer of nobody"])
def test_a_state_that_a_module_keeps_is_not_recorded(package, kind):
    said = []
    for stepping in (False, True):
        torch.manual_seed(1)
        _, model = tiny("Llama")
        mlp = model.model.layers[1].mlp
        mlp.down_proj = Counting(mlp.down_proj, kind)
        package.models.use_attention(model)
        if stepping:
            package.models.use_decode_step(model)
        assert int(mlp.down_proj.count) == 0
        said.append(model.generate(**GIVEN, **OPTIONS))
        assert int(mlp.down_proj.count) == 12
    assert torch.equal(*said)
    steps = package.models.decode_steps(model)
    why = "model.layers.1.mlp.down_proj keeps a count from step to step in itself"
    assert steps.replayed == 0 and why in steps.passed_on


def test_frequencies_that_each_step_makes_anew_are_no_state(package):
    """As of long rotations, whose choice turns within an answer: at a position, whoever has
    computed the one before. What was recorded stays, and a copy has buffers of its own."""
    torch.manual_seed(1)
    _, model = tiny("Llama", rope_parameters=LONG_ROTATION)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    said = [each.generate(**GIVEN, **WITH_LOGITS, max_new_tokens=12) for each in (model, step)]
    assert_same_answers(*said)
    for each in (step, copy.deepcopy(step)):
        for count in (3, 12):
            options = {**OPTIONS, "max_new_tokens": count}
            assert torch.equal(
                each.generate(**GIVEN, **options), model.generate(**GIVEN, **options)
            )
        steps = package.models.decode_steps(each)
        assert steps.replayed >= 11, steps
    assert package.models.decode_steps(step).recorded == 2  # with logits, and with choices
    short = model.model.rotary_emb.original_inv_freq
    model.model.rotary_emb.long_inv_freq.copy_(short)
    assert not torch.equal(step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS))


def test_an_answer_that_lets_go_of_its_cache_gets_another(package):
    """Phi-3's does where its rotation turns, and at each prompt that is longer. A caller's own
    cache, or none, stays the caller's."""
    config = Phi3Config(**SIZES, rope_parameters=LONG_ROTATION, original_max_position_embeddings=18)
    torch.manual_seed(1)
    model = randomized(Phi3ForCausalLM(config))
    model.set_attn_implementation("rocm_kernels")
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    long = prompt(3, 20)
    for given, replayed in ((GIVEN, 8), (long, 11)):
        before = package.models.decode_steps(step).replayed
        assert torch.equal(step.generate(**given, **OPTIONS), model.generate(**given, **OPTIONS))
        assert package.models.decode_steps(step).replayed - before == replayed
    assert "it has no cache, or no tokens" not in package.models.decode_steps(step).passed_on
    with torch.no_grad():
        assert type(step(**GIVEN, use_cache=True).past_key_values) is DynamicCache
    own = DynamicCache(config=config)
    step.generate(**GIVEN, **OPTIONS, past_key_values=own)
    assert type(own) is DynamicCache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_without(package, pair, dtype):
    """Keys are in float32 then and values are not; the next answer's are both."""
    contexts = (
        torch.autocast("cpu", dtype), contextlib.nullcontext(), torch.autocast("cpu", dtype),
    )  # fmt: skip
    for context in contexts:
        with context:
            options = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}
            expected, got = (each.generate(**GIVEN, **options) for each in pair)
            assert torch.equal(got.sequences[:, :13], expected.sequences[:, :13])
            distance = (got.logits[0] - expected.logits[0]).norm()
            assert distance < 0.03 * expected.logits[0].norm()  # in 16 bits
            if not torch.is_autocast_enabled("cpu"):
                torch.testing.assert_close(got.logits, expected.logits)
        del expected, got  # the next answer has this one's storage


def test_a_prompt_that_fails_leaves_nothing_behind(package, pair):
    model, step = pair
    with pytest.raises(IndexError):
        step.generate(torch.full((3, 5), 1 << 20), **OPTIONS)
    assert torch.equal(step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS))


def test_a_cache_goes_on_behind_the_back_of_a_step(package, pair):
    """The model below is called with a cache, which nobody has told the step of."""
    said = []
    for each in pair:
        cache = each.generate(**GIVEN, **OPTIONS, return_dict_in_generate=True).past_key_values
        with torch.no_grad():
            each.model(GIVEN["input_ids"][:, :2], past_key_values=cache)
            for _ in range(3):
                said.append(each(GIVEN["input_ids"][:, :1], past_key_values=cache).logits)
        assert int(cache.get_seq_length()) == 12 + 11 + 2 + 3
    for expected, got in zip(said[:3], said[3:], strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_cache_is_pickled_as_a_dynamic_one(package, pair, in_fp8):
    """And gives keys and values as that does."""
    model, step = pair
    if in_fp8:
        package.models.use_decode_step(step, kv_cache_dtype="fp8")
    given = prompt(padding=(0, 0, 0))
    kept = [each.generate(**given, **OPTIONS, return_dict_in_generate=True) for each in pair]
    exact, cache = (each.past_key_values for each in kept)
    again = pickle.loads(pickle.dumps(cache))
    assert type(again) is DynamicCache and again.get_seq_length() == exact.get_seq_length()
    for cached in (cache, again):
        for one, other in zip(cached, exact, strict=True):
            for states, expected in zip(one[:2], other[:2], strict=True):
                assert states.shape == expected.shape
                # Of the prompt: behind it answers may part, in FP8. That has 3 bits.
                distance = (states[:, :, :12].float() - expected[:, :, :12]).norm()
                assert distance <= (0.1 if in_fp8 else 1e-6) * expected.norm()
    if not in_fp8:
        ids = torch.cat([kept[0].sequences, kept[0].sequences[:, :4]], 1)
        rest = {"attention_mask": torch.ones_like(ids), **OPTIONS}
        expected = model.generate(ids, past_key_values=exact, **rest)
        assert torch.equal(step.generate(ids, past_key_values=again, **rest), expected)


def test_a_model_without_generate_is_refused(package):
    _, model = tiny("Llama")
    base = LlamaModel(model.config)
    with pytest.raises(ValueError, match=r"must have generate, and be a decoder .* got LlamaModel"):
        package.models.use_decode_step(base)
    assert "forward" not in vars(base)


def test_a_refused_model_is_as_it_was(package, monkeypatch):
    """FP8 caches are not for an attention of the model's own."""
    _, model = tiny("Llama")
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *a: False)
    with pytest.raises(ValueError, match=r"which cannot: .*call use_attention"):
        package.models.use_decode_step(model, kv_cache_dtype="fp8")
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model) and not model.generation_config.disable_compile


def test_a_model_that_reads_rows_without_a_token_is_refused(package, monkeypatch):
    """An empty cache in place holds zeros there, so that a short answer would not show it."""
    _, model = tiny("Llama")
    forward = type(model).forward

    def reads_all_rows(self, *args, past_key_values=None, **kwargs):
        said = forward(self, *args, past_key_values=past_key_values, **kwargs)
        said.logits += past_key_values.layers[0].keys.float().abs().amax()
        return said

    monkeypatch.setattr(type(model), "forward", reads_all_rows)
    with pytest.raises(ValueError, match=r"which cannot: it reads rows .* hold nothing yet"):
        package.models.use_decode_step(model)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_states_that_were_asked_for_once(package, pair, asked):
    """transformers leaves hooks in a model then. They are in nobody's way later."""
    model, step = pair
    options = {**OPTIONS, asked: True, "return_dict_in_generate": True}
    given = prompt(padding=(0, 0, 0))
    expected, got = (each.generate(**given, **options) for each in pair)
    assert torch.equal(got.sequences, expected.sequences)
    for one, other in zip(got.hidden_states or (), expected.hidden_states or (), strict=True):
        for states, others in zip(one, other, strict=True):
            torch.testing.assert_close(states, others)
    if asked == "output_attentions":
        assert len(got.attentions) == 12 and got.attentions[3][0].shape[:3] == (3, 4, 1)
        for one, other in zip(got.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(one, other)
        for each in pair:  # for nobody
            each.generate(**given, **OPTIONS, output_attentions=True)
    package.models.use_decode_step(step)
    assert torch.equal(step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS))
    assert package.models.decode_steps(step).replayed == 10


def test_hooks_that_collect_nothing_leave_layers_whole(package, run_kernelized):
    """And those that collect see what they ask for."""
    _, model = tiny("Llama", torch.bfloat16, head_dim=64)
    package.models.quantize_model_(model)
    run_kernelized(model)
    layer = model.model.layers[1]
    with torch.inference_mode():
        ids = GIVEN["input_ids"].to(model.device)
        states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    is_hooked = package.models.hooks.is_hooked
    assert layer._forward_hooks and not is_hooked(layer)
    handle = layer.register_forward_hook(lambda *a: None)
    assert is_hooked(layer)
    handle.remove()
    assert not is_hooked(layer)
