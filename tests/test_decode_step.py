"""use_decode_step: what generate gives with whole steps replayed, against the model without it.

On the CPU a step is recorded by cpu_recording.py. Both kinds of recorded steps read and leave
tensors that stay, so that whatever does not reach them is seen.
"""

import contextlib
import copy
import gc
import sys
import types

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_attention import FAMILIES, prompt, stepping, tiny
from tiny_models import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache


class Functions:
    """Names the functions in Python that are called."""

    def __init__(self):
        self.names = []

    def __enter__(self):
        sys.setprofile(self)

    def __exit__(self, *error):
        sys.setprofile(None)
        del self.names[-1]  # this one

    def __call__(self, frame, event, argument):
        if event == "call":
            self.names.append(frame.f_code.co_name)


class Ops(TorchDispatchMode):
    """Names torch's ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


OPTIONS = {"max_new_tokens": 12, "do_sample": False}
ROOM = 531
WAYS = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
    "two of each": {"num_return_sequences": 2, "do_sample": True},
    "chunks": {"prefill_chunk_size": 5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
}


GIVEN = prompt()


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


def test_settled_weights_are_forgotten(package, monkeypatch):
    """An error included: what an address holds later may be written at any time."""
    told = []
    ops = types.SimpleNamespace(settle_weights=told.append)
    monkeypatch.setattr(package.functional.product, "ops", ops)
    weights = [torch.zeros(3), torch.zeros(2)]
    with pytest.raises(RuntimeError), package.functional.product.settled(weights):
        assert told == [0, *(weight.data_ptr() for weight in weights)]
        raise RuntimeError
    assert told[-1] == 0


def test_weights_are_settled_while_a_step_is_recorded(package, monkeypatch):
    """And neither before nor after: then a kernel that still runs may write them."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    settled, now, seen = package.models.recorded_step.settled, set(), []

    @contextlib.contextmanager
    def told(weights):
        weights = list(weights)
        with settled(weights):
            now.update(weight.data_ptr() for weight in weights)
            yield
            now.clear()

    def record(*given):
        seen.append(set(now))
        return recorder(*given)

    recorder = package.models.recorded_step._record
    monkeypatch.setattr(package.models.recorded_step, "settled", told)
    monkeypatch.setattr(package.models.recorded_step, "_record", record)
    step.generate(**prompt(), max_new_tokens=5, do_sample=False)
    (seen,) = seen
    weights = {parameter.data_ptr() for parameter in step.parameters()}
    assert weights < seen and len(seen - weights) == 2 * step.config.num_hidden_layers  # caches
    assert not now


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generates_what_the_model_does(package, family, way):
    """Left padding included; three answers, the later ones in what the first has left."""
    _, model = tiny(family)
    alone = "lookup" in way
    step = stepping(package, model)
    for columns in (12, 7, 19):
        given = prompt(1, columns, (0,)) if alone else prompt(3, columns)
        answers = []
        for each in (model, step):
            torch.manual_seed(0)
            answers.append(each.generate(**given, **{**OPTIONS, **WAYS[way]}))
        assert torch.equal(*answers)
    steps = package.models.decode_steps(step)
    if way not in ("prompt lookup", "no cache"):
        assert steps.replayed >= 27, steps  # of 33: the first is run, and made anew where it grows


def test_a_replayed_step_does_not_walk_the_model(package, monkeypatch):
    """Nor does it ask for its device, which walks too: of a model with hundreds of modules that is
    host time that a GPU waits for."""
    walks = []

    def notice(name):
        walk = getattr(torch.nn.Module, name)

        def noticed(*args, **options):
            walks.append(name)
            return walk(*args, **options)

        monkeypatch.setattr(torch.nn.Module, name, noticed)

    _, model = tiny("Llama")
    step = stepping(package, model)
    cache = DynamicCache(config=step.config)
    with torch.inference_mode():
        said = step(GIVEN["input_ids"], past_key_values=cache)
        for turn in range(6):
            if turn == 3:
                for name in ("named_parameters", "named_buffers", "named_modules", "children"):
                    notice(name)
            said = step(said.logits[:, -1:].argmax(-1), past_key_values=cache)
    assert package.models.decode_steps(step).replayed == 5
    assert not walks


@pytest.mark.parametrize("kind", [StaticCache, DynamicCache])
def test_what_a_replayed_step_takes_the_host(package, monkeypatch, kind):
    """Torch's ops that a step calls around its graph, and Python's functions before it, for which a
    GPU waits: as many whatever the model has of layers."""

    def graph(self):
        pass

    monkeypatch.setattr(package.models.cpu_recording.CpuGraph, "replay", graph)
    counts = {}
    for layers in (2, 5):
        _, model = tiny("Llama", num_hidden_layers=layers)
        step = stepping(package, model)
        cache = kind(config=step.config, **{"max_cache_len": 32} if kind is StaticCache else {})
        mask, ids = torch.ones(3, 20, dtype=torch.int64), torch.ones(3, 1, dtype=torch.int64)
        functions, ops = Functions(), Ops()
        with torch.inference_mode():
            step(GIVEN["input_ids"], attention_mask=mask[:, :12], past_key_values=cache)
            for length in range(13, 20):
                given = {
                    "input_ids": ids, "attention_mask": mask[:, :length],
                    "position_ids": ids + length - 1, "past_key_values": cache, "use_cache": True,
                }  # fmt: skip
                with {18: functions, 19: ops}.get(length, contextlib.nullcontext()):
                    step(**given)
        assert package.models.decode_steps(step).replayed >= 5
        counts[layers] = functions.names, ops.names
    assert counts[2] == counts[5]
    functions, ops = counts[2]
    assert ops == ["copy_", "slice", "copy_", "copy_", "clone"]
    assert functions.index("graph") <= 26, functions


def test_a_model_that_moves_is_seen(package):
    """Its device is kept, and asked for again where the model is."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    step.generate(**GIVEN, **OPTIONS)
    moved = step.double()
    assert torch.equal(
        moved.generate(**GIVEN, **OPTIONS), model.double().generate(**GIVEN, **OPTIONS)
    )
    assert package.models.decode_steps(step).recorded == 2


def test_a_cache_that_grows(package, monkeypatch):
    """And one that has room from the beginning."""
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 3)
    _, model = tiny("Mistral")
    expected = model.generate(**GIVEN, max_new_tokens=40, do_sample=False)
    step = stepping(package, model)
    assert torch.equal(step.generate(**GIVEN, max_new_tokens=40, do_sample=False), expected)
    assert package.models.decode_steps(step).recorded == 3  # for 15, 30 and 60 tokens
    step = stepping(package, model, max_cache_len=52)
    assert torch.equal(step.generate(**GIVEN, max_new_tokens=40, do_sample=False), expected)
    assert package.models.decode_steps(step).recorded == 1


def test_logits_are_the_models(package):
    """Of each step, kept until the end: nothing that is handed out is written again."""
    _, model = tiny("Llama")
    options = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**GIVEN, **options)
    got = stepping(package, model).generate(**GIVEN, **options)
    torch.testing.assert_close(
        torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=0
    )


def test_a_kept_cache_is_left_alone(package):
    """An answer goes on from the cache of another, whatever was generated between."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    given = prompt(padding=(0, 0, 0))
    options = {**OPTIONS, "return_dict_in_generate": True}
    first = step.generate(**given, **options)
    step.generate(**prompt(3, 9), **options)
    ids = torch.cat([first.sequences, first.sequences[:, :4]], 1)
    mask = torch.ones_like(ids)
    got = step.generate(ids, attention_mask=mask, past_key_values=first.past_key_values, **OPTIONS)
    assert torch.equal(got, model.generate(ids, attention_mask=mask, **OPTIONS))


def test_storage_is_used_again(package):
    _, model = tiny("Llama")
    step = stepping(package, model)
    places = set()
    for _ in range(3):
        said = step.generate(**GIVEN, **OPTIONS, return_dict_in_generate=True)
        places.add(vars(said.past_key_values)["layers"][0].keys.data_ptr())
        del said
        gc.collect()
    assert len(places) == 1
    assert package.models.decode_steps(step).recorded == 1


def test_other_sums_are_seen(package):
    """What was recorded reads the memory of the Communicator that was there."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    linear = step.model.layers[1].mlp.down_proj
    for recorded, sums in enumerate((None, object(), object()), 1):
        vars(linear)["sums"] = sums
        step.generate(**GIVEN, **OPTIONS)
        assert package.models.decode_steps(step).recorded == recorded


@pytest.mark.parametrize("change", ["weight", "hook", "module"])
def test_a_change_of_the_model_is_seen(package, change):
    _, model = tiny("Llama")
    step = stepping(package, model)
    step.generate(**GIVEN, **OPTIONS)
    seen = []
    for each in (model, step):
        linear = each.model.layers[1].mlp.down_proj
        if change == "weight":
            linear.weight = torch.nn.Parameter(-linear.weight.detach())
        elif change == "hook":
            linear.register_forward_hook(lambda *a: seen.append(1) or -a[2])
        else:
            each.model.layers[1].mlp.down_proj = torch.nn.Sequential(linear, torch.nn.GELU())
    assert torch.equal(step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS))
    if change == "hook":
        assert len(seen) == 24
        why = package.models.decode_steps(step).passed_on
        assert why["model.layers.1.mlp.down_proj has a hook, which a replayed step would not call"]


def test_an_fp8_cache(package):
    _, model = tiny("Llama")
    cache = package.models.fp8_static_cache(model, max_cache_len=40)
    expected = model.generate(**GIVEN, past_key_values=cache, **OPTIONS)
    step = stepping(package, model, kv_cache_dtype="fp8")
    said = step.generate(**GIVEN, **OPTIONS, return_dict_in_generate=True)
    assert torch.equal(said.sequences, expected)
    assert said.past_key_values.layers[0].keys.dtype == torch.uint8


@pytest.mark.parametrize("kind", [StaticCache, DynamicCache])
def test_a_loop_of_the_users(package, kind):
    """With a cache that they hold, no mask and no positions; and from a copy of it."""
    _, model = tiny("Qwen3")
    step = stepping(package, model)
    logits = []
    for each in (model, step):
        cache = kind(config=each.config, **{"max_cache_len": 32} if kind is StaticCache else {})
        ids, said = GIVEN["input_ids"], []
        with torch.inference_mode():
            for turn in range(9):
                if turn == 5:
                    cache = copy.deepcopy(cache)
                said.append(each(ids, past_key_values=cache).logits[:, -1])
                ids = said[-1][:, None].argmax(-1)
        logits.append(torch.stack(said))
        assert int(cache.get_seq_length()) == 20
    assert torch.equal(*logits)
    assert package.models.decode_steps(step).replayed == 6  # of 8: each cache's first is run


def test_a_kept_cache_outlives_a_change(package):
    _, model = tiny("Llama")
    step = stepping(package, model)
    answers = []
    for each in (model, step):
        said = each.generate(**GIVEN, **OPTIONS, return_dict_in_generate=True)
        linear = each.model.layers[1].mlp.down_proj
        linear.weight = torch.nn.Parameter(-linear.weight.detach())
        ids = torch.cat([said.sequences, said.sequences[:, :4]], 1)
        mask = torch.nn.functional.pad(GIVEN["attention_mask"], (0, 16), value=1)
        answers.append(
            each.generate(ids, attention_mask=mask, past_key_values=said.past_key_values, **OPTIONS)
        )
    assert torch.equal(*answers)


def test_training_and_gradients_pass_it_by(package):
    _, model = tiny("Llama")
    step = stepping(package, model).train()
    losses = [each.train()(**GIVEN, labels=GIVEN["input_ids"]).loss for each in (model, step)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert package.models.decode_steps(step).replayed == 0


def test_it_can_be_taken_back_and_copied(package):
    _, model = tiny("Llama")
    expected = model.generate(**GIVEN, **OPTIONS)
    step = stepping(package, model)
    step.generate(**GIVEN, **OPTIONS)
    copied = copy.deepcopy(step)
    assert package.models.decode_steps(copied) == (0, 0, {}, {}, 0)
    assert torch.equal(copied.generate(**GIVEN, **OPTIONS), expected)
    assert package.models.decode_steps(copied).replayed == 10
    package.models.stop_decode_step(step)
    assert "forward" not in vars(step) and not step.generation_config.disable_compile
    assert torch.equal(step.generate(**GIVEN, **OPTIONS), expected)
    with pytest.raises(ValueError, match="use_decode_step was not called"):
        package.models.decode_steps(step)


def test_refusals(package):
    model = tiny_llama()
    for given, options, words in (
        (torch.nn.Linear(2, 2), {}, "decoder of transformers, got Linear"),
        (model, {"max_cache_len": 0}, "at least 1, got 0"),
        (model, {"kv_cache_dtype": "int4"}, "'auto' or 'fp8', got 'int4'"),
    ):
        with pytest.raises(ValueError, match=words):
            package.models.use_decode_step(given, **options)
    assert "forward" not in vars(model)


def test_an_older_transformers_is_refused(package, monkeypatch):
    """Whose caches have no such methods: `make neighbours` runs models beside those."""
    holder = next(cls for cls in DynamicCache.__mro__ if "get_conv_state" in vars(cls))
    monkeypatch.delattr(holder, "get_conv_state")
    model = tiny_llama()
    with pytest.raises(NotImplementedError, match=r"must be 5.22 or newer, .* got 5\.\d+\.\d+"):
        package.models.use_decode_step(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("activations", ["dynamic", "none"])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_recorded_layers_give_the_same_bits(package, monkeypatch, family, in_fp8, activations):
    """On the CPU, of layers that are ours: a step's logits are those of the same step run, with one
    to four sequences, in caches that grow. The kernels of all layers are one call."""
    step = package.models.decode_step
    monkeypatch.setattr(step, "_SPARE", 3)
    _, model = tiny(family, torch.bfloat16, head_dim=64)
    package.models.quantize_model_(model, activations=activations, lm_head=True)
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        model = kernelize(model, mode=Mode.INFERENCE, device="cpu")
    options = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}
    graphs = []

    class Counted(package.models.cpu_recording.CpuGraph):
        def __init__(self, run):
            super().__init__(run)
            graphs.append(self)

    monkeypatch.setattr(package.models.recorded_step, "CpuGraph", Counted)
    for batch in (1, 2, 4):
        given = prompt(batch, 9, (0, 2, 4, 1)[:batch])
        said = []
        for has_graphs in (False, True):
            monkeypatch.setattr(step, "_has_graphs", lambda device, has=has_graphs: has)
            package.models.use_decode_step(model, kv_cache_dtype="fp8" if in_fp8 else "auto")
            said.append(model.generate(**given, **options))
        assert torch.equal(torch.stack(said[0].logits), torch.stack(said[1].logits))
        steps = package.models.decode_steps(model)
        assert steps[:2] == (2, 9), steps  # with 12 tokens of room, and 24
    assert len(graphs) == 6
    for graph in graphs:
        runs = [s for s in graph.steps if s.function is package.models.cpu_recording._run_program]
        assert len(runs) == 1 and len(graph.steps) < 40, [str(s.function) for s in graph.steps]


def test_what_cannot_be_recorded_is_said_and_run(package):
    """A number that is asked for; and padding between tokens, of which a recorded step knows
    nothing."""
    _, model = tiny("Llama")
    step = stepping(package, model)
    norm = step.model.norm
    forward = type(norm).forward
    norm.forward = lambda x: forward(norm, x) if x.isfinite().all() else x
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            said = step.generate(**GIVEN, **OPTIONS), model.generate(**GIVEN, **OPTIONS)
            assert torch.equal(*said)
    steps = package.models.decode_steps(step)
    assert steps.replayed == 0 and any("cannot be recorded" in why for why in steps.passed_on)

    step = stepping(package, model)
    given = prompt(2, 9, (0, 0))
    given["attention_mask"][:, 4:6] = 0
    assert torch.equal(step.generate(**given, **OPTIONS), model.generate(**given, **OPTIONS))
    why = package.models.decode_steps(step).passed_on
    assert why["padding lies between tokens"] == 11, why


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss", "Qwen3"])
def test_graphs_replay_on_a_gpu(best_package, device, run_kernelized, monkeypatch, family, in_fp8):
    """Real graphs: tokens and logits are those of the same model, kernelized, step by step."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    best_package.models.use_attention()
    _, model = tiny(family, torch.bfloat16, head_dim=64)
    model = model.to(device)
    best_package.models.quantize_model_(model)
    model = run_kernelized(model, Mode.INFERENCE)
    options = {**OPTIONS, "output_logits": True, "return_dict_in_generate": True}

    def answers():
        said = []
        for columns in (12, 7, 19):
            torch.manual_seed(columns)
            given = {name: value.to(device) for name, value in prompt(3, columns).items()}
            said.append(model.generate(**given, **options))
        return said

    options_of_use = {"max_cache_len": ROOM, "kv_cache_dtype": "fp8" if in_fp8 else "auto"}
    with monkeypatch.context() as without:
        without.setattr(best_package.models.decode_step, "_has_graphs", lambda device: False)
        best_package.models.use_decode_step(model, **options_of_use)
        expected = answers()
        assert best_package.models.decode_steps(model).replayed == 0
    best_package.models.use_decode_step(model, **options_of_use)
    for one, other in zip(expected, answers(), strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    steps = best_package.models.decode_steps(model)
    assert steps.replayed == 30 and steps.recorded == 3, steps  # each answer keeps its cache
