"""Layers that keep a state of all tokens so far in the cache (linear attention, convolutions),
beside layers of keys and values: their steps are replayed too."""

import copy
import pickle

import pytest
import torch
from shrunk import tiny_of
from tiny_attention import WITH_LOGITS, assert_same_answers, beside_a_step, prompt
from transformers import DynamicCache


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


@pytest.fixture(params=["qwen3_next", "lfm2_moe", "falcon_h1"])
def pair(package, monkeypatch, request):
    """A model with recurrences, with convolutions alone, or with states and keys in one layer; and
    one of the same weights with use_decode_step, whose cache grows within an answer."""
    return beside_a_step(package, monkeypatch, tiny_of(request.param))


def test_answers_with_states(package, pair):
    """Beside padding, where the cache grows, in what another answer has left, of one token, of
    other sequences, and where nobody asks for more than tokens."""
    model, step = pair
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for rows, columns, new in ((3, 9, 14), (3, 7, 5), (3, 5, 4), (2, 6, 4)):
        given = prompt(rows, columns, (0, 4, 1)[:rows])
        said = [each.generate(**given, max_new_tokens=new, **WITH_LOGITS) for each in (step, model)]
        assert_same_answers(*said)
        del said
        said = [each.generate(**given, max_new_tokens=new, **greedy) for each in (step, model)]
        assert torch.equal(*said)
    given = prompt(2, 1, (0, 0))
    assert_same_answers(
        *(each.generate(**given, max_new_tokens=5, **WITH_LOGITS) for each in (step, model))
    )
    steps = package.models.decode_steps(step)
    assert steps.replayed >= 30, steps
    assert set(steps.passed_on) == {"a prompt", "the first step of its kind"}, steps


@pytest.mark.parametrize(
    "others", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]
)
def test_states_that_move(pair, others):
    given = prompt(2, 9, (0, 2))
    options = {**WITH_LOGITS, **others, "output_logits": False}
    said = []
    for each in pair:
        torch.manual_seed(3)
        said.append(each.generate(**given, max_new_tokens=10, **options))
    assert_same_answers(said[1], said[0])


def test_drafts_are_taken_back_where_the_model_can(pair):
    """transformers' own cache can, of convolutions, once it was told to; or it says that it
    cannot, as without the call."""
    given = {"input_ids": torch.tensor([[5, 6, 7, 8] * 3])}  # of which drafts are made at once
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    said = []
    for each in pair:
        try:
            said.append(
                each.generate(**given, max_new_tokens=9, prompt_lookup_num_tokens=3, **WITH_LOGITS)
            )
        except (ValueError, RuntimeError) as why:
            said.append(str(why))
    if isinstance(said[0], str):
        assert said[1] == said[0]
    else:
        assert torch.equal(said[1].sequences, said[0].sequences)


@pytest.mark.parametrize("way", ["kept", "copied", "pickled"])
def test_an_answer_goes_on_with_its_states(pair, way):
    """By several tokens at once; in a cache that was pickled, a dynamic one, with the model as it
    was."""
    model, step = pair
    given = prompt(2, 9, (0, 0))
    said = [each.generate(**given, max_new_tokens=7, **WITH_LOGITS) for each in (model, step)]
    expected, got = (each.past_key_values for each in said)
    change = {"kept": lambda x: x, "copied": copy.deepcopy}
    got = change.get(way, lambda x: pickle.loads(pickle.dumps(x)))(got)
    if way == "pickled":
        assert type(got) is DynamicCache
    ids = torch.cat([said[0].sequences, said[0].sequences[:, :4]], 1)
    rest = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, **WITH_LOGITS}
    expected = model.generate(ids, past_key_values=expected, **rest)
    other = model if way == "pickled" else step
    assert_same_answers(other.generate(ids, past_key_values=got, **rest), expected)


def test_a_state_is_not_taken_back(package, pair):
    """Nor is an answer looked at late whose cache is handed out, on a GPU."""
    cache = (
        pair[1].generate(**prompt(2, 9, (0, 0)), max_new_tokens=4, **WITH_LOGITS).past_key_values
    )
    with pytest.raises(RuntimeError, match=r"must keep rows of tokens alone .* some of these keep"):
        cache.crop(-1)
    cache.crop(0)
    assert not cache.is_croppable
    check = pytest.importorskip("transformers.generation.utils").DeferredStopCheck
    with package.models.late_stop.looking_late(True):
        supported = [
            check.is_supported(torch.device("cuda"), cache, returned, is_assistant=False)
            for returned in (False, True)
        ]
    assert supported == [True, False]


def test_a_model_of_states_alone_is_refused(package):
    """It counts no tokens."""
    model = tiny_of("mamba")
    with pytest.raises(NotImplementedError, match=r"some of them .*, got linear_attention alone"):
        package.models.use_decode_step(model)
    assert "forward" not in vars(model)
