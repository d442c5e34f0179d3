"""Steps of prompts without padding, which have no mask: generate drops one of ones."""

import copy

import pytest
import torch
from shrunk import tiny_of
from tiny_attention import WITH_LOGITS
from tiny_models import randomized
from transformers import FalconConfig, FalconForCausalLM

OPTIONS = {"max_new_tokens": 12, **WITH_LOGITS}


def answer(model, rows, padding=0):
    ids = torch.randint(5, 140, (rows, 9), generator=torch.Generator().manual_seed(5))
    given = {"input_ids": ids}
    if padding:
        ids[0, :padding] = 0
        given["attention_mask"] = (ids != 0).long()
    return torch.stack(model.generate(**given, **OPTIONS).logits)


@pytest.mark.parametrize("padding", [(0, 0), (0, 3), (3, 0)])
def test_biases_as_long_as_a_mask_that_nobody_gives(package, padding):
    """Falcon's of the kind that has no rotation, in a cache with room: made of the tokens that the
    host counts."""
    config = FalconConfig(
        vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        multi_query=False, parallel_attn=False, new_decoder_architecture=False, bias=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = randomized(FalconForCausalLM(config))
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    for each in padding:
        pair = [answer(m, 2, each) for m in (step, model)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
    assert package.models.decode_steps(step).replayed >= 20


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "bart", "roformer", "rembert"])
def test_code_that_looks_for_padding_gets_a_mask_of_ones(package, monkeypatch, kind, rows):
    """To the bit what the same steps say that are run, without one: behind a prompt of another
    answer, with room and where the cache grows, and with padding between."""
    decode_step = package.models.decode_step
    monkeypatch.setattr(decode_step, "_SPARE", 6)
    model = tiny_of(kind)
    said = []
    for has_graphs in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(decode_step, "_has_graphs", lambda device, has=has_graphs: has)
            package.models.use_decode_step(model)
            said.append([answer(model, rows, padding) for padding in (0, 0, 3, 0)])
    assert all(map(torch.equal, *said))
    steps = package.models.decode_steps(model)
    assert steps.replayed >= 30 and not any("recorded" in why for why in steps.passed_on), steps


def test_a_mask_that_does_not_help_is_taken_back(package):
    """The reason is the first one, and the model gets no mask that it was not given."""
    model = tiny_of("jetmoe")
    expected = answer(model, 2)
    package.models.use_decode_step(model)
    torch.testing.assert_close(answer(model, 2), expected, rtol=1e-4, atol=1e-4)
    steps = package.models.decode_steps(model)
    assert steps.replayed == 0 and any("_jetmoe.py" in why for why in steps.passed_on), steps
