"""What a step's Python code makes of its cache's length is recorded, where it is the same in many
steps; and sentences of what is not."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from shrunk import tiny_of
from tiny_attention import WITH_LOGITS, assert_same_answers, tiny


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


@pytest.fixture
def lengths(package):
    """What is asked within is asked of a cache with some tokens."""
    made = importlib.import_module(f"{package.models.__name__}.step_length").Lengths

    def of(tokens, **others):
        cache = SimpleNamespace(length=torch.tensor(tokens), tokens=tokens, grow=None, **others)
        return made(cache), cache.length

    return of


def answer(model, columns, new):
    ids = torch.randint(5, 140, (2, columns), generator=torch.Generator().manual_seed(columns))
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **WITH_LOGITS
    )


def no_numbers(*args, **kwargs):
    raise AssertionError("a number was taken out of the length")


def test_positions_that_begin_at_the_length(lengths, monkeypatch):
    """In each way of writing them; none asks for the length."""
    mode, length = lengths(7)
    begun = torch.arange
    monkeypatch.setattr(torch.Tensor, "item", no_numbers)
    with mode:
        made = [
            torch.arange(length, length + 3), torch.arange(length + 2, 2 + length + 2),
            torch.arange(length - 1, length + 1, dtype=torch.float32),
            torch.arange(length, length + 1, device="cpu").expand(2, -1),
        ]  # fmt: skip
        before = length + 0
        length.add_(5)
        length -= 1
        made += [torch.arange(before, length), torch.arange(length, length + 2)]
        assert torch.arange is begun
    monkeypatch.undo()
    expected = [
        [7, 8, 9], [9, 10], [6, 7], [[7], [7]], [7, 8, 9, 10], [11, 12],
    ]  # fmt: skip
    assert [each.tolist() for each in made] == expected
    assert [each.dtype for each in made[:3]] == [torch.int64, torch.int64, torch.float32]
    assert mode.bounds == (0, float("inf"))


ASKED = {
    "gt": lambda x: x > 9, "ge": lambda x: x >= 9, "lt": lambda x: x < 9, "le": lambda x: x <= 9,
    "eq": lambda x: x == 9, "ne": lambda x: x != 9, "number first": lambda x: max(9, x + 2) == 9,
    "more": lambda x: 2 + x > 9, "less": lambda x: x - 3 > 9, "itself": lambda x: bool(x),
    "largest": lambda x: max(x, 9) is x, "both": lambda x: x > 4 and x < 12,
    "what is left": lambda x: 20 - x - 1 > 9, "none left": lambda x: max(0, 9 - (x + 2)) == 0,
    "as many": lambda x: 12 - x == 3, "not as few": lambda x: 12 - x >= 3,
    "not": lambda x: not x > 9, "written": lambda x: x.add_(2) > 9,
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_comparisons_are_answered_for_all_lengths_with_the_same_answers(lengths, asked):
    """The right answer for each; and bounds that another answer never lies within, and that are
    no narrower than they must be."""
    ask = ASKED[asked]
    right = [bool(ask(torch.tensor(tokens))) for tokens in range(40)]
    for tokens in range(40):
        mode, length = lengths(tokens)
        with mode:
            assert bool(ask(length)) == right[tokens]
        low, high = mode.bounds
        assert low <= tokens < high
        alike = [right[other] == right[tokens] for other in range(40)]
        assert all(alike[low : int(min(high, 40))])
        if asked != "both":  # of whose two questions the second was not asked
            assert low == 0 or not alike[low - 1]
            assert high > 39 or not alike[high]


def test_what_was_changed_in_another_way_is_not_known(lengths):
    """Through a view, by a factor, by a tensor: then a number is taken out, as ever."""
    changes = (
        lambda x: x[None].add_(1), lambda x: x.mul_(2), lambda x: x.add_(torch.tensor(2)),
        lambda x: x.__setitem__(..., 4), lambda x: x.add_(1, alpha=2),
    )  # fmt: skip
    for change in changes:
        mode, length = lengths(7)
        with mode:
            more = length + 1
            change(length)
            assert torch.arange(length, length + 2).tolist() == [int(length), int(length) + 1]
            assert (length > 7) == (int(length) > 7) and more == 8
        assert mode.bounds == (7, 8), "the sum was compared, and the length not"


def test_a_static_cache_tells_where_positions_begin_alone(package, lengths, monkeypatch):
    """The host does not know how many tokens are in it."""
    layers = [SimpleNamespace(cumulative_length=torch.tensor(each)) for each in (3, 3)]
    mode = type(lengths(0)[0])(SimpleNamespace(layers=layers))
    length, other = (layer.cumulative_length for layer in layers)
    monkeypatch.setattr(torch.Tensor, "item", no_numbers)
    with mode:
        begun = torch.arange(other, other + 2)
        assert length < 4
        assert length
    assert begun.tolist() == [3, 4] and mode.bounds == (0, float("inf"))


def test_answers_beyond_a_length_that_a_model_asks_for(package, monkeypatch):
    """The step is recorded again where the answer is another; in long answers and short ones."""
    _, model = tiny("Llama")
    forward = type(model).forward

    def with_limit(self, *args, past_key_values=None, **kwargs):
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        far, near = past >= 20, past < 14
        said = forward(self, *args, past_key_values=past_key_values, **kwargs)
        said.logits[..., 50 if far else 60 if near else 70] += 3.0
        return said

    monkeypatch.setattr(type(model), "forward", with_limit)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    for columns, new in ((9, 16), (17, 2), (5, 4), (30, 4)):
        assert_same_answers(answer(step, columns, new), answer(model, columns, new))
    greedy = {**WITH_LOGITS, "output_logits": False, "return_dict_in_generate": False}
    ids = torch.randint(5, 140, (1, 9))
    assert torch.equal(*(each.generate(ids, max_new_tokens=16, **greedy) for each in (model, step)))
    steps = package.models.decode_steps(step)
    assert set(steps.passed_on) == {"a prompt", "the first step of its kind"}, steps
    assert steps.recorded >= 6, steps


@pytest.mark.parametrize("kind", ["xglm", "mvp"])
def test_a_table_of_positions_that_grows(package, monkeypatch, kind):
    """Of which a step asks whether it is long enough, or takes the row of the length. Beyond its
    end a recorded step would read what is not there."""
    model = tiny_of(kind)
    if kind == "xglm":
        model.model.embed_positions.make_weights(20, 64, 0)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    for columns, new in ((9, 6), (12, 10), (9, 14)):
        assert_same_answers(answer(step, columns, new), answer(model, columns, new))
    steps = package.models.decode_steps(step)
    beyond = [why for why in steps.passed_on if "takes numbers out of a tensor" in why]
    assert len(beyond) == (kind == "xglm"), steps
    assert steps.replayed >= 4, steps


def test_a_number_of_a_gpu_is_asked_for_by_a_line(package):
    """What records a step says which line asks, before the device is asked."""
    looks = importlib.import_module(f"{package.models.__name__}.recorded_step").RecordedLooks
    elsewhere = torch.empty(1, device="meta")
    asking = {
        "__bool__": bool, "__int__": int, "__float__": float, "item": torch.Tensor.item,
        "__index__": lambda x: [1, 2, 3][x.long()], "tolist": torch.Tensor.tolist,
    }  # fmt: skip
    for name, ask in asking.items():
        why = rf"test_step_length.py:\d+ takes numbers out of a tensor, by {name}$"
        with looks(), pytest.raises(NotImplementedError, match=why):
            ask(elsewhere)
    with looks():
        assert torch.ones(1) and int(torch.ones(1)) == 1
