"""Halves of decoder layers as one op each (layers/plain_layer.py): the same bits as where modules
are asked at each step, and none of it where somebody looks or wants another thing."""

import contextlib
import importlib

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_models import randomized
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
BOTH, ATTENTION, NEITHER = (True, True), (True, False), (False, False)
EXPERTS_ALONE = (False, True)


def as_they_are(linear):
    pass


def by_block(linear):
    n, k = (-(-size // 128) for size in linear.weight.shape)
    scale = torch.rand(n, k, device=linear.weight.device) * 0.01
    linear.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)


def by_powers_of_two(linear):
    linear.scale_fmt = "ue8m0"


def of_a_tensor(linear):
    """With the scale of an input, too."""
    one = linear.weight_scale_inv.mean().reshape(1)
    linear.weight_scale_inv = torch.nn.Parameter(one, requires_grad=False)
    static = torch.full_like(one, 0.01)
    linear.activation_scale = torch.nn.Parameter(static, requires_grad=False)
    linear.activation_scheme = "static"


# Which halves of a family's layers are plain: attention and MLP.
CASES = [
    ("Llama", {}, as_they_are, BOTH),
    ("Llama", {"hidden_size": 256}, by_block, BOTH),
    ("Llama", {}, by_powers_of_two, BOTH),
    ("Llama", {}, of_a_tensor, BOTH),
    ("Llama", {}, None, BOTH),  # weights alone are FP8
    ("Llama", {"attention_bias": True, "mlp_bias": True}, as_they_are, BOTH),
    ("Mistral", {"sliding_window": 5}, as_they_are, BOTH),
    ("Qwen2", {}, as_they_are, BOTH),
    ("Qwen3", {}, as_they_are, BOTH),
    ("Phi3", {}, as_they_are, BOTH),
    ("SmolLM3", {}, as_they_are, BOTH),
    ("Gemma", {}, as_they_are, BOTH),
    ("Gemma2", {"sliding_window": 5}, as_they_are, BOTH),
    ("Gemma3Text", {"sliding_window": 5}, as_they_are, BOTH),
    ("Gemma3Text", {"sliding_window": 5}, None, BOTH),
    ("Granite", {"residual_multiplier": 0.3}, as_they_are, BOTH),
    ("Olmo2", {}, as_they_are, NEITHER),  # has its norms behind
    ("Qwen3Moe", EXPERTS, as_they_are, BOTH),
    ("Qwen3Moe", EXPERTS, None, BOTH),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, as_they_are, BOTH),
    ("Olmoe", {**EXPERTS, "hidden_size": 256}, as_they_are, EXPERTS_ALONE),  # norms of all heads
    ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
     as_they_are, BOTH),
    ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
     as_they_are, ATTENTION),  # experts that all tokens share
]  # fmt: skip


def quantised(package, device, family, changes, prepare=as_they_are):
    module = importlib.import_module("transformers")
    config = getattr(module, f"{family}Config")(**{**SIZES, **changes})
    model = randomized(getattr(module, f"{family.removesuffix('Text')}ForCausalLM")(config))
    model = model.bfloat16().to(device)
    package.models.quantize_model_(model, activations="dynamic" if prepare else "none")
    for linear in model.modules():
        if prepare and type(linear).__name__ == "FP8Linear":
            prepare(linear)
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        return kernelize(model, mode=Mode.INFERENCE)


class Ops(TorchDispatchMode):
    """Notes the names of this package's ops, when they run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "rocm_kernels" in func._schema.name:
            self.names.append(func._schema.name.rpartition("::")[2])
        return func(*args, **(kwargs or {}))


def prompt(device, batch=2, columns=9, padding=0):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 140, (batch, columns), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@contextlib.contextmanager
def counted(package):
    """How many halves ran as plain ones, of attentions and of MLPs; asked: by the old way."""
    plain, found = package.layers.plain_layer, [0, 0]

    def counting(place, call):
        def run(*args):
            result = call(*args)
            found[place] += result is not None
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        for place, cls in ((0, plain.PlainAttention), (1, plain.PlainMLP), (1, plain.PlainExperts)):
            patch.setattr(cls, "__call__", counting(place, cls.__call__))
        yield found


def run(package, model, given, asked=False, **options):
    """What a model gives for a prompt, and the ops that made it. asked: modules are asked at each
    step."""
    with contextlib.ExitStack() as stack:
        if asked:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(package.layers.decoder, "asked_once", lambda module, ask: None)
        ops = stack.enter_context(Ops())
        stack.enter_context(torch.no_grad())
        cache = importlib.import_module("transformers").DynamicCache(config=model.config)
        out = model(**given, past_key_values=cache, use_cache=True, **options)
    return out, ops.names


QUICK = {
    ("Llama", "as_they_are"),
    ("Llama", "None"),
    ("Llama", "by_block"),
    ("Qwen3Moe", "as_they_are"),
    ("Qwen2Moe", "as_they_are"),
}
FAMILIES = [
    pytest.param(
        *case, cache, id=f"{case[0]}-{len(case[1])}-{getattr(case[2], '__name__', None)}-{cache}",
        marks=() if (case[0], getattr(case[2], "__name__", "None")) in QUICK else pytest.mark.slow,
    )
    for case in CASES
    for cache in ("auto", "fp8")
]  # fmt: skip


@pytest.mark.parametrize("family, changes, prepare, halves, cache", FAMILIES)
def test_the_same_bits_as_where_modules_are_asked(
    best_package, device, family, changes, prepare, halves, cache
):
    model = quantised(best_package, device, family, changes, prepare)
    if prepare is of_a_tensor and device.type == "cuda":
        halves = NEITHER  # the library's products, which need more than their operands
    best_package.models.use_decode_step(model, kv_cache_dtype=cache)
    for given in (prompt(device), prompt(device, 1, 70), prompt(device, 2, 40, padding=3)):
        expected, ops = run(best_package, model, given, asked=True)
        assert not {"layer_attention", "layer_mlp"} & {*ops}
        for _ in range(2):
            with counted(best_package) as found:
                out, ops = run(best_package, model, given)
            assert found == [2 * half for half in halves]
            mlp = "fused_moe" if "fused_moe" in ops else "layer_mlp"
            assert ops.count("layer_attention") == found[0]
            assert ops.count(mlp) == (2 if mlp == "fused_moe" else found[1])
            assert halves != BOTH or not {"attention", "rope_and_cache"} & {*ops}
            assert halves != BOTH or ops.count("gemm") in (0, 2 * (mlp == "fused_moe"))
            assert torch.equal(out.logits, expected.logits)
            caches = zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True)
            for layer, as_asked in caches:
                assert torch.equal(layer.keys, as_asked.keys)
                assert torch.equal(layer.values, as_asked.values)


@pytest.mark.parametrize("family, changes", [("Qwen3", {}), ("Qwen3Moe", EXPERTS)])
@pytest.mark.parametrize(
    "kind", ["forward_hook", pytest.param("forward_pre_hook", marks=pytest.mark.slow)]
)
def test_whatever_has_a_hook_is_called_as_before(best_package, device, kind, family, changes):
    """One hook after the other, on each module of a layer, behind a prompt without any."""
    model = quantised(best_package, device, family, {"num_hidden_layers": 1, **changes})
    best_package.models.use_decode_step(model)
    given = prompt(device)
    run(best_package, model, given)
    named = [*model.model.layers[0].named_modules()]
    assert len(named) > 11
    for _, module in named:
        calls = []
        hook = getattr(module, f"register_{kind}")(lambda *_, calls=calls: calls.append(1))
        plain = run(best_package, model, given)[0].logits
        seen = [*calls]
        asked = run(best_package, model, given, asked=True)[0].logits
        hook.remove()
        assert calls == 2 * seen
        assert torch.equal(plain, asked)
    with counted(best_package) as found:
        run(best_package, model, given)
    assert found == [1, 1]


@pytest.mark.parametrize(
    "family, changes, names",
    [
        ("Llama", {}, ("down_proj", "weight_scale_inv")),
        ("Qwen3Moe", EXPERTS, ("experts", "down_proj_scale_inv")),
        ("Qwen3Moe", EXPERTS, ("gate", "weight")),
    ],
)
def test_another_weight_is_read_at_once(best_package, device, family, changes, names):
    """One that takes another's place behind the look at the model."""
    model = quantised(best_package, device, family, changes)
    best_package.models.use_decode_step(model)
    given, factors = prompt(device), []
    module, name = getattr(model.model.layers[0].mlp, names[0]), names[1]

    def replace(*_):
        for factor in factors:
            new = torch.nn.Parameter(factor * getattr(module, name), requires_grad=False)
            setattr(module, name, new)

    model.model.embed_tokens.register_forward_hook(replace)
    before = [run(best_package, model, given)[0].logits for _ in range(2)]
    assert torch.equal(*before)
    factors.append(2)
    changed = run(best_package, model, given)[0].logits
    factors.clear()
    assert not torch.equal(changed, before[0])
    assert torch.equal(changed, run(best_package, model, given, asked=True)[0].logits)


def test_attentions_that_are_asked_for_are_collected(best_package, device):
    model = quantised(best_package, device, "Llama", {})
    best_package.models.use_decode_step(model)
    given = prompt(device)
    for _ in range(2):
        run(best_package, model, given)
        out, _ = run(best_package, model, given, output_attentions=True, output_hidden_states=True)
        assert len(out.attentions) == 2 and len(out.hidden_states) == 3
        assert all(each.shape[:3] == (2, 4, 9) for each in out.attentions)


def test_what_transformers_collects_is_collected(best_package, device):
    """A hook of its own sleeps on a module until a call is to collect something."""
    model = quantised(best_package, device, "Llama", {})
    best_package.models.use_decode_step(model)
    given, calls = prompt(device), []
    capturing = importlib.import_module("transformers.utils.output_capturing")

    def hook(*_):
        if capturing._active_collector.get():
            calls.append(1)

    hook.__module__ = capturing.__name__
    model.model.layers[1].mlp.register_forward_hook(hook)
    with counted(best_package) as found:
        run(best_package, model, given)
    assert found == [2, 2] and not calls
    run(best_package, model, given, output_hidden_states=True)
    assert calls == [1]


@pytest.mark.parametrize("around", ["autocast", "gradients", "training"])
def test_what_a_graph_does_not_serve_is_asked(best_package, device, around):
    model = quantised(best_package, device, "Llama", {})
    best_package.models.use_decode_step(model)
    given = prompt(device)
    run(best_package, model, given)
    cache = importlib.import_module("transformers").DynamicCache(config=model.config)
    with counted(best_package) as found, contextlib.ExitStack() as stack:
        if around == "training":
            model.train()
        if around != "gradients":
            stack.enter_context(torch.no_grad())
        if around == "autocast":
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        if around == "gradients":
            stack.enter_context(pytest.raises(RuntimeError, match="has no gradient"))
        model(**given, past_key_values=cache, use_cache=True)
    assert found == [0, 0]


def test_a_tangent_of_a_prompt_is_refused(best_package, device):
    model = quantised(best_package, device, "Llama", {})
    best_package.models.use_decode_step(model)
    given = prompt(device)
    run(best_package, model, given)
    rows = model.get_input_embeddings()(given.pop("input_ids")).detach()
    run(best_package, model, {"inputs_embeds": rows, **given})
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="has no gradient"):
        dual = forward_ad.make_dual(rows, torch.randn_like(rows))
        run(best_package, model, {"inputs_embeds": dual, **given})


def test_modules_that_nobody_has_looked_at_are_not_asked_once(best_package):
    """Those of another model, which a hook calls."""
    asking, seen, other = best_package.models.asked_once, torch.nn.Linear(2, 2), torch.nn.ReLU()
    calls = []
    with asking.asking_once(asking.answers_of([seen])):
        assert [asking.asked_once(seen, lambda m: calls.append(m) or 7) for _ in range(3)] == [
            7
        ] * 3
        assert asking.asked_once(other, calls.append) is None
    assert calls == [seen] and asking.asked_once(seen, calls.append) is None


def test_arguments_are_asked_once_for_layers_that_share_them(best_package, device, monkeypatch):
    layers = best_package.layers.plain_layer
    model = quantised(best_package, device, "Llama", {})
    first, second = map(layers.PlainLayer.of, model.model.layers)
    monkeypatch.setattr(layers.Arguments, "of", lambda *given: given)
    x, one, other = (torch.zeros(1, 2, 128) for _ in range(3))
    with best_package.models.asked_once.asking_once({}):
        found = first.arguments((x,), {"attention_mask": one})
        assert second.arguments((x + 1,), {"attention_mask": one}) is found
        assert second.arguments((), {"hidden_states": x, "attention_mask": one}) is not found
        for args, kwargs in (((x,), {"attention_mask": other}), ((x, one), {}), ((x,), {"x": one})):
            assert second.arguments(args, kwargs) is not found
        with best_package.models.asked_once.asking_once({}):
            assert first.arguments((x,), {"attention_mask": one}) is not found


def test_a_prompt_in_chunks_and_one_of_a_token(best_package, device):
    model = quantised(best_package, device, "Llama", {})
    best_package.models.use_decode_step(model)
    given = prompt(device, 2, 33)
    options = {"max_new_tokens": 4, "do_sample": False}
    whole = model.generate(**given, **options)
    with counted(best_package) as found:
        chunked = model.generate(**given, **options, prefill_chunk_size=8)
        assert found == [2 * 4, 2 * 4]  # the last chunk is a single token's
    assert whole.shape == chunked.shape


def test_another_attention_of_the_same_name_is_called(best_package, device, monkeypatch):
    model = quantised(best_package, device, "Llama", {})
    best_package.models.use_decode_step(model)
    given = prompt(device)
    before = run(best_package, model, given)[0].logits
    modeling, calls = importlib.import_module("transformers.modeling_utils"), []

    def attend(*args, **kwargs):
        calls.append(args[0].layer_idx)
        return best_package.models.attention.attend(*args, **kwargs)

    known = modeling.AttentionInterface._global_mapping
    monkeypatch.setitem(known, model.config._attn_implementation, attend)
    assert torch.equal(run(best_package, model, given)[0].logits, before)
    assert calls == [0, 1]


def test_padding_behind_a_text(best_package, device):
    """Its last token sees none of the padding: attention looks at it twice."""
    model = quantised(best_package, device, "Llama", {})
    best_package.models.use_decode_step(model)
    given = prompt(device)
    given["attention_mask"][1, -2:] = 0
    with counted(best_package) as found:
        plain = run(best_package, model, given)[0].logits
    assert found == [0, 2]
    assert torch.equal(plain, run(best_package, model, given, asked=True)[0].logits)
