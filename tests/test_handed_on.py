"""Arguments that a model is called with and no graph can be given: masks of a caller's own, and
what transformers hands on to a forward that does not name it."""

import copy

import pytest
import torch
from test_changed_between_answers import GIVEN, OPTIONS, assert_alike, beside
from tiny_attention import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:157]
    names = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(names, [], unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"stop_strings": ["ZZZ"]}])
def test_a_tokenizer_that_nobody_reads(package, way):
    """generate hands it on to each step: for its stop strings."""
    model, step = beside(package, tiny("Llama")[1])
    for _ in range(2):
        given = {**GIVEN, **OPTIONS, **way, "tokenizer": tokenizer()}
        assert torch.equal(step.generate(**given), model.generate(**given))
    steps = package.models.decode_steps(step)
    assert steps.replayed >= 12 and not any("tokenizer" in why for why in steps.passed_on), steps


ASKS = {
    "an attribute": lambda it: it.factor,
    "whether it is one": lambda it: isinstance(it, list),
    "its length": lambda it: len(it),
    "an item": lambda it: it[0],
    "what it says": lambda it: it(),
    "its truth": lambda it: 1 if it else 0,
    "whether it equals": lambda it: it == 3,
    "a sum": lambda it: torch.ones(1) + it,
}


class Factor(list):
    factor = 3.0

    def __call__(self):
        return self.factor


@pytest.mark.parametrize("ask", ASKS)
def test_an_argument_that_a_model_reads(package, monkeypatch, ask):
    """It may be another in each step."""
    _, model = tiny("Llama")
    forward = type(model).forward

    def reading(self, input_ids=None, **kwargs):
        given = kwargs.pop("given", None)
        said = forward(self, input_ids=input_ids, **kwargs)
        if given is not None and ask != "a sum":
            ASKS[ask](given)
            said.logits = said.logits * given.factor
        elif given is not None:
            said.logits = said.logits * ASKS[ask](given)
        return said

    monkeypatch.setattr(type(model), "forward", reading)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)

    def act(model):
        cache, said = DynamicCache(config=model.config), []
        for turn in range(5):
            given = torch.full((1,), 1.0 + turn) if ask == "a sum" else Factor([1])
            if ask == "a sum":
                given = given.to(torch.float64)
            else:
                given.factor = 1.0 + turn
            ids = GIVEN["input_ids"] if turn == 0 else GIVEN["input_ids"][:, :1]
            with torch.no_grad():
                said.append(model(input_ids=ids, past_key_values=cache, given=given).logits[:, -1])
        return torch.stack(said)

    assert_alike((model, step), act)
    steps = package.models.decode_steps(step)
    if ask != "a sum":  # a tensor, which a graph can be given
        assert steps.replayed == 0 and any("the model reads given" in w for w in steps.passed_on)


def test_a_named_argument_is_not_handed_on(package, monkeypatch):
    _, model = tiny("Llama")
    forward = type(model).forward

    def naming(self, input_ids=None, helper=None, **kwargs):
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", naming)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    step.generate(**GIVEN, **{**OPTIONS, "do_sample": True}, helper=Factor())
    steps = package.models.decode_steps(step)
    assert steps.passed_on["a graph cannot be given helper as Factor"] == 7, steps


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_mask_of_the_callers_own(package, is_dict):
    """It has a column for each token, and none for a cache's room: in prompt and step."""
    family = "Gemma3Text" if is_dict else "Llama"
    pair = beside(package, tiny(family)[1])

    def masks(rows, columns):
        least = torch.finfo(torch.float32).min
        mask = torch.full((rows, columns), least).triu(1 + columns - rows)[None, None]
        mask = mask.expand(2, 1, rows, columns)
        kinds = ("full_attention", "sliding_attention")
        return dict.fromkeys(kinds, mask) if is_dict else mask

    def act(model):
        cache, said = DynamicCache(config=model.config), []
        for turn in range(3):  # within the window
            rows = 5 if turn == 0 else 1
            ids = GIVEN["input_ids"][:, :rows]
            mask = masks(rows, 5 + turn)
            with torch.no_grad():
                given = {"attention_mask": mask, "past_key_values": cache}
                said.append(model(input_ids=ids, **given).logits[:, -1])
        assert not hasattr(cache, "grow")
        return torch.stack(said)

    assert_alike(pair, act)


def test_a_mask_of_the_callers_own_behind_a_prompt(package):
    """From then on the cache is an ordinary one."""
    pair = beside(package, tiny("Llama")[1])

    def act(model):
        cache, said = DynamicCache(config=model.config), []
        with torch.no_grad():
            for turn in range(6):
                ids = GIVEN["input_ids"] if turn == 0 else GIVEN["input_ids"][:, :1]
                mask = torch.zeros(2, 1, 1, 9 + turn)
                mask[..., 2] = torch.finfo(torch.float32).min
                more = {"attention_mask": mask} if turn > 3 else {}
                said.append(model(ids, past_key_values=cache, **more).logits[:, -1])
        return torch.stack(said)

    assert_alike(pair, act)
    assert package.models.decode_steps(pair[1]).replayed == 2
