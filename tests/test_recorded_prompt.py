"""Short prompts that use_decode_step records: what they say, against the model without it.

A CPU has no use for them, so they are let to have some here: what differs on a GPU is how a graph
is recorded, which tests of steps cover.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from shrunk import tiny_of
from tiny_attention import FAMILIES, WITH_LOGITS, assert_same_answers, prompt, stepping, tiny
from transformers import DynamicCache


@pytest.fixture
def package(package, monkeypatch):
    package.models.use_attention()
    monkeypatch.setitem(package.models.recorded_prompt.MOST_TOKENS, "cpu", 1024)
    return package


def whole(rows=2, columns=12, seed=0, padding=0):
    """Tokens, others for each seed, and padding before those of the first sequence."""
    given = prompt(rows, columns + seed, (seed + padding, *(rows - 1) * (0,)))
    return {name: value[:, seed:] for name, value in given.items()}


@pytest.mark.parametrize("cache, padding", [("auto", 0), ("auto", 1), ("fp8", 0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_says_what_the_model_does(package, family, cache, padding):
    """Prompts of a length, and of others that are as long with the tokens behind them."""
    _, model = tiny(family)
    step = stepping(package, model, kv_cache_dtype=cache)
    apart = stepping(package, model, kv_cache_dtype=cache)
    apart.forward.why_not_padded = "not now"
    for i, columns in enumerate((12, 7, 19, 64, 3, 65)):
        given = whole(columns=columns, seed=i, padding=padding * (i % 2 + 1))
        got, expected = (
            each.generate(**given, max_new_tokens=5, **WITH_LOGITS) for each in (step, apart)
        )
        assert_same_answers(got, expected)
        assert got.past_key_values.get_seq_length() == columns + 4
        del got, expected  # they hold the caches
    steps = package.models.decode_steps(step)
    assert steps.prompts == 3 and steps.passed_on["a prompt"] == 3, steps


def test_the_same_prompt_gives_the_same_bits(package):
    """Run, recorded, and replayed; with a mask that hides nothing, too."""
    _, model = tiny("Llama", dtype=torch.bfloat16)
    step = stepping(package, model)
    given = whole()
    logits = []
    for i in range(4):
        mask = {} if i < 3 else {"attention_mask": torch.ones_like(given["input_ids"])}
        got = step.generate(given["input_ids"], **mask, max_new_tokens=3, **WITH_LOGITS)
        logits.append(torch.stack(got.logits))
        del got  # it holds the cache
        step.generate(**whole(seed=i + 1), max_new_tokens=2, do_sample=False)
    assert package.models.decode_steps(step).prompts == 7
    assert all(torch.equal(logits[0], each) for each in logits[1:])


@pytest.mark.parametrize(
    "way",
    [{"num_beams": 3}, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True},
     {"prefill_chunk_size": 5}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3},
     {"use_cache": False}],
    ids=str,
)  # fmt: skip
def test_every_way_of_generate(package, way):
    _, model = tiny("Qwen3")
    step = stepping(package, model)
    for i in range(4):
        given = whole(rows=1, columns=9 + i, seed=i)
        answers = []
        for each in (model, step):
            torch.manual_seed(0)
            answers.append(each.generate(**given, max_new_tokens=6, **{"do_sample": False, **way}))
        assert torch.equal(*answers)


def test_others_run_as_they_are(package, monkeypatch):
    """Padding between tokens, embeddings, many tokens, hidden states, logits of other tokens."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    storage = package.models.step_storage.Storage
    record = storage.record

    def record_a_step(self, forward, model, cache, name, kwargs, prompts=None):
        assert prompts is None
        return record(self, forward, model, cache, name, kwargs)

    monkeypatch.setattr(storage, "record", record_a_step)
    ids = whole(rows=1)["input_ids"]
    embeddings = model.get_input_embeddings()(ids)
    gap = {"input_ids": ids, "attention_mask": (ids != ids[0, 4]).long()}
    calls = [gap, {"inputs_embeds": embeddings}, {"input_ids": ids.repeat(100, 1)}]
    calls += [{"input_ids": ids, "output_hidden_states": True}]
    for call in (each for each in calls for _ in range(3)):
        options = {"max_new_tokens": 4, **WITH_LOGITS}
        assert_same_answers(step.generate(**call, **options), model.generate(**call, **options))
    for keep in (0, 2):
        for _ in range(3):
            caches = [DynamicCache(config=model.config) for _ in range(2)]
            with torch.no_grad():
                got, expected = (
                    each(input_ids=ids, past_key_values=cache, logits_to_keep=keep).logits
                    for each, cache in zip((step, model), caches, strict=True)
                )
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert package.models.decode_steps(step).prompts == 0


def test_a_later_token_may_not_matter(package):
    """A model whose tokens see those behind them keeps its prompts as they are."""
    _, model = tiny("Llama")
    model.model.layers[1].self_attn.is_causal = False
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x + x.mean(1, keepdim=True))
    step = stepping(package, model)
    assert step.forward.why_not_padded == "it depends on tokens behind it"


def test_what_a_module_keeps(package):
    """How many tokens the prompt had, for the steps behind it."""
    _, model = tiny("Llama")

    class Counting(type(model.model.norm)):
        def forward(self, x):
            self.count = x.shape[1]
            return super().forward(x)

    model.model.norm.__class__ = Counting
    step = stepping(package, model)
    assert step.forward.why_not_padded == "model.norm keeps a count of it"
    assert "count" not in vars(step.model.norm)


def test_states_of_all_tokens(package):
    """Which tokens behind a prompt would change."""
    model = tiny_of("lfm2_moe")
    step = stepping(package, model)
    for i in range(3):
        given = whole(seed=i)
        assert_same_answers(
            *(each.generate(**given, max_new_tokens=4, **WITH_LOGITS) for each in (step, model))
        )
    assert package.models.decode_steps(step).prompts == 0


def test_a_changed_model_is_recorded_anew(package):
    _, model = tiny("Llama")
    step = stepping(package, model)
    given = whole()

    def same():
        torch.testing.assert_close(
            *(
                torch.stack(each.generate(**given, max_new_tokens=3, **WITH_LOGITS).logits)
                for each in (step, model)
            ),
            rtol=1e-4,
            atol=1e-4,
        )

    for _ in range(3):
        same()
    assert package.models.decode_steps(step).prompts == 2
    for each in (step, model):
        layer = each.model.layers[0]
        layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.detach() * 1.5)
    same()
    assert package.models.decode_steps(step).prompts == 2
    for each in (step, model):
        each.model.layers[0].mlp.up_proj.weight.data.mul_(0.5)
    same()
    same()
    assert package.models.decode_steps(step).prompts == 4


@pytest.mark.parametrize("way", ["hook", "forward", "model"])
def test_whoever_looks_sees_the_prompt_alone(package, way):
    """By a hook, by a forward that was replaced, or by one of the whole model before ours."""
    _, model = tiny("Llama")
    given, seen = whole(), []
    if way == "model":
        forward = model.forward

        @functools.wraps(forward)
        def noted(*args, **kwargs):
            seen.append(kwargs["input_ids"].shape[1])
            return forward(*args, **kwargs)

        model.forward = noted
        package.models.use_decode_step(model)
        seen.clear()
        step = model
    else:
        step = stepping(package, model)
        for _ in range(3):
            step.generate(**given, max_new_tokens=2, do_sample=False)
        assert package.models.decode_steps(step).prompts == 2
        layer = step.model.layers[1]
        if way == "hook":
            layer.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
        else:
            forward = layer.forward

            def noted(x, *args, **kwargs):
                seen.append(x.shape[1])
                return forward(x, *args, **kwargs)

            layer.forward = noted
    for _ in range(3):
        step.generate(**given, max_new_tokens=2, do_sample=False)
    assert seen.count(12) == 3 and set(seen) <= {12, 1}
    whys = {"model": "another's forward stands before the model's"}
    why = whys.get(way, "model.layers.1 has a hook, or another's forward")
    assert package.models.decode_steps(step).passed_on[f"a prompt: {why}"] == 3


@pytest.mark.parametrize("family, more", [("Llama", "hidden_states"), ("GptOss", "router_logits")])
def test_what_a_configuration_asks_for(package, family, more):
    """Is as long as the prompt."""
    _, model = tiny(family)
    step = stepping(package, model)
    given = whole()
    for each in (model, step):
        setattr(each.config, f"output_{more}", True)
    for _ in range(3):
        said = []
        for each in (model, step):
            with torch.no_grad():
                cache = DynamicCache(config=model.config)
                said.append(each(**given, past_key_values=cache, logits_to_keep=1))
        got, expected = said[1][more], said[0][more]
        assert len(got) == len(expected) > 0
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(said[1].logits, said[0].logits, rtol=1e-4, atol=1e-4)
        assert said[1].past_key_values.get_seq_length() == 12
    assert package.models.decode_steps(step).prompts == 0


def test_a_cache_that_has_grown(package, monkeypatch):
    """Its prompts are recorded with its new tensors."""
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 60)
    _, model = tiny("Llama")
    step = stepping(package, model)
    for i in range(4):
        given = whole(columns=12, seed=i)
        for tokens in (4, 70):
            got, expected = (
                e.generate(**given, max_new_tokens=tokens, do_sample=False) for e in (step, model)
            )
            assert torch.equal(got, expected)
    assert package.models.decode_steps(step).prompts >= 3


def test_what_cannot_be_recorded_runs(package, monkeypatch):
    """As it did at the first time, and it can be asked why."""
    _, model = tiny("Llama")
    step = stepping(package, model)

    class Recorded(package.models.recorded_step.RecordedStep):
        def _run(self, forward, *cache):
            super()._run(forward, *cache)
            if forward.__name__ == "inner" and self.inputs["input_ids"].shape[1] > 1:
                raise RuntimeError("not this")

    lengths, theirs = [], type(step.forward).inner

    def inner(self, **kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            name = package.models.step_storage.name_of_cache(kwargs)
            lengths.append(kwargs[name].get_seq_length())
        return theirs(self, **kwargs)

    monkeypatch.setattr(package.models.step_storage, "RecordedStep", Recorded)
    monkeypatch.setattr(type(step.forward), "inner", inner)
    for i in range(4):
        given = {**whole(seed=i), "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(step.generate(**given), model.generate(**given))
    assert len(lengths) == 5 and all(type(each) is int for each in lengths)
    steps = package.models.decode_steps(step)
    assert steps.prompts == 0 and steps.replayed > 8
    assert steps.passed_on["a prompt: it cannot be recorded: not this"] == 3, steps


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GptOss"])
def test_layers_of_kernels(best_package, device, monkeypatch, family, cache):
    """Quantised and kernelized: the bits of the same prompt with tokens behind it, run."""
    package = best_package
    package.models.use_attention()
    monkeypatch.setitem(package.models.recorded_prompt.MOST_TOKENS, "cpu", 1024)
    _, model = tiny(family, torch.bfloat16, hidden_size=128, intermediate_size=256, head_dim=64)
    model = model.to(device)
    package.models.quantize_model_(model, activations="dynamic")
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        model = kernelize(model, mode=Mode.INFERENCE)
    package.models.use_decode_step(model, kv_cache_dtype=cache)
    assert model.forward.why_not_padded is None
    for columns in (12, 70):
        given = {"input_ids": whole(columns=columns)["input_ids"].to(device)}
        logits = []
        for _ in range(4):
            got = model.generate(**given, max_new_tokens=4, **WITH_LOGITS)
            logits.append(torch.stack(got.logits))
            del got
        assert all(torch.equal(logits[0], each) for each in logits[1:])
    steps = package.models.decode_steps(model)
    assert steps.prompts == 6, steps


def test_few_graphs_serve_many_lengths(package):
    """Tokens of all sequences are a multiple of 64, and of one sequence at least two."""
    given = package.models.recorded_prompt.padded_prompt
    for batch in (1, 2, 3, 8, 40, 64, 100, 512):
        padded = set()
        for count in range(1, 1100 // batch + 1):
            kwargs = {"input_ids": torch.ones(batch, count, dtype=torch.int64), "logits_to_keep": 1}
            found = given(kwargs, "past_key_values", torch.device("cpu"), 2000)
            if found is None:
                assert batch * count > 1024 - 64 or batch > 512
                continue
            ids = found["input_ids"]
            assert ids.shape[0] == batch and count <= ids.shape[1] and ids.shape[1] >= 2
            assert batch * (ids.shape[1] - count) < 64 + batch or ids.shape[1] == 2
            assert ids[:, :count].all() and found["logits_to_keep"] == count - 1
            padded.add(ids.shape[1])
            for room, most in ((2000, 1024 // batch), (ids.shape[1], ids.shape[1])):
                longest = given(kwargs, "past_key_values", torch.device("cpu"), room, True)
                assert ids.shape[1] <= longest["input_ids"].shape[1] <= most
                assert most - longest["input_ids"].shape[1] < max(2, -(-64 // batch))
        assert len(padded) <= 17
        assert given({**kwargs, "logits_to_keep": 0}, "", torch.device("cpu"), 2000) is None


def test_threads_have_prompts_of_their_own(package):
    """Answers of one model at once, each with a cache, and graphs, that no other has."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    options = {"max_new_tokens": 5, "do_sample": False}

    def answers(first):
        given = [whole(columns=12, seed=first + i) for i in range(4)]
        return [(each, step.generate(**each, **options)) for each in given]

    with ThreadPoolExecutor(3) as pool:
        found = [answer for each in pool.map(answers, (0, 4, 8)) for answer in each]
    for given, got in found:
        assert torch.equal(got, model.generate(**given, **options))
    assert package.models.decode_steps(step).prompts > 0


def test_graphs_share_memory(best_package, gpu):
    """The first takes as much as the longest prompt will, so longer ones add next to nothing."""
    package = best_package
    package.models.use_attention()
    sizes = {"hidden_size": 512, "intermediate_size": 8192, "max_position_embeddings": 4096}
    _, model = tiny("Llama", torch.bfloat16, **sizes)
    model = model.to(gpu)
    package.models.quantize_model_(model, activations="dynamic")
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        model = kernelize(model, mode=Mode.INFERENCE)
    package.models.use_decode_step(model, max_cache_len=2100)
    reserved = []
    for columns in (100, 900, 1300, 1700, 2000):
        ids = whole(rows=1, columns=columns)["input_ids"].to(gpu)
        for _ in range(3):
            model.generate(ids, max_new_tokens=1, do_sample=False)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved(gpu))
    assert package.models.decode_steps(model).prompts == 10
    # Each with its own, gate and up alone would be 29, 43, 56 and 65 MB more.
    assert max(reserved) - reserved[0] < 64 << 20
