"""Layers of a recorded step in calls of decode_layers: generate gives what it gives without.

On the CPU that op runs the ops one by one, and a step takes it where it is told to.
"""

import contextlib
import copy
import importlib
import types

import pytest
import torch
from compare import assert_near
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_models import randomized

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
STACKED = {"decode_layers": 2}


def quantised(package, family="Llama", head=False, activations="dynamic", **changes):
    module = importlib.import_module("transformers")
    config = getattr(module, f"{family}Config")(**{**SIZES, **changes})
    model = randomized(getattr(module, f"{family}ForCausalLM")(config)).bfloat16()
    package.models.quantize_model_(model, activations=activations, lm_head=head)
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        return kernelize(model, mode=Mode.INFERENCE)


def prompt(columns=7, *padding):
    """Of a sequence, or of one for each number of columns of padding."""
    mask = torch.arange(columns)[None] >= torch.tensor(padding or [0])[:, None]
    ids = torch.randint(5, 150, mask.shape).where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long()}


def answers(package, model, given, step=None, prepare=lambda model: None, **options):
    """Of generate with ops one by one, and with stacks; and how layers ran then."""
    found = []
    for stacks in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                package.models.recorded_step, "takes_stacks", lambda device, stacks=stacks: stacks
            )
            each = copy.deepcopy(model)
            torch.manual_seed(1)
            prepare(each)
            package.models.use_decode_step(each, **(step or {}))
            torch.manual_seed(0)
            options = {"max_new_tokens": 5, "do_sample": False, **options}
            found.append(each.generate(**given, **options))
        steps = package.models.decode_steps(each)
        assert steps.recorded and steps.replayed >= 3
    return *found, steps.layers


@pytest.mark.parametrize(
    "family, changes, layers",
    [
        ("Llama", {}, STACKED),
        ("Llama", {"head": True}, STACKED),
        ("Mistral", {"sliding_window": 5}, STACKED),
        ("Llama", {"activations": "none"}, {"inputs are not quantised": 2}),
        ("Llama", {"head_dim": 64}, STACKED),
        ("Llama", {"head_dim": 32}, {"heads of 32, not 64 or 128": 2}),
        ("Qwen2", {}, STACKED),
        ("Qwen3", {}, STACKED),
        ("Qwen3", {"head_dim": 64}, STACKED),
        ("Glm", {"head_dim": 128}, STACKED),  # neighbours of half a head rotate
        ("Phi3", {"head_dim": 64, "partial_rotary_factor": 0.75}, STACKED),
        ("Gemma", {}, {"activation of swiglu_fp8 is gelu_tanh": 2}),
    ],
)
def test_layers_run_in_stacks_where_they_are_such(package, family, changes, layers):
    one_by_one, stacked, found = answers(package, quantised(package, family, **changes), prompt())
    assert torch.equal(one_by_one, stacked)
    assert found == layers


@pytest.mark.parametrize("options, expected", [
    (("Llama", {}), STACKED), (("Qwen3", {"kv_cache_dtype": "fp8"}), STACKED),
    (("Gemma", {}), {"activation of gated_gemm is gelu_tanh": 2}),
])  # fmt: skip
def test_a_layers_products_may_quantise_and_gate(package, monkeypatch, options, expected):
    """As on NVIDIA's GPUs, where a rotation may be the attention's launch, too."""
    functional, mlp = (
        package.functional.product,
        importlib.import_module(f"{package.__name__}.layers.mlp"),
    )
    for module in (functional, mlp):
        monkeypatch.setattr(module, "joined_rows", lambda w, scale_w: (1, 1))
    monkeypatch.setattr(package.functional.kvcache, "_may_join", lambda q: True)
    ran, op = [], functional._gated_gemm
    monkeypatch.setattr(functional, "_gated_gemm", lambda *given: ran.append(op(*given)))
    calls, stacks = [], package.models.layer_stacks.ops.decode_layers.default
    record = types.SimpleNamespace(default=lambda *args: calls.append(args) or stacks(*args))
    monkeypatch.setattr(
        package.models.layer_stacks, "ops", types.SimpleNamespace(decode_layers=record)
    )
    family, step = options
    model = quantised(package, family)
    one_by_one, stacked, layers = answers(package, model, prompt(), step=step)
    assert torch.equal(one_by_one, stacked)
    assert layers == expected and ran
    assert len(calls) == (expected == STACKED)  # both layers in one


def test_a_long_cache_is_the_attentions_own(package, monkeypatch):
    """Where its kernel reads it sooner."""
    why = "the cache is so long that the attention's own kernel is quicker"
    for most, said in ((1000.0, why), (0.0, "more sequences than decode_layers takes here")):
        monkeypatch.setattr(package.models.layer_stacks, "most_cache", lambda *_, m=most: m)
        one_by_one, stacked, layers = answers(package, quantised(package), prompt(7, 0, 2))
        assert torch.equal(one_by_one, stacked)
        assert layers == {said: 2}


@pytest.mark.parametrize("cuda, kind, most", [
    ("13.0", "cuda", [64e6, 56e6, 36e6, 36e6, 0.0]), (None, "cuda", [float("inf")] + [0.0] * 4),
    ("13.0", "cpu", [float("inf")] * 5),
])  # fmt: skip
def test_how_long_a_cache_may_be_by_sequences(package, monkeypatch, cuda, kind, most):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    stacks, device = package.models.layer_stacks, torch.device(kind)
    assert [stacks.most_cache(device, 1 + more) for more in range(5)] == most


def with_scales(count):
    def prepare(model):
        for layer in model.model.layers:
            for name in ("k_scale", "v_scale"):
                layer.self_attn.register_buffer(name, torch.rand(count) + 0.5)

    return prepare


def with_other_norms(model):
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.variance_epsilon = 0.1


@pytest.mark.parametrize(
    "options, layers",
    [
        ({"step": {"kv_cache_dtype": "fp8"}}, STACKED),
        ({"step": {"kv_cache_dtype": "fp8"}, "prepare": with_scales(1)}, STACKED),
        ({"step": {"kv_cache_dtype": "fp8"}, "prepare": with_scales(2)}, STACKED),
        ({"family": "Qwen3", "prepare": with_other_norms},
         {"norms of heads are of another kind than those of rows": 2}),
        ({"num_return_sequences": 2, "num_beams": 2}, STACKED),
        ({"num_return_sequences": 3, "do_sample": True}, STACKED),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, {}),  # by other ops
        ({"output_logits": True, "return_dict_in_generate": True}, STACKED),
    ],
)  # fmt: skip
def test_what_generate_is_asked_for_is_as_before(package, options, layers):
    options = dict(options)
    family = options.pop("family", "Llama")
    model = quantised(package, family, num_attention_heads=4, num_key_value_heads=2)
    one_by_one, stacked, found = answers(package, model, prompt(), **options)
    assert found == layers
    for name in one_by_one if isinstance(one_by_one, dict) else ():
        one, other = one_by_one[name], stacked[name]
        if name in ("sequences", "logits", "hidden_states"):
            for a, b in zip(_flat(one), _flat(other), strict=True):
                assert torch.equal(a, b)
    if not isinstance(one_by_one, dict):
        assert torch.equal(one_by_one, stacked)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_layers_behind_one_another_are_one_call(package, monkeypatch, family):
    seen, op = [], package.models.layer_stacks.ops.decode_layers.default
    record = types.SimpleNamespace(default=lambda *args: seen.append(args) or op(*args))
    ops = types.SimpleNamespace(decode_layers=record)
    monkeypatch.setattr(package.models.layer_stacks, "ops", ops)
    *_, found = answers(package, quantised(package, family), prompt())
    assert found == STACKED
    assert {len(call[2]) for call in seen} == {2}


@pytest.mark.parametrize("columns, says", [(128, None), (64, "angles of another type or number")])
def test_angles_of_half_the_columns_are_no_row_for_both(package, columns, says):
    """Two sequences' are as many numbers as one row of whole columns."""
    stacks = package.models.layer_stacks
    qkv = torch.zeros(2, 1, 4, 128, dtype=torch.bfloat16)
    q, k, v = qkv.split((2, 1, 1), 2)
    angles = torch.zeros(2, 1, columns, dtype=torch.bfloat16)
    cache = torch.zeros(2, 8, 1, 128, dtype=torch.bfloat16)
    rope = types.SimpleNamespace(
        q=q, k=k, v=v, out=q, k_cache=cache, v_cache=cache, cos=angles, sin=angles, rotary_dim=128,
        places=torch.zeros(2, 1, dtype=torch.int32), must_be=lambda *_, **__: None,
    )  # fmt: skip
    with contextlib.ExitStack() as entered:
        if says is not None:
            entered.enter_context(pytest.raises(stacks._Differs, match=says))
        stacks._require_rotation(rope)


def _flat(tree):
    return torch.utils._pytree.tree_leaves(tree)


def test_what_is_read_later_is_made(package):
    """A layer's input that the head reads too: then no op is left out."""
    kept = []

    def prepare(model):
        layer, head = model.model.layers[1], model.lm_head
        of_layer, of_head = layer.forward, head.forward
        layer.forward = lambda x, *rest, **options: kept.append(x) or of_layer(x, *rest, **options)
        head.forward = lambda x: of_head(x + kept[-1])

    one_by_one, stacked, found = answers(package, quantised(package), prompt(), prepare=prepare)
    assert torch.equal(one_by_one, stacked)
    assert found == {"something reads what lies between the ops of a layer": 2}


def test_what_a_step_hands_out_is_made(package):
    """Of a head in FP8 all ops are ours, so none is launched before the step's end."""

    def prepare(model):
        kept, layer, inner = [], model.model.layers[1], model.model.forward
        of_layer = layer.forward

        def forward(*args, **options):
            outputs = inner(*args, **options)
            outputs.hidden_states = (kept[-1],)
            return outputs

        layer.forward = lambda x, *rest, **options: kept.append(x) or of_layer(x, *rest, **options)
        model.model.forward = forward

    model = quantised(package, head=True)
    *_, found = answers(package, model, prompt(), prepare=prepare, do_sample=True)
    assert found == {"something reads what lies between the ops of a layer": 2}


@pytest.mark.parametrize(
    "record, why",
    [
        (lambda run: types.SimpleNamespace(replay=run), None),
        (lambda run: run() and types.SimpleNamespace(replay=lambda: None), "is run at once here"),
        (lambda run: types.SimpleNamespace(replay=lambda: None), "something else here in a graph"),
    ],
)
def test_a_device_is_asked_whether_it_records_the_op(package, record, why):
    said = package.models.probe_stacks._ask(
        torch.device("cpu"), lambda run: record(lambda: run() is not None)
    )
    assert said is None if why is None else why in said


def test_a_device_on_which_the_op_is_wrong_does_without(package, monkeypatch):
    probe, refused = package.models.probe_stacks, "decode_layers gives something else here"
    op = probe.decode_layers
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(probe, "decode_layers", lambda **call: op(**call).mul_(1.2))
    one_by_one, stacked, found = answers(package, quantised(package), prompt())
    assert torch.equal(one_by_one, stacked)
    assert found == {f"{refused} than its ops": 0}


@pytest.mark.parametrize("padding", [(4,), (0, 4, 2)])
@pytest.mark.parametrize("step, scales", [
    ({}, None), ({"kv_cache_dtype": "fp8"}, None), ({"kv_cache_dtype": "fp8"}, 1),
    ({"kv_cache_dtype": "fp8"}, 2),
])  # fmt: skip
def test_padding_on_the_left_is_not_seen(package, padding, step, scales):
    options = {} if scales is None else {"prepare": with_scales(scales)}
    model = quantised(package, num_attention_heads=4, num_key_value_heads=2)
    one_by_one, stacked, found = answers(package, model, prompt(9, *padding), step=step, **options)
    assert torch.equal(one_by_one, stacked)
    assert found == STACKED


@pytest.mark.parametrize("padding", [(0,), (0, 2, 4)])
def test_a_refusal_of_the_op_leaves_the_ops(package, monkeypatch, padding):
    """As on AMD, where it takes some sizes alone."""

    def refuse(*args):
        raise RuntimeError("decode_layers: hidden must be larger")

    ops = types.SimpleNamespace(decode_layers=types.SimpleNamespace(default=refuse))
    monkeypatch.setattr(package.models.layer_stacks, "ops", ops)
    one_by_one, stacked, found = answers(package, quantised(package), prompt(7, *padding))
    assert torch.equal(one_by_one, stacked)
    assert found == {"decode_layers: hidden must be larger": 2}


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("family, padding", [
    ("Llama", (2,)), ("Qwen2", (2,)), ("Qwen3", (2,)), ("Qwen2", (2, 0)), ("Qwen3", (9, 0, 70, 31)),
])  # fmt: skip
def test_on_hopper(best_package, device, run_kernelized, monkeypatch, family, padding, in_fp8):
    """In a real graph, with its branches: logits of steps behind tokens of chance."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")
    torch.manual_seed(3)
    sizes = {"hidden_size": 1024, "intermediate_size": 2304, "num_attention_heads": 8,
             "num_key_value_heads": 2, "num_hidden_layers": 3}  # fmt: skip
    module = importlib.import_module("transformers")
    config = getattr(module, f"{family}Config")(**{**SIZES, **sizes})
    model = randomized(getattr(module, f"{family}ForCausalLM")(config)).bfloat16().to(device)
    best_package.models.quantize_model_(model)
    model = run_kernelized(model, Mode.INFERENCE)
    given = {name: value.to(device) for name, value in prompt(150, *padding).items()}
    tokens = torch.randint(2, config.vocab_size, (24,)).tolist()

    def only_those(prompts, scores):
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, tokens[prompts.shape[1] - 150]] = 0.0
        return chosen

    said, layers = [], []
    for stacks in (False, True):
        monkeypatch.setattr(
            best_package.models.recorded_step, "takes_stacks", lambda device, stacks=stacks: stacks
        )
        best_package.models.use_decode_step(model, kv_cache_dtype="fp8" if in_fp8 else "auto")
        said.append(
            model.generate(**given, max_new_tokens=24, do_sample=False, output_logits=True,
                           return_dict_in_generate=True, logits_processor=[only_those])
        )  # fmt: skip
        layers.append(best_package.models.decode_steps(model).layers)
        best_package.models.stop_decode_step(model)
    assert layers == [{}, {"decode_layers": 3}]
    for answer in said:
        assert answer.sequences[:, 150:].tolist() == [tokens] * len(padding)
    for step in range(2, 24):  # a first step runs op by op
        assert_near(said[1].logits[step], said[0].logits[step], norm=0.12)


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_simulator")
@pytest.mark.parametrize("family, in_fp8", [("Llama", False), ("Qwen2", False), ("Qwen3", True)])
def test_on_the_simulator(family, in_fp8):
    """A model's step behind two others, its layers by the kernel."""
    simulated = pytest.importorskip("simulated")
    package = simulated.functional()
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8}
    model = quantised(package, family, **sizes, num_key_value_heads=2)
    package.models.use_attention(model)
    stacks, late_sums = package.models.layer_stacks.LayerStacks(), package.models.late_sums.LateSums

    def logits_of(*modes):
        cache = package.models.growing_cache.growing_cache(model, 8, in_fp8=in_fp8)
        for count, token in enumerate((7, 90, 31), 1):
            with torch.no_grad(), contextlib.ExitStack() as seen:
                for mode in modes if count == 3 else ():
                    seen.enter_context(mode)
                ids = torch.tensor([[token]])
                logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            cache.tokens, cache.idle = count, True
        return logits[0, -1], cache.layers

    expected, rows = logits_of()
    found, its = logits_of(simulated.Seen(), stacks, late_sums())
    assert stacks.layers == STACKED
    # Logits: 0.043 to 0.059 in five draws, beyond 0.08 on a CPU that rounds otherwise.
    assert_near(found, expected, norm=0.12)
    dtype = simulated.NATIVE if in_fp8 else torch.bfloat16
    for one, other in zip(its, rows, strict=True):
        for name in ("keys", "values"):
            ours, right = (getattr(layer, name)[:, :, :3] for layer in (one, other))
            assert_near(ours.view(dtype), right.view(dtype))
