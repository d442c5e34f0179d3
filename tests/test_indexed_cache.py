"""Layers that keep, beside keys and values, a key of each token by which others are chosen
(DeepSeek V3.2's): in a cache that grows in place."""

import copy
import pickle

import pytest
import torch
from shrunk import tiny_of
from tiny_attention import WITH_LOGITS, assert_same_answers, beside_a_step, prompt


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


# Of the second a layer takes another's keys and values, and keeps none but those to choose by.
KINDS = [("deepseek_v32", "CAUSAL_LM"), ("mistral_large4", "IMAGE_TEXT_TO_TEXT")]


@pytest.fixture(params=KINDS, ids=[kind for kind, _ in KINDS])
def pair(package, monkeypatch, request):
    """A model whose queries see four keys each, and one of the same weights with use_decode_step,
    whose cache grows within an answer."""
    return beside_a_step(package, monkeypatch, tiny_of(*request.param))


def test_answers_of_which_each_token_sees_few(package, pair):
    """Beside padding, where the cache grows, and in what a longer answer has left."""
    model, step = pair
    for columns, new in ((9, 14), (7, 5), (12, 4)):
        given = prompt(3, columns)
        said = [each.generate(**given, max_new_tokens=new, **WITH_LOGITS) for each in (step, model)]
        assert_same_answers(*said)
        del said
    steps = package.models.decode_steps(step)
    assert steps.replayed >= 14, steps
    assert set(steps.passed_on) == {"a prompt", "the first step of its kind"}, steps


@pytest.mark.parametrize(
    "others", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "lookup"]
)
def test_rows_that_move_and_rows_that_go(pair, others):
    rows = 2 if "num_beams" in others else 1
    given = {"input_ids": torch.randint(5, 12, (rows, 9))}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    options = {**WITH_LOGITS, **others, "output_logits": False}
    got, expected = (each.generate(**given, max_new_tokens=10, **options) for each in pair[::-1])
    assert_same_answers(got, expected)


@pytest.mark.parametrize("way", ["kept", "copied", "pickled"])
def test_an_answer_goes_on_with_its_cache(pair, way):
    """In a cache that was pickled, which is a dynamic one, with the model as it was."""
    model, step = pair
    given = prompt(2, 9, (0, 0))
    said = [each.generate(**given, max_new_tokens=7, **WITH_LOGITS) for each in (model, step)]
    expected, got = (each.past_key_values for each in said)
    change = {"kept": lambda x: x, "copied": copy.deepcopy}
    got = change.get(way, lambda x: pickle.loads(pickle.dumps(x)))(got)
    ids = torch.cat([said[0].sequences, said[0].sequences[:, :4]], 1)
    rest = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, **WITH_LOGITS}
    expected = model.generate(ids, past_key_values=expected, **rest)
    other = model if way == "pickled" else step
    assert_same_answers(other.generate(ids, past_key_values=got, **rest), expected)


def test_what_is_not_ours_holds_no_fp8(package):
    """And says nothing of use_attention, which would not help."""
    model = tiny_of("deepseek_v32")
    with pytest.raises(ValueError, match=r"reads FP8, got DeepseekV32ForCausalLM with 'sdpa'$"):
        package.models.use_decode_step(model, kv_cache_dtype="fp8")
    assert model.config._attn_implementation == "eager" and "forward" not in vars(model)
