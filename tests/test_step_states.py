"""What a recorded step would not notice, and what becomes of its cache in other hands."""

import contextlib
import copy
import importlib
import pickle

import pytest
import torch
from tiny_attention import SIZES, WITH_LOGITS, assert_same_answers, prompt, tiny
from tiny_models import randomized
from transformers import DynamicCache, LlamaModel, Phi3Config, Phi3ForCausalLM

GIVEN = prompt()
LONG_ROTATION = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 18,
    "short_factor": [1.0] * 8, "long_factor": [float(i + 2) for i in range(8)],
}  # fmt: skip
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


@pytest.fixture
def pair(package):
    """A model, and one of the same weights with use_decode_step."""
    _, model = tiny("Llama")
    package.models.use_attention(model)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    return model, step


@pytest.fixture(params=[False, True], ids=["here", "as on a GPU"])
def refusing(package, monkeypatch, request):
    """What records a run there refuses each number that Python takes out of a tensor; of a CPU's
    the dispatcher tells some."""
    step = importlib.import_module(f"{package.models.__name__}.recorded_step")
    if request.param:
        monkeypatch.setattr(step, "_NUMBERS", step._NUMBERS + step._NUMBER)


class Switched(torch.nn.Module):
    """As adapters of peft are."""

    def __init__(self, inner, kept):
        super().__init__()
        self.inner, self.kept = inner, kept

    def forward(self, x):
        kept = self.kept
        while not isinstance(kept, float):
            kept = kept["default"] if isinstance(kept, dict) else kept[0]
        return self.inner(x) * kept


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: [x], lambda x: {"default": x}])
def test_a_number_of_a_module_is_seen(package, pair, wrapped):
    """That an adapter is off, its factor, which one is on."""
    said = []
    for each in pair:
        mlp = each.model.layers[1].mlp
        mlp.down_proj = Switched(mlp.down_proj, wrapped(1.0))
        for factor in (1.0, -1.0, -1.0, 0.0):
            mlp.down_proj.kept = wrapped(factor)
            said.append(each.generate(**GIVEN, **OPTIONS))
    for expected, got in zip(said[:4], said[4:], strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(said[0], said[1])
    assert package.models.decode_steps(pair[1]).recorded == 3


def test_peft_turns_an_adapter_off(package, pair):
    peft = pytest.importorskip("peft")
    said = []
    for each in pair:
        config = peft.LoraConfig(target_modules=["down_proj"], r=4, init_lora_weights=False)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(each, config).eval()
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_()
        said.append(adapted.generate(**GIVEN, **OPTIONS))
        with adapted.disable_adapter():
            said.append(adapted.generate(**GIVEN, **OPTIONS))
    assert torch.equal(said[0], said[2]) and torch.equal(said[1], said[3])
    assert not torch.equal(said[0], said[1])


class Counting(torch.nn.Module):
    """Its result depends on how often it was called: what it keeps is no parameter."""

    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind = inner, kind
        self.count = {"number": 0, "tensor": torch.zeros(())}.get(kind)
        if "buffer" in kind:
            del self.count
            self.register_buffer("count", torch.zeros(()), persistent=kind == "buffer")

    def forward(self, x):
        self.count = self.count + 1
        return self.inner(x) * (1 + 0.1 * self.count)


@pytest.mark.parametrize("kind", ["number", "tensor", "buffer", "buffer of nobody"])
def test_a_state_that_a_module_keeps_is_not_recorded(package, kind):
    said = []
    for stepping in (False, True):
        torch.manual_seed(1)
        _, model = tiny("Llama")
        mlp = model.model.layers[1].mlp
        mlp.down_proj = Counting(mlp.down_proj, kind)
        package.models.use_attention(model)
        if stepping:
            package.models.use_decode_step(model)
        assert int(mlp.down_proj.count) == 0
        said.append(model.generate(**GIVEN, **OPTIONS))
        assert int(mlp.down_proj.count) == 12
    assert torch.equal(*said)
    steps = package.models.decode_steps(model)
    why = "model.layers.1.mlp.down_proj keeps a count from step to step in itself"
    assert steps.replayed == 0 and why in steps.passed_on


@pytest.mark.usefixtures("refusing")
def test_frequencies_that_each_step_makes_anew_are_no_state(package):
    """As of long rotations, whose choice turns within an answer: at a position, whoever has
    computed the one before. What was recorded stays, and a copy has buffers of its own."""
    torch.manual_seed(1)
    _, model = tiny("Llama", rope_parameters=LONG_ROTATION)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    said = [each.generate(**GIVEN, **WITH_LOGITS, max_new_tokens=12) for each in (model, step)]
    assert_same_answers(*said)
    for each in (step, copy.deepcopy(step)):
        for count in (3, 12):
            options = {**OPTIONS, "max_new_tokens": count}
            assert torch.equal(
                each.generate(**GIVEN, **options), model.generate(**GIVEN, **options)
            )
        steps = package.models.decode_steps(each)
        assert steps.replayed >= 11, steps
    assert package.models.decode_steps(step).recorded == 2  # with logits, and with choices
    short = model.model.rotary_emb.original_inv_freq
    model.model.rotary_emb.long_inv_freq.copy_(short)
    assert not torch.equal(step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS))


@pytest.mark.usefixtures("refusing")
def test_an_answer_that_lets_go_of_its_cache_gets_another(package):
    """Phi-3's does where its rotation turns, and at each prompt that is longer. A caller's own
    cache keeps what it had then, and no cache stays none."""
    config = Phi3Config(**SIZES, rope_parameters=LONG_ROTATION, original_max_position_embeddings=18)
    torch.manual_seed(1)
    model = randomized(Phi3ForCausalLM(config))
    model.set_attn_implementation("rocm_kernels")
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    long = prompt(3, 20)
    for given, replayed in ((GIVEN, 8), (long, 11)):
        before = package.models.decode_steps(step).replayed
        assert torch.equal(step.generate(**given, **OPTIONS), model.generate(**given, **OPTIONS))
        assert package.models.decode_steps(step).replayed - before == replayed
    assert "it has no cache, or no tokens" not in package.models.decode_steps(step).passed_on
    with torch.no_grad():
        assert type(step(**GIVEN, use_cache=True).past_key_values) is DynamicCache
    own = [DynamicCache(config=config) for _ in range(2)]
    for each, cache in zip((model, step), own, strict=True):
        each.generate(**GIVEN, **OPTIONS, past_key_values=cache)
    assert own[0].get_seq_length() == own[1].get_seq_length() > 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_without(package, pair, dtype):
    """Keys are in float32 then and values are not; the next answer's are both."""
    contexts = (
        torch.autocast("cpu", dtype), contextlib.nullcontext(), torch.autocast("cpu", dtype),
    )  # fmt: skip
    for context in contexts:
        with context:
            options = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}
            expected, got = (each.generate(**GIVEN, **options) for each in pair)
            # In 16 bits; so of two tokens that are nearly as likely either may be chosen.
            distance = (got.logits[0] - expected.logits[0]).norm()
            assert distance < 0.03 * expected.logits[0].norm()
            assert torch.equal(got.sequences[:, 12], got.logits[0].argmax(1))
            if not torch.is_autocast_enabled("cpu"):
                torch.testing.assert_close(got.logits, expected.logits)
        del expected, got  # the next answer has this one's storage


def test_a_prompt_that_fails_leaves_nothing_behind(package, pair):
    model, step = pair
    with pytest.raises(IndexError):
        step.generate(torch.full((3, 5), 1 << 20), **OPTIONS)
    assert torch.equal(step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS))


def test_a_cache_goes_on_behind_the_back_of_a_step(package, pair):
    """The model below is called with a cache, which nobody has told the step of."""
    said = []
    for each in pair:
        cache = each.generate(**GIVEN, **OPTIONS, return_dict_in_generate=True).past_key_values
        with torch.no_grad():
            each.model(GIVEN["input_ids"][:, :2], past_key_values=cache)
            for _ in range(3):
                said.append(each(GIVEN["input_ids"][:, :1], past_key_values=cache).logits)
        assert int(cache.get_seq_length()) == 12 + 11 + 2 + 3
    for expected, got in zip(said[:3], said[3:], strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_cache_is_pickled_as_a_dynamic_one(package, pair, in_fp8):
    """And gives keys and values as that does."""
    model, step = pair
    if in_fp8:
        package.models.use_decode_step(step, kv_cache_dtype="fp8")
    given = prompt(padding=(0, 0, 0))
    kept = [each.generate(**given, **OPTIONS, return_dict_in_generate=True) for each in pair]
    exact, cache = (each.past_key_values for each in kept)
    again = pickle.loads(pickle.dumps(cache))
    assert type(again) is DynamicCache and again.get_seq_length() == exact.get_seq_length()
    for cached in (cache, again):
        for one, other in zip(cached, exact, strict=True):
            for states, expected in zip(one[:2], other[:2], strict=True):
                assert states.shape == expected.shape
                # Of the prompt: behind it answers may part, in FP8. That has 3 bits.
                distance = (states[:, :, :12].float() - expected[:, :, :12]).norm()
                assert distance <= (0.1 if in_fp8 else 1e-6) * expected.norm()
    if not in_fp8:
        ids = torch.cat([kept[0].sequences, kept[0].sequences[:, :4]], 1)
        rest = {"attention_mask": torch.ones_like(ids), **OPTIONS}
        expected = model.generate(ids, past_key_values=exact, **rest)
        assert torch.equal(step.generate(ids, past_key_values=again, **rest), expected)


def turn(model, ids, cache, **options):
    """A chat's next one, with some more tokens behind the answer."""
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **{**OPTIONS, **options}
    )
    return torch.cat([said, said[:, 1:5]], 1)


@pytest.mark.parametrize("has_kinds", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_callers_cache_is_recorded_in_each_turn(package, family, has_kinds):
    """It stays what its caller takes it for."""
    _, model = tiny(family)
    package.models.use_attention(model)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    ids = [GIVEN["input_ids"]] * 2
    caches = [DynamicCache(config=model.config if has_kinds else None) for _ in ids]
    caches[1].note = "its caller's"
    for replayed in (10, 21, 32):
        ids = [turn(*each) for each in zip((model, step), ids, caches, strict=True)]
        assert torch.equal(*ids)
        assert package.models.decode_steps(step).replayed == replayed
        assert isinstance(caches[1], DynamicCache) and caches[1].note == "its caller's"
        assert len(caches[1]) == len(caches[0])
        assert caches[1].get_seq_length() == caches[0].get_seq_length()
    assert type(caches[1]) is not DynamicCache
    again = pickle.loads(pickle.dumps(caches[1]))
    assert type(again) is DynamicCache and again.note == "its caller's"
    assert [type(layer) for layer in again.layers] == [type(layer) for layer in caches[0].layers]
    del caches[1]  # its place is another's, and not what was put into it
    cache = DynamicCache()
    assert torch.equal(turn(step, GIVEN["input_ids"], cache), turn(model, GIVEN["input_ids"], None))
    assert not hasattr(cache, "note")
    assert package.models.decode_steps(step)[:2] == (1, 43)


def by_hand(model, ids, cache, count=3):
    """Calls of a model's own, with a cache alone."""
    out = []
    with torch.no_grad():
        for _ in range(count):
            out.append(model(ids, past_key_values=cache).logits[:, -1])
            ids = out[-1].argmax(-1, keepdim=True)
    return torch.stack(out)


def crop(model, ids, cache):
    cache.crop(-6)


def reorder(model, ids, cache):
    cache.reorder_cache(torch.tensor([2, 0, 0]))


def select(model, ids, cache):
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)


def reset(model, ids, cache):
    cache.reset()
    assert cache.get_seq_length() == 0
    return turn(model, ids[:2, :7], cache)


def reads(model, ids, cache):
    return torch.stack([states for each in cache for states in each[:2]])


def writes(model, ids, cache):
    """Rows of the caller's own choice."""
    rows = [(keys[:, :, :2], values[:, :, :2]) for keys, values, *_ in cache]
    return torch.stack([cache.update(*each, i)[0] for i, each in enumerate(rows)])


def asks_for_a_mask(model, ids, cache):
    """As a model's own code does that makes one."""
    return torch.tensor([cache.get_mask_sizes(2, i) for i in range(len(cache))])


def asks_for_probabilities(model, ids, cache):
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **OPTIONS,
        output_attentions=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack([each[1] for each in said.attentions[1:2]])


def learns(model, ids, cache):
    """Two calls of a graph that goes through the rows."""
    logits = [model(ids[:, -1:], past_key_values=cache).logits for _ in range(2)]
    sum(logits).square().mean().backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    gradient, weight.grad = weight.grad, None
    return gradient


@pytest.mark.parametrize(
    "use",
    [
        crop,
        reorder,
        select,
        reset,
        reads,
        writes,
        by_hand,
        asks_for_a_mask,
        asks_for_probabilities,
        learns,
    ],
)
def test_what_becomes_of_a_callers_cache_is_what_became_of_it(package, pair, use):
    """And an answer goes on from there."""
    said = []
    for each in pair:
        cache = DynamicCache()
        ids = turn(each, GIVEN["input_ids"], cache)
        said.append([use(each, ids, cache)])
        if use is not learns:
            shape = (len(next(iter(cache))[0]), cache.get_seq_length() + 5)
            ids = torch.arange(shape[0] * shape[1]).reshape(shape) % 150 + 5
            said[-1].append(turn(each, ids, cache))
    for expected, got in zip(*said, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "rocm_kernels"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_cache_in_another_models_hands(package, monkeypatch, family, attention):
    """Which knows nothing of the room behind its tokens, and may need more."""
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 16)
    _, model = tiny(family)
    package.models.use_attention(model)
    step, other = copy.deepcopy(model), copy.deepcopy(model)
    package.models.use_decode_step(step)
    other.set_attn_implementation(attention)
    said = []
    for each in (model, step):
        cache = DynamicCache(config=model.config)
        ids = turn(each, GIVEN["input_ids"], cache)
        logits = by_hand(other, ids[:, -5:], cache, 9)
        ids = torch.cat([ids, logits.argmax(-1).T], 1)
        said.append((logits, turn(other, ids, cache)))
        assert type(cache) is DynamicCache
    torch.testing.assert_close(said[1][0], said[0][0])
    assert torch.equal(said[1][1], said[0][1])


def test_conversations_with_caches_of_their_own(package, pair):
    """In turns, and one that goes on in two ways."""
    said = []
    for each in pair:
        caches = [DynamicCache() for _ in range(2)]
        ids = [GIVEN["input_ids"], GIVEN["input_ids"].flip(1)]
        for _ in range(2):
            ids = [turn(each, *own) for own in zip(ids, caches, strict=True)]
        caches.append(copy.deepcopy(caches[0]))
        ids.append(ids[0].roll(1, 1).where(torch.arange(ids[0].shape[1]) > 27, ids[0]))
        for _ in range(2):
            ids = [turn(each, *own) for own in zip(ids, caches, strict=True)]
        said.append(torch.stack(ids))
    assert torch.equal(*said)
    assert package.models.decode_steps(pair[1]).replayed == 2 * (10 + 3 * 11) + 10 + 11


def test_a_callers_cache_whose_prompt_fails_is_as_it_came(package, pair):
    model, step = pair
    cache = DynamicCache()
    with pytest.raises(IndexError):
        turn(step, torch.full((2, 5), 1 << 20), cache)
    assert type(cache) is DynamicCache and cache.get_seq_length() == 0
    expected = turn(model, GIVEN["input_ids"], DynamicCache())
    assert torch.equal(turn(step, GIVEN["input_ids"], cache), expected)


@pytest.mark.parametrize("kind", ["filled", "of data"])
def test_a_callers_cache_that_is_not_empty_stays_as_it_is(package, pair, kind):
    model, step = pair
    ids, said = GIVEN["input_ids"], []
    for each in pair:
        cache = DynamicCache()
        by_hand(model, ids[:, :5], cache, 1)
        if kind == "of data":
            cache = DynamicCache(cache)
        said.append(turn(each, ids, cache))
        assert type(cache) is DynamicCache
    assert torch.equal(*said)
    assert package.models.decode_steps(step).replayed == 0


def test_a_model_without_generate_is_refused(package):
    _, model = tiny("Llama")
    base = LlamaModel(model.config)
    with pytest.raises(ValueError, match=r"must have generate, and be a decoder .* got LlamaModel"):
        package.models.use_decode_step(base)
    assert "forward" not in vars(base)


def test_a_refused_model_is_as_it_was(package, monkeypatch):
    """FP8 caches are not for an attention of the model's own."""
    _, model = tiny("Llama")
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *a: False)
    with pytest.raises(ValueError, match=r"which cannot: .*call use_attention"):
        package.models.use_decode_step(model, kv_cache_dtype="fp8")
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model) and not model.generation_config.disable_compile


def test_a_model_that_reads_rows_without_a_token_is_refused(package, monkeypatch):
    """An empty cache in place holds zeros there, so that a short answer would not show it."""
    _, model = tiny("Llama")
    forward = type(model).forward

    def reads_all_rows(self, *args, past_key_values=None, **kwargs):
        said = forward(self, *args, past_key_values=past_key_values, **kwargs)
        said.logits += past_key_values.layers[0].keys.float().abs().amax()
        return said

    monkeypatch.setattr(type(model), "forward", reads_all_rows)
    with pytest.raises(ValueError, match=r"which cannot: it reads rows .* hold nothing yet"):
        package.models.use_decode_step(model)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_states_that_were_asked_for_once(package, pair, asked):
    """transformers leaves hooks in a model then. They are in nobody's way later."""
    model, step = pair
    options = {**OPTIONS, asked: True, "return_dict_in_generate": True}
    given = prompt(padding=(0, 0, 0))
    expected, got = (each.generate(**given, **options) for each in pair)
    assert torch.equal(got.sequences, expected.sequences)
    for one, other in zip(got.hidden_states or (), expected.hidden_states or (), strict=True):
        for states, others in zip(one, other, strict=True):
            torch.testing.assert_close(states, others)
    if asked == "output_attentions":
        assert len(got.attentions) == 12 and got.attentions[3][0].shape[:3] == (3, 4, 1)
        for one, other in zip(got.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(one, other)
        for each in pair:  # for nobody
            each.generate(**given, **OPTIONS, output_attentions=True)
    package.models.use_decode_step(step)
    assert torch.equal(step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS))
    assert package.models.decode_steps(step).replayed == 10
