"""Models with biases as long as their cache or their mask: that has room for tokens to come."""

import copy
import pickle

import pytest
import shrunk
import torch
from tiny_attention import WITH_LOGITS, assert_same_answers, prompt, tiny

KINDS = {
    "bloom": {},  # its biases are of its mask
    "falcon": {"alibi": True, "new_decoder_architecture": False},  # the same, and a mask of ours
    "mpt": {},  # of its cache's rows, cut from a table
}


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


def assert_same(step, model, columns, new):
    given = prompt(3, columns)
    got, expected = (
        each.generate(**given, max_new_tokens=new, **WITH_LOGITS) for each in (step, model)
    )
    assert_same_answers(got, expected)
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new}
    assert torch.equal(*(each.generate(**given, **greedy) for each in (step, model)))


@pytest.mark.parametrize("kind", KINDS)
def test_biases_as_long_as_the_cache(package, monkeypatch, kind):
    """Beside padding, where the cache grows, in what an answer has left, and behind a copy."""
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 6)
    monkeypatch.setitem(shrunk.OTHERS, kind, KINDS[kind])
    model = shrunk.tiny_of(kind)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    for columns, new in ((9, 12), (7, 5)):
        assert_same(step, model, columns, new)
    steps = package.models.decode_steps(step)
    assert steps.replayed >= 20 and steps.recorded <= 5, steps
    assert set(steps.passed_on) == {"a prompt", "the first step of its kind"}, steps
    again = pickle.loads(pickle.dumps(step))
    assert_same(again, model, 7, 5)
    assert package.models.decode_steps(again).replayed > 0


def test_a_table_of_biases_is_as_long_as_all_positions(package, monkeypatch):
    """A cache has no more rows than that: neither a new one, nor one that grows, nor one that
    was asked for."""
    model = shrunk.tiny_of("mpt")  # 256
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    assert_same(step, model, 12, 5)
    package.models.use_decode_step(step, max_cache_len=300)
    assert_same(step, model, 12, 5)
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 3)
    package.models.use_decode_step(step)
    assert_same(step, model, 197, 5)
    assert package.models.decode_steps(step).replayed > 0


@pytest.mark.parametrize(
    ("tokens", "room", "expected"),
    [(9, 521, 256), (9, 20, 20), (256, 900, 256), (257, 900, 900), (900, 20, 900)],
)
def test_the_room_of_a_cache(package, tokens, room, expected):
    """Beyond its positions a model may go on all the same: then as if there were none."""
    room_for = package.models.growing_cache.room_for
    for name in ("max_position_embeddings", "max_seq_len"):
        config = type("Config", (), {name: 256})
        assert room_for(config, tokens, room) == expected
    assert room_for(object(), tokens, room) == max(tokens, room)


@pytest.mark.parametrize(
    "spoilt, why", [(1, None), (5, "with such a cache it says something else")]
)
def test_tokens_of_which_a_rounding_changes_all_are_not_the_only_ones(package, spoilt, why):
    """A model that says something else with a cache of ours for some of the tokens asked about."""
    _, model = tiny("Llama")
    probe = package.models.probe_step
    tokens = probe.tokens_to_ask(model.config)
    assert len({*tokens}) == 5 and all(0 <= t < model.config.vocab_size for t in sum(tokens, ()))
    touched, asked = {tokens[i][0] for i in range(spoilt)}, []

    def forward(**given):
        if given["input_ids"].shape[1] > 1:
            asked.append(int(given["input_ids"][0, 0]))
        said = model(**given)
        cache = given[package.models.step_storage.name_of_cache(given)]
        if hasattr(cache, "grow") and asked[-1] in touched:
            said.logits = said.logits + 1e3
        return said

    found = probe.why_not_in_place(
        model, forward, lambda room: package.models.growing_cache.growing_cache(model, room, False)
    )
    assert found == why
    assert {*asked} == {each[0] for each in tokens[: spoilt + 1]}
