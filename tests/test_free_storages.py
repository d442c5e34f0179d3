"""What an answer of a model with use_decode_step has left serves later ones: for each number of
sequences one cache, with its recorded steps, within a bound of memory."""

import gc
import weakref

import pytest
import torch
from tiny_attention import prompt, stepping, tiny
from transformers import StaticCache

OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
KEPT = {**OPTIONS, "return_dict_in_generate": True}
STATIC = {**OPTIONS, "cache_implementation": "static"}


@pytest.fixture
def package(package, monkeypatch):
    package.models.use_attention()
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 16)
    return package


def free(step):
    return vars(step)["_decode_step"].free.storages


def of(batch, columns=9):
    return prompt(batch, columns, (0,) * batch)


def test_batches_in_turns_are_recorded_once_each(package):
    _, model = tiny("Llama")
    step = stepping(package, model)
    for turn in range(3):
        for batch in (1, 3, 2):
            given = of(batch, 9 + turn)
            assert torch.equal(
                step.generate(**given, **OPTIONS), model.generate(**given, **OPTIONS)
            )
    steps = package.models.decode_steps(step)
    assert steps.recorded == 3 and steps.replayed == 9 * 7 - 3, steps
    assert sorted(storage.cache.batch for storage in free(step)) == [1, 2, 3]


@pytest.mark.parametrize("batch", [1, 64])
def test_a_larger_one_takes_the_place_of_what_is_free(package, batch):
    """Of one for as many sequences, and of all where it is large beside the model."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    for sequences in (3, 1):
        step.generate(**of(sequences), **OPTIONS)
    bound = sum(tensor.nbytes for tensor in step.parameters()) // 2
    assert sum(storage.cache.nbytes for storage in free(step)) < bound
    step.generate(**of(batch, 200 if batch == 1 else 90), **OPTIONS)
    batches = [storage.cache.batch for storage in free(step)]
    assert batches == ([3, 1] if batch == 1 else [64])
    if batch == 64:
        assert free(step)[0].cache.nbytes > bound


def test_a_full_gpu_keeps_none(package, monkeypatch):
    """Half of what it has for them is the bound, where that is less."""
    _, model = tiny("Llama")
    storages = package.models.step_storage.FreeStorages()
    memory = {"mem_get_info": (0, 0), "memory_reserved": 0, "memory_allocated": 0}
    for name, bytes_now in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, bytes_now=bytes_now: bytes_now)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    kept = []
    for unused in (1 << 30, 0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, now=unused: (now, 1 << 30))
        storage = package.models.step_storage.Storage(package.models.growing_cache.growing_cache(
            model, 16, in_fp8=False))  # fmt: skip
        ones = torch.ones(2, 2, 4, 16)
        for layer in range(2):
            storage.cache.update(ones, ones, layer)
        storages.clear()
        storages.give(storage)
        storages.make_way(16, model)
        kept.append(len(storages.storages))
    assert kept == [1, 0]


@pytest.mark.parametrize("way", ["longer", "changed", "taken"])
def test_what_is_not_kept_ends_at_once(package, way):
    """Memory of a GPU does not wait for Python's collector, which counts objects."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    for _ in range(2):
        step.generate(**of(1), **OPTIONS)
    (storage,) = free(step)
    recorded = [each for each in storage.steps.values() if each is not None]
    assert recorded
    ends = [
        weakref.ref(each) for each in (storage, vars(storage.cache)["layers"][0].keys, *recorded)
    ]
    del storage, recorded
    gc.collect()
    gc.disable()
    try:
        if way == "longer":
            step.generate(**of(1, 60), **OPTIONS)
        elif way == "changed":
            step.lm_head.weight = torch.nn.Parameter(step.lm_head.weight.detach() * 2)
            step.generate(**of(1), **OPTIONS)
        else:
            said = step.generate(**of(1), **KEPT)
            said.past_key_values.layers[0].keys.sum()
            del said
        assert [end() for end in ends] == [None] * len(ends)
    finally:
        gc.enable()


TAKEN = {
    "keys": lambda cache: cache.layers[1].keys,
    "values of a sequence": lambda cache: cache.layers[1].values[0],
    "by layers": lambda cache: [pair[0] for pair in cache][1],
}


@pytest.mark.parametrize("what", TAKEN)
def test_tensors_that_are_taken_out_stay(package, what):
    """Where their cache is gone."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    given = of(2)
    expected = TAKEN[what](model.generate(**given, **KEPT).past_key_values)
    for _ in range(2):
        taken = TAKEN[what](step.generate(**given, **KEPT).past_key_values)
        step.generate(**of(2, 11), **OPTIONS)
        torch.testing.assert_close(taken, expected, rtol=1e-4, atol=1e-4)


def test_what_a_hook_keeps_stays(package):
    """It sees the cache's own tensors."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    seen = []

    def keep(module, args, kwargs, out):
        cache = next(kwargs[name] for name in ("past_key_values", "cache") if name in kwargs)
        seen.append(cache.layers[1].keys)

    attention = step.model.layers[1].self_attn
    attention.register_forward_hook(keep, with_kwargs=True)
    step.generate(**of(2), **OPTIONS)
    (last, before) = seen[-1], seen[-1].clone()
    step.generate(**of(2, 11), **OPTIONS)
    assert torch.equal(last, before)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3Text"])
def test_a_static_cache_of_generates_own(package, family, in_fp8):
    """Is another one for each answer. What replaces it has its room, and stays: steps of models
    with windows are replayed too, and later answers record nothing."""
    _, model = tiny(family)
    cache_dtype = "fp8" if in_fp8 else "auto"
    step = stepping(package, model, kv_cache_dtype=cache_dtype)
    beside = stepping(package, model, kv_cache_dtype=cache_dtype)
    for columns, new in ((9, 60), (12, 20), (7, 62)):
        given, options = of(2, columns), {**STATIC, "max_new_tokens": new}
        answer = step.generate(**given, **options)
        del options["cache_implementation"]
        assert torch.equal(answer, (beside if in_fp8 else model).generate(**given, **options))
    steps = package.models.decode_steps(step)
    assert steps.recorded == 1 and steps.replayed == 59 + 19 + 61 - 1, steps


def test_what_generate_notes_in_a_model_is_not_the_models(package):
    """How long its last static cache was: steps that are recorded stay."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    for options in (OPTIONS, STATIC, OPTIONS):
        step.generate(**of(1 if options is STATIC else 2), **options)
    assert step._previous_max_cache_length > 0
    assert package.models.decode_steps(step).recorded == 2


@pytest.mark.parametrize("way", ["held by the caller", "handed out"])
def test_a_static_cache_that_somebody_sees_stays_one(package, way):
    _, model = tiny("Llama")
    step = stepping(package, model)
    given, caches = of(2), []
    for each in (model, step):
        if way == "handed out":
            caches.append(each.generate(**given, **{**STATIC, **KEPT}).past_key_values)
        else:
            caches.append(StaticCache(config=each.config, max_cache_len=20))
            each.generate(**given, **OPTIONS, past_key_values=caches[-1])
    assert all(type(cache) is StaticCache for cache in caches)
    one, other = (cache.layers[1].keys for cache in caches)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert package.models.decode_steps(step).replayed == 6
