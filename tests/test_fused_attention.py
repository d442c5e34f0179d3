"""Attentions between their projections, in fused decoder layers and alone: one op, against their
own code."""

import copy
import sys

import pytest
import torch
from kernels import Mode
from tiny_attention import FAMILIES, MIXED, prompt, tiny
from transformers import DynamicCache, StaticCache

# In decoder layers that keep their own forward; with norms of all heads; with a part that turns,
# pairs that are neighbours, or angles beside themselves.
MORE = {
    "Starcoder2": {"use_bias": True}, "Cohere": {}, "Cohere2": MIXED, "Nemotron": {},
    "Olmo2": {}, "Olmoe": {"num_experts": 4, "num_experts_per_tok": 4}, "Glm": {},
}  # fmt: skip
CACHES = ("dynamic", "static", "growing", "growing fp8")
GIVEN = prompt()


@pytest.fixture
def pair(package, run_kernelized, monkeypatch):
    """Of a family: two models of the same weights, the second with its attentions' own forwards;
    and how often the op ran."""
    package.models.use_attention()
    calls = []
    ours = package.layers.attention.rope_and_cache

    def counted(*args, **options):
        calls.append(options)
        return ours(*args, **options)

    monkeypatch.setattr(package.layers.attention, "rope_and_cache", counted)

    def make(family, dtype=torch.float32, **changes):
        _, model = tiny(family, dtype, **{**MORE.get(family, {}), **changes})
        package.models.quantize_model_(model)
        model = run_kernelized(model, Mode.INFERENCE)
        plain = copy.deepcopy(model)
        for module in plain.modules():
            vars(module).pop("kernel_attention", None)
        return model, plain, calls

    return make


def logits(package, model, kind):
    """Of a prompt and three steps, with tokens that do not depend on the model."""
    room = {"max_cache_len": 20}
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, **room),
        "growing": lambda: package.models.growing_cache.growing_cache(model, 20, False),
        "growing fp8": lambda: package.models.growing_cache.growing_cache(model, 20, True),
    }[kind]()
    given = {name: tensor.to(model.device) for name, tensor in GIVEN.items()}
    said, mask = [], given["attention_mask"]
    tokens = torch.arange(7, 16, device=model.device).view(3, 3)
    with torch.inference_mode():
        out = model(**given, past_key_values=cache, use_cache=True)
        said.append(out.logits)
        for step in range(3):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            out = model(tokens[:, step, None], attention_mask=mask, past_key_values=cache)
            said.append(out.logits)
    return torch.cat(said, 1)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_logits_are_those_of_its_own_forward(package, pair, family, kind):
    """In float32, where both round alike."""
    fused, plain, calls = pair(family)
    got, expected = (logits(package, model, kind).float() for model in (fused, plain))
    layers = fused.config.num_hidden_layers
    assert len(calls) == (layers * 4 if kind in ("growing", "growing fp8") else 0)
    assert all(options["k_cache"] is not None for options in calls)
    seen = torch.nn.functional.pad(GIVEN["attention_mask"], (0, got.shape[1] - 12), value=1).bool()
    seen = seen.to(got.device)
    error = (got - expected)[seen].norm() / expected[seen].norm()
    # Where an input of a product, or an FP8 cache, rounds the other way.
    assert error < (0.1 if "fp8" in kind else 0.02)


@pytest.mark.parametrize("kind", ["growing", "growing fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_hands_the_rotation_to_its_attention(package, pair, monkeypatch, family, kind):
    """As on NVIDIA's GPUs: in each layer of each step one rotation waits, with the same bits."""
    fused, _, calls = pair(family, torch.bfloat16)  # what a GPU's kernels take
    expected = logits(package, fused, kind)
    held, kvcache, count = [], package.functional.kvcache, len(calls)

    class Ops:
        hold_rotation = staticmethod(lambda next: (held.append(next), ops.hold_rotation(next)))

    ops = kvcache.ops
    monkeypatch.setattr(kvcache, "ops", Ops)
    monkeypatch.setattr(kvcache, "_may_join", lambda q: True)
    assert torch.equal(logits(package, fused, kind), expected)
    assert held == [True] * (3 * count // 4)


def test_a_hook_on_a_norm_sees_it_run(package, pair):
    fused, plain, calls = pair("Qwen3")
    seen = []
    for model in (fused, plain):
        attention = model.model.layers[0].self_attn
        attention.q_norm.register_forward_hook(lambda *a: seen.append(1))
    got, expected = (logits(package, model, "growing") for model in (fused, plain))
    assert len(seen) == 8 and len(calls) == 4  # of the second layer alone
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_a_hook_on_the_projections_keeps_what_it_saw(package, pair):
    fused, _, calls = pair("Llama")
    seen = []

    def keep(module, args, result):
        seen.append((result, result.clone()))

    fused.model.layers[0].self_attn.qkv_proj.register_forward_hook(keep)
    logits(package, fused, "growing")
    assert len(seen) == 4 and len(calls) == 4  # of the second layer alone
    assert all(torch.equal(result, was) for result, was in seen)


@pytest.mark.parametrize("change", ["queries", "keys", "mask", "result", "twice", "rotation"])
def test_one_that_does_something_else_is_left_alone(package, change):
    """A subclass of the class's own name, whose forward differs in one place."""
    package.models.use_attention()
    _, model = tiny("Llama")
    attention = model.model.layers[0].self_attn
    base = type(attention)
    modeling = sys.modules[base.__module__]

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None,
        **kwargs,
    ):  # fmt: skip
        def changed(name, value):
            return value * 1.5 if change == name else value

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            p(hidden_states).view(shape).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = position_embeddings
        if change == "rotation":
            sin = -sin
        q, k = modeling.apply_rotary_pos_emb(changed("queries", q), changed("keys", k), cos, sin)
        k, v = past_key_values.update(k, v, self.layer_idx)
        function = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling.eager_attention_forward
        )
        mask = None if change == "mask" else attention_mask
        for _ in range(2 if change == "twice" else 1):
            out, weights = function(self, q, k, v, mask, scaling=self.scaling, **kwargs)
        out = out.reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(changed("result", out)), weights

    family = package.models.families.LLAMA
    probe = package.models.probe_attention
    assert probe.probe_attention(attention, family).rotates
    attention.__class__ = type(base.__name__, (base,), {"forward": forward})
    with pytest.raises(package.models.probe.Differs):
        probe.probe_attention(attention, family)
    change = "nothing"
    assert probe.probe_attention(attention, family).rotates
