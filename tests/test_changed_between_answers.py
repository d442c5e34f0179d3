"""What is changed of a model with use_decode_step between two answers, or of a cache between two
calls: the next one says what the model says without it."""

import copy

import pytest
import torch
from tiny_attention import prompt, tiny
from transformers import StaticCache

GIVEN = prompt(2, 9, (0, 0))
OPTIONS = {"max_new_tokens": 8, "do_sample": False}
WITH_LOGITS = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


def beside(package, model, **options):
    """The model, and a copy of it with use_decode_step."""
    step = copy.deepcopy(model)
    package.models.use_decode_step(step, **options)
    return model, step


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
