"""generate that asks for the next step before it looks whether an answer has ended: nobody can tell
it from one that looks at once. On the CPU it is made to, where by itself it would not."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from second_copy import second_copy
from tiny_attention import SIZES, prompt, tiny
from tiny_models import randomized
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessor,
    Phi3Config,
    Phi3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

pytestmark = pytest.mark.skipif(
    not hasattr(utils, "DeferredStopCheck"), reason="this transformers looks at once"
)
GIVEN = prompt(2, 9, (0, 3))
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 20},
}


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.tokens.append("end")


class Failed(Exception):
    pass


class Failing(Heard):
    def put(self, value):
        super().put(value)
        if len(self.tokens) == 8:
            raise Failed


class NoEvent:
    """The CPU has none, and needs none."""

    def __init__(self, **options):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


class Watching(StoppingCriteria):
    def __init__(self, seen):
        self.seen = seen

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Processing(LogitsProcessor):
    def __init__(self, seen):
        self.seen = seen

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.shape)
        return scores


def watched(seen):
    seen.append(None)
    return list(range(160))


@pytest.fixture
def package(package, monkeypatch):
    package.models.use_attention()
    late = package.models.late_stop
    monkeypatch.setattr(late, "runs_ahead", lambda device: True)
    monkeypatch.setattr(torch, "Event", NoEvent)
    return package


@pytest.fixture
def models(package):
    return two_of(package)


def two_of(package):
    """A model that looks at once, and one that looks late."""
    _, model = tiny("Llama")
    late = copy.deepcopy(model)
    package.models.use_decode_step(late)
    return model, late


def steps_of(package, model):
    counts = package.models.decode_steps(model)
    return counts.replayed + counts.passed_on["the first step of its kind"]


def last_of(model, step, **options):
    """A token of each sequence's that it does not have before: there its answer will end."""
    torch.manual_seed(3)
    said = model.generate(**GIVEN, max_new_tokens=step, **options)[:, GIVEN["input_ids"].shape[1] :]
    return said[:, -1].tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_an_answer_that_ends(package, models, way, length):
    """By itself, or by its greatest length, 12: tokens, logits, scores, what was streamed, the
    random numbers that come next, and the cache."""
    assert_ends_alike(package, models, way, length)


@pytest.mark.parametrize("way", WAYS)
def test_two_copies_in_a_process(package, monkeypatch, way):
    """Both look late at answers of their own models, though transformers has one check."""
    both = {package: two_of(package)}
    # The second one's wrappers of transformers end with the test.
    monkeypatch.setattr(utils, "DeferredStopCheck", utils.DeferredStopCheck)
    for name in ("_sample", "_beam_search", "_assisted_decoding", "_valid_auto_compile_criteria"):
        monkeypatch.setattr(utils.GenerationMixin, name, getattr(utils.GenerationMixin, name))
    second = second_copy(package, monkeypatch)
    monkeypatch.setattr(second.models.late_stop, "runs_ahead", lambda device: True)
    both[second] = two_of(second)
    for each in (second, package):
        each.models.use_attention()  # there is one of its name, the last
        assert_ends_alike(each, both[each], way, 7)


def assert_ends_alike(package, models, way, length):
    model, late = models
    options = WAYS[way]
    ends = last_of(model, length, **options)
    said, streams = [], []
    for each in models:
        streams.append(Heard())
        torch.manual_seed(3)
        answer = each.generate(
            **GIVEN, **options, max_new_tokens=12, eos_token_id=ends, streamer=streams[-1],
            output_logits=True, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        said.append((answer, torch.rand(2)))
    (one, draw), (other, late_draw) = said
    assert torch.equal(one.sequences, other.sequences)
    for name in ("logits", "scores"):
        assert torch.equal(torch.stack(one[name]), torch.stack(other[name]))
    assert streams[0].tokens == streams[1].tokens
    assert torch.equal(draw, late_draw)
    tokens = one.past_key_values.get_seq_length()
    assert other.past_key_values.get_seq_length() == int(other.past_key_values.length) == tokens
    new = one.sequences.shape[1] - GIVEN["input_ids"].shape[1]
    assert steps_of(package, late) == new - (new == 12)  # one too many, but for the greatest length


def test_an_answer_goes_on_from_the_cache_of_one_that_ended(models):
    model, _ = models
    ends = last_of(model, 5, do_sample=False)
    said = []
    for each in models:
        options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        first = each.generate(**GIVEN, eos_token_id=ends, **options)
        ids = torch.cat([first.sequences, first.sequences[:, :4]], 1)
        mask = torch.nn.functional.pad(
            GIVEN["attention_mask"], (0, ids.shape[1] - GIVEN["input_ids"].shape[1]), value=1
        )
        options["past_key_values"] = first.past_key_values
        said.append(each.generate(ids, attention_mask=mask, **options).sequences)
    assert torch.equal(*said)


def test_an_answer_that_has_let_go_of_its_cache(package, monkeypatch):
    """Of the one that it goes on with a token is taken back."""
    rotation = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 18,
        "short_factor": [1.0] * 8, "long_factor": [float(i + 2) for i in range(8)],
    }  # fmt: skip
    config = Phi3Config(**SIZES, rope_parameters=rotation, original_max_position_embeddings=18)
    torch.manual_seed(1)
    model = randomized(Phi3ForCausalLM(config))
    package.models.use_attention(model)
    late = copy.deepcopy(model)
    package.models.use_decode_step(late)
    monkeypatch.setattr(package.models.late_stop, "runs_ahead", lambda device: True)
    monkeypatch.setattr(torch, "Event", NoEvent)
    options = {"do_sample": False, "return_dict_in_generate": True}
    given = prompt(1, 12, (0,))
    told = model.generate(**given, **options, max_new_tokens=12).sequences[0]
    for end in (3, 9):  # before the turn, and behind it
        ends = {"eos_token_id": int(told[12 + end]), "max_new_tokens": 12}
        expected, got = (each.generate(**given, **options, **ends) for each in (model, late))
        assert torch.equal(got.sequences, expected.sequences)
        count = expected.past_key_values.get_seq_length()
        assert got.past_key_values.get_seq_length() == count == got.sequences.shape[1] - 1


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "sampling", "said in full", "failing"])
def test_nothing_of_an_answer_outlives_it(package, monkeypatch, kind, ahead):
    """Its cache ends with who holds it, so that the next answer has its place and its graph; and
    the model ends, too."""
    monkeypatch.setattr(package.models.late_stop, "runs_ahead", lambda device: ahead)
    _, late = tiny("Llama")
    package.models.use_decode_step(late)
    options = {**WAYS.get(kind, WAYS["greedy"]), "max_new_tokens": 12}
    if kind == "said in full":
        options.update(return_dict_in_generate=True, output_logits=True)
    if kind == "failing":
        options["streamer"] = Failing()
    places = set()
    for _ in range(3):
        cache = DynamicCache()
        held = weakref.ref(cache)
        with contextlib.suppress(Failed):
            late.generate(**GIVEN, **options, past_key_values=cache)
        places.add(vars(cache)["layers"][0].keys.data_ptr())
        del cache
        assert held() is None
    assert len(places) == 1
    assert package.models.decode_steps(late).recorded == 1
    held = [weakref.ref(late), weakref.ref(late.lm_head.weight)]
    del late
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("way", WAYS)
def test_on_another_default_device(models, way):
    """What the host looks at is the host's: transformers makes it, and does not say where."""
    said = []
    for default in ("cpu", "meta"):
        heard = Heard()
        torch.manual_seed(3)
        with torch.device(default):
            answer = models[1].generate(**GIVEN, **WAYS[way], max_new_tokens=12, streamer=heard)
        said.append((answer, heard.tokens))
    (one, told), (other, told_elsewhere) = said
    assert torch.equal(one, other) and told == told_elsewhere


def test_criteria_of_transformers_may_look_late(package, models):
    """Also where the caller hands them over."""
    _, late = models
    criteria = StoppingCriteriaList([EosTokenCriteria(last_of(late, 6, do_sample=False))])
    before = steps_of(package, late)
    said = [
        each.generate(**GIVEN, max_new_tokens=12, do_sample=False, stopping_criteria=criteria)
        for each in models
    ]
    assert torch.equal(*said)
    new = said[0].shape[1] - GIVEN["input_ids"].shape[1]
    assert new < 12 and steps_of(package, late) - before == new


@pytest.mark.parametrize("who", ["stopping_criteria", "logits_processor", "prefix"])
def test_a_function_of_the_callers_sees_no_step_too_many(models, who):
    model, _ = models
    ends = last_of(model, 5, do_sample=False)
    calls = []
    for each in models:
        seen = []
        given = {
            "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([Watching(seen)])},
            "logits_processor": {"logits_processor": [Processing(seen)]},
            "prefix": {"prefix_allowed_tokens_fn": lambda i, ids, seen=seen: watched(seen)},
        }[who]
        each.generate(**GIVEN, max_new_tokens=12, do_sample=False, eos_token_id=ends, **given)
        calls.append(len(seen))
    assert calls[0] == calls[1] > 0


def test_other_models_look_at_once(package, models, monkeypatch):
    """And a model from which the step is taken back."""
    model, late = models
    seen = []
    check = utils.StopCheck.__call__
    monkeypatch.setattr(
        utils.StopCheck, "__call__", lambda self, *a: seen.append(type(self)) or check(self, *a)
    )
    options = {"max_new_tokens": 4, "do_sample": True}
    model.generate(**GIVEN, **options)
    assert seen == [utils.StopCheck] * 4
    late.generate(**GIVEN, **options)
    assert seen == [utils.StopCheck] * 4  # a late one is another function
    package.models.stop_decode_step(late)
    late.generate(**GIVEN, **options)
    assert seen == [utils.StopCheck] * 8


@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu(best_package, device, monkeypatch, way):
    """Against the same, looking at once."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    best_package.models.use_attention()
    late_stop = best_package.models.late_stop
    _, model = tiny("Llama", torch.bfloat16, head_dim=64)
    model = model.to(device)
    best_package.models.use_decode_step(model)
    given = {name: value.to(device) for name, value in GIVEN.items()}
    torch.manual_seed(3)
    ends = model.generate(**given, **WAYS[way], max_new_tokens=9)[:, -1].tolist()
    looks, state = [], late_stop._random_state
    monkeypatch.setattr(late_stop, "_random_state", lambda d: looks.append(d) or state(d))
    said = []
    for ahead in (False, True):
        monkeypatch.setattr(late_stop, "runs_ahead", lambda d, ahead=ahead: ahead)
        heard = Heard()
        torch.manual_seed(3)
        answer = model.generate(
            **given, **WAYS[way], max_new_tokens=40, eos_token_id=ends, streamer=heard,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        said.append((answer, heard.tokens, torch.rand(2, device=device), len(looks)))
    (one, told, draw, none), (late, told_late, draw_late, many) = said
    assert none == 0 < many
    assert torch.equal(one.sequences, late.sequences)
    assert torch.equal(torch.stack(one.logits), torch.stack(late.logits))
    assert told == told_late and torch.equal(draw, draw_late)
    assert int(late.past_key_values.length) == late.past_key_values.get_seq_length()
