"""What is changed of a model with use_decode_step between two answers, or of a cache between two
calls: the next one says what the model says without it."""

import copy

import pytest
import torch
from tiny_attention import prompt, stepping, tiny
from transformers import DynamicCache, StaticCache

GIVEN = prompt(2, 9, (0, 0))
OPTIONS = {"max_new_tokens": 8, "do_sample": False}
WITH_LOGITS = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


def beside(package, model, **options):
    """The model, and a copy of it with use_decode_step."""
    return model, stepping(package, model, **options)


def logits(model, given=GIVEN, **options):
    return torch.stack(model.generate(**given, **{**WITH_LOGITS, **options}).logits)


def assert_alike(pair, act):
    got, expected = (act(each) for each in reversed(pair))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def turn_head(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0)


WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [turn_head, hook])
def test_a_model_changed_before_an_answer_goes_on(package, change, way):
    """The first call of such an answer has one token, as those that are replayed have."""
    options = {**OPTIONS, **WAYS[way]}
    given = prompt(1, 9, (0,)) if way == "lookup" else GIVEN

    def go_on(model):
        torch.manual_seed(0)
        said = model.generate(**given, **{**WITH_LOGITS, **options})
        change(model)
        cache = said.past_key_values
        return model.generate(said.sequences, past_key_values=cache, **options)

    assert_alike(beside(package, tiny("Llama")[1]), go_on)


def test_a_model_changed_before_a_prompt_of_one_token(package):
    """In a static cache, which nobody can ask how much it holds without waiting for the device."""
    token = prompt(2, 1, (0, 0))

    def act(model):
        cache = StaticCache(config=model.config, max_cache_len=64)
        logits(model, token, past_key_values=cache)
        cache.reset()
        turn_head(model)
        return logits(model, token, past_key_values=cache)

    assert_alike(beside(package, tiny("Llama")[1]), act)


@pytest.mark.parametrize("name", ["sdpa", "eager", "rocm_kernels_flash_attention_2"])
@pytest.mark.parametrize("by_config", [False, True])
def test_another_attention(package, name, by_config):
    """One that was not asked whether it knows of a cache's room has an ordinary cache; so has an
    answer that goes on. The first is ours again later."""
    if name == "rocm_kernels_flash_attention_2" and by_config:
        pytest.skip("a model may refuse its masks")
    _, model = tiny("Llama")
    pair = beside(package, model)

    def choose(model, name):
        if by_config:
            model.config._attn_implementation = name
        else:
            model.set_attn_implementation(name)

    def act(model):
        said = [logits(model)]
        kept = model.generate(**GIVEN, **WITH_LOGITS)
        choose(model, name)
        said.append(logits(model))
        given = {"input_ids": kept.sequences}
        said.append(logits(model, given, past_key_values=kept.past_key_values))
        assert not hasattr(kept.past_key_values, "grow")
        choose(model, "rocm_kernels")
        return torch.stack([*said, logits(model)])

    got, expected = (act(each) for each in reversed(pair))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    steps = package.models.decode_steps(pair[1])
    why = f"the attention is {name} now, and was rocm_kernels for use_decode_step"
    assert steps.passed_on[why] == 16 and steps.replayed >= 18, steps


def cap(model):
    model.config.final_logit_softcapping = None


def shown(model):
    model.config.output_hidden_states = True


@pytest.mark.parametrize("change", [cap, shown])
def test_a_number_of_the_configuration(package, change):
    """That a forward asks for itself."""
    pair = beside(package, tiny("Gemma2", final_logit_softcapping=0.5)[1])

    def steps(model):
        cache, token = DynamicCache(config=model.config), GIVEN["input_ids"][:, :1]
        with torch.no_grad():
            model(**GIVEN, past_key_values=cache)
            return [model(token, past_key_values=cache) for _ in range(4)]

    def act(model):
        steps(model)
        logits(model)
        change(model)
        said = logits(model)
        for each in steps(model):
            assert (each.hidden_states is None) == (change is cap)
        return said

    assert_alike(pair, act)


def test_a_dropout_alone_that_trains(package):
    """Draws anew in each step."""
    _, model = beside(package, tiny("Llama", attention_dropout=0.0)[1])
    dropout = torch.nn.Dropout(0.5)
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, dropout.eval())
    token = GIVEN["input_ids"][:, :1]
    for trains in (False, True):
        dropout.train(trains)
        cache, said = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(**GIVEN, past_key_values=cache)
            for _ in range(5):
                said.append(model(token, past_key_values=cache).logits)
                cache.crop(-1)
        assert any(torch.equal(said[-1], each) for each in said[:-1]) != trains
    assert package.models.decode_steps(model).replayed >= 6


def one(model, token, cache, **more):
    with torch.no_grad():
        return model(token, past_key_values=cache, use_cache=True, **more).logits[:, -1]


def sinks_and_last(cache):
    for layer in cache.layers:
        layer.keys = torch.cat([layer.keys[:, :, :2], layer.keys[:, :, -4:]], 2)
        layer.values = torch.cat([layer.values[:, :, :2], layer.values[:, :, -4:]], 2)


def weaker(cache):
    for layer in cache.layers:
        layer.values = layer.values * 0.9


def shorter(cache):
    for layer in cache.layers:
        layer.crop(-1)


def weaker_in_place(cache):
    for layer in cache.layers:
        layer.keys[:, :, -1] *= 0.5
        layer.values.mul_(0.9)


@pytest.mark.parametrize("edit", [sinks_and_last, weaker, shorter, weaker_in_place])
def test_a_cache_that_its_owner_edits(package, edit):
    """The tokens that are kept are the model's alone; later answers are as if nothing were."""
    pair = beside(package, tiny("Llama")[1])

    def act(model):
        cache, said = DynamicCache(config=model.config), []
        one(model, GIVEN["input_ids"], cache)
        for turn in range(6):
            if turn % 2 == 0:
                edit(cache)
            place = torch.full((2, 1), 9 + turn)
            said.append(
                one(model, GIVEN["input_ids"][:, turn : turn + 1], cache, position_ids=place)
            )
        assert [layer.keys.shape[2] for layer in cache.layers] == [cache.get_seq_length()] * 2
        assert hasattr(cache, "grow") == (edit is weaker_in_place and model is pair[1])
        del cache
        said.extend(logits(model))
        return torch.stack(said)

    assert_alike(pair, act)
    assert package.models.decode_steps(pair[1]).replayed >= 6


def test_values_of_a_static_cache_put_anew(package):
    pair = beside(package, tiny("Llama")[1])

    def act(model):
        cache = StaticCache(config=model.config, max_cache_len=32)
        one(model, GIVEN["input_ids"], cache)
        said = []
        for turn in range(6):
            if turn > 3:
                weaker(cache)
            said.append(one(model, GIVEN["input_ids"][:, turn : turn + 1], cache))
        return torch.stack(said)

    assert_alike(pair, act)
    assert package.models.decode_steps(pair[1]).replayed == 3


def test_a_hook_that_prunes_a_cache(package):
    """While a forward runs: then, too, the model keeps its own, and another answer is right."""
    pair = beside(package, tiny("Llama")[1])

    def prune(module, args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        if kwargs["hidden_states"].shape[1] > 1:
            layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]

    def act(model):
        said = [logits(model)]
        handles = [
            layer.self_attn.register_forward_hook(prune, with_kwargs=True)
            for layer in model.model.layers
        ]
        said.append(logits(model, do_sample=False))
        for handle in handles:
            handle.remove()
        return torch.stack([*said, logits(model)])

    assert_alike(pair, act)


@pytest.mark.parametrize("is_compiled", ["before", "after"])
def test_a_compiled_model_keeps_transformers_loop(package, is_compiled):
    """The call that torch compiles does not come by what stands before the forward."""
    _, model = tiny("Llama")
    step = copy.deepcopy(model)
    if is_compiled == "before":
        step.compile(backend="eager")
    package.models.use_decode_step(step)
    if is_compiled == "after":
        step.compile(backend="eager")
    options = {**OPTIONS, "max_new_tokens": 3}  # torch compiles for each
    assert torch.equal(step.generate(**GIVEN, **options), model.generate(**GIVEN, **options))
