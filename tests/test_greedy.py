"""Greedy answers whose recorded steps choose their tokens, against transformers' own loop."""

import copy

import pytest
import torch
from test_late_stop import Heard, NoEvent
from tiny_attention import FAMILIES, prompt, stepping, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.generation import utils

pytestmark = pytest.mark.skipif(
    not hasattr(utils, "DeferredStopCheck"), reason="this transformers has another loop"
)
GREEDY = {"do_sample": False}


@pytest.fixture(params=["at once", "late"])
def package(package, monkeypatch, request):
    """Of a device that the host waits for, and of one that it does not."""
    package.models.use_attention()
    late = request.param == "late"
    monkeypatch.setattr(package.models.late_stop, "runs_ahead", lambda device: late)
    monkeypatch.setattr(torch, "Event", NoEvent)
    return package


@pytest.fixture
def chosen(package, monkeypatch):
    """How many steps have chosen their token."""
    count = []
    choose = package.models.decode_step._DecodeStep.choose
    monkeypatch.setattr(
        package.models.decode_step._DecodeStep,
        "choose",
        lambda self, kwargs: count.append(1) or choose(self, kwargs),
    )
    return count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("end", [1, 2, 6, 40])
def test_says_what_the_model_does(package, chosen, monkeypatch, family, end):
    """Three answers, of which each sequence ends somewhere or the length ends all; padding, before
    and behind; a cache that grows on the way, and steps that an earlier answer has recorded."""
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 5)
    _, model = tiny(family)
    step = stepping(package, model)
    for columns in (12, 12, 7):
        given = prompt(3, columns)
        torch.manual_seed(columns)
        told = model.generate(**given, **GREEDY, max_new_tokens=end)[:, -1].tolist()
        said = []
        for each in (model, step):
            heard = Heard()
            ends = told if columns == 12 else told[0]
            options = {"max_new_tokens": 16, "eos_token_id": ends, "streamer": heard}
            said.append((each.generate(**given, **GREEDY, **options), heard.tokens))
        assert torch.equal(said[0][0], said[1][0])
        assert said[0][1] == said[1][1]
    assert end == 1 or chosen


@pytest.mark.parametrize("columns", [128256, 151936, 49152, 32 * 64])
def test_the_most_likely_by_parts(package, columns):
    """Of several that are equal the first, in one part or in two; and one that is no number."""
    part = package.models.greedy._part(columns)
    logits = torch.randn(5, columns).bfloat16()
    logits[1, [part + 3, part + 9, columns - 1]] = 9
    logits[2] = -torch.inf
    logits[3, columns - 2] = torch.nan
    found = package.models.greedy.most_likely_by_parts(logits, part)
    assert torch.equal(found, logits.argmax(-1))
    assert package.models.greedy._part(50257) is None


def test_nothing_of_torchs_is_between_two_steps(package, chosen):
    """But a copy of the tokens, and what looks whether all have ended."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    def graph(self):
        names.append("graph")

    graphs = package.models.cpu_recording.CpuGraph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "replay", graph)
        with Names():
            step.generate(**prompt(), **GREEDY, max_new_tokens=9, eos_token_id=159)
    first, second = [i for i, name in enumerate(names) if name == "graph"][2:4]
    between = [name for name in names[first + 1 : second] if name != "select"]
    assert between == ["copy_", "max", "eq", "_local_scalar_dense"] or between == [
        "copy_", "max", "eq", "copy_", "_local_scalar_dense"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "top_k": 0},  # nothing but the draw
        {"num_beams": 2},
        {"return_dict_in_generate": True, "output_logits": True},
        {"repetition_penalty": 1.2},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 2},
        {"max_time": 100.0},
    ],
    ids=str,
)
def test_whatever_else_is_asked_for_is_transformers_own_loops(package, chosen, options):
    _, model = tiny("Llama")
    step = stepping(package, model)
    given = prompt(1, 12, (0,))
    said = []
    for each in (model, step):
        torch.manual_seed(0)
        answer = each.generate(**given, max_new_tokens=8, **{**GREEDY, **options})
        said.append(getattr(answer, "sequences", answer))
    assert torch.equal(*said)
    assert not chosen


def test_a_models_own_loop_or_hook_is_kept(package, chosen):
    """A hook of the whole model runs at each step; a method of the model's own as well."""
    _, model = tiny("Llama")
    given = {**prompt(), **GREEDY, "max_new_tokens": 6}
    expected = model.generate(**given)
    hooked, seen = stepping(package, model), []
    hooked.register_forward_hook(lambda *a: seen.append(1))
    assert torch.equal(hooked.generate(**given), expected)
    assert len(seen) == 6
    own = stepping(package, model)
    own.prepare_inputs_for_generation = type(model).prepare_inputs_for_generation.__get__(own)
    assert torch.equal(own.generate(**given), expected)
    assert not chosen


def test_an_answer_may_be_of_any_length(package, chosen, monkeypatch):
    """Memory is taken as it comes, whatever the greatest length is."""
    _, model = tiny("Llama", max_position_embeddings=10**14)
    step = stepping(package, model)
    given = {**prompt(2, 5, (0, 2)), **GREEDY}
    ends = model.generate(**given, max_new_tokens=9)[:, -1].tolist()
    said = [each.generate(**given, max_length=10**13, eos_token_id=ends) for each in (model, step)]
    assert torch.equal(*said)
    long = [each.generate(**given, max_new_tokens=600) for each in (model, step)]
    assert torch.equal(*long)
    assert chosen


def test_a_prompts_tokens_may_have_32_bits(package, chosen):
    """What is chosen has 64, and so has the answer."""
    _, model = tiny("Llama")
    given = {**prompt(), **GREEDY, "max_new_tokens": 6}
    given["input_ids"] = given["input_ids"].int()
    said = [each.generate(**given) for each in (model, stepping(package, model))]
    assert torch.equal(*said) and said[1].dtype == said[0].dtype == torch.int64
    assert chosen


def test_a_choice_that_cannot_be_recorded_is_made_behind_a_step(package, monkeypatch):
    _, model = tiny("Llama")
    step = stepping(package, model)

    class Recorded(package.models.recorded_step.RecordedStep):
        def __init__(self, forward, *args):
            if forward.__name__ == "_choose":
                raise RuntimeError("not this")
            super().__init__(forward, *args)

    monkeypatch.setattr(package.models.step_storage, "RecordedStep", Recorded)
    for columns in (12, 7):
        given = {**prompt(3, columns), **GREEDY, "max_new_tokens": 12}
        ends = model.generate(**given)[:, -4].tolist()
        given["eos_token_id"] = ends
        assert torch.equal(step.generate(**given), model.generate(**given))
    steps = package.models.decode_steps(step)
    assert steps.passed_on["it cannot be recorded: not this"] <= 2 < steps.replayed, steps


def test_a_hook_of_a_layer_is_called(package):
    _, model = tiny("Llama")
    given = {**prompt(), **GREEDY, "max_new_tokens": 6}
    step, seen = stepping(package, model), []
    step.model.layers[1].mlp.register_forward_hook(lambda *a: seen.append(1) or -a[2])
    plain = copy.deepcopy(model)
    plain.model.layers[1].mlp.register_forward_hook(lambda *a: -a[2])
    assert torch.equal(step.generate(**given), plain.generate(**given))
    assert len(seen) == 6


def test_an_answer_goes_on_from_a_kept_cache(package, chosen):
    _, model = tiny("Llama")
    step = stepping(package, model)
    given = prompt(padding=(0, 0, 0))
    said = []
    for each in (model, step):
        first = each.generate(**given, **GREEDY, max_new_tokens=6, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, first.sequences[:, :4]], 1)
        cache = first.past_key_values
        options = {"past_key_values": cache, "attention_mask": torch.ones_like(ids)}
        ends = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, max_new_tokens=5)
        options["eos_token_id"] = ends[:, -1].tolist()
        said.append((each.generate(ids, **options, **GREEDY, max_new_tokens=9), cache))
    assert torch.equal(said[0][0], said[1][0])
    tokens = said[0][1].get_seq_length()
    assert said[1][1].get_seq_length() == int(said[1][1].length) == tokens
    assert chosen


def test_a_copy_chooses(package, chosen, monkeypatch):
    """Also where its process has not called use_decode_step."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    stand = package.models.answers._stand_before
    stand.cache_clear()
    monkeypatch.setattr(utils.GenerationMixin, "_sample", utils.GenerationMixin._sample.__wrapped__)
    given = {**prompt(), **GREEDY, "max_new_tokens": 6}
    assert torch.equal(copy.deepcopy(step).generate(**given), model.generate(**given))
    assert len(chosen) == 5
    stand.cache_clear()


def test_a_longer_answer_than_the_model_is_made_for_is_warned_of(package, chosen):
    """By transformers' own criterion, which asks at each token."""
    _, model = tiny("Llama", max_position_embeddings=16)
    step = stepping(package, model)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    given = prompt()
    assert torch.equal(step.generate(**given, generation_config=config),
                       model.generate(**given, generation_config=config))  # fmt: skip
    assert not chosen


@pytest.mark.parametrize("in_fp8", [False, True])
def test_on_a_gpu(best_package, device, monkeypatch, in_fp8):
    """Against transformers' loop with the same steps."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    best_package.models.use_attention()
    _, model = tiny("Llama", torch.bfloat16, head_dim=64)
    model = model.to(device)
    best_package.models.use_decode_step(model, kv_cache_dtype="fp8" if in_fp8 else "auto")
    given = {name: value.to(device) for name, value in prompt(3, 12).items()}
    for end in (9, 30):
        ends = model.generate(**given, **GREEDY, max_new_tokens=end)[:, -1].tolist()
        said = []
        for theirs in (True, False):
            with monkeypatch.context() as patch:
                if theirs:
                    patch.setattr(best_package.models.greedy, "answers", lambda *a: False)
                heard = Heard()
                options = {"max_new_tokens": 20, "eos_token_id": ends, "streamer": heard}
                said.append((model.generate(**given, **GREEDY, **options), heard.tokens))
        assert torch.equal(said[0][0], said[1][0])
        assert said[0][1] == said[1][1]
