"""What an attention makes of its place in the text, and of numbers that change behind its probe."""

import copy

import pytest
import torch
from kernels import Mode
from tiny_attention import SIZES, WITH_LOGITS, stepping, tiny
from tiny_models import randomized, tokens
from transformers import DynamicCache, Llama4ForCausalLM, Llama4TextConfig

# As published but for sizes: layers without rotation scale their queries by their positions.
TEMPERED = {
    "intermediate_size_mlp": 64, "num_local_experts": 4, "moe_layers": [], "attn_scale": 0.1,
    "attn_temperature_tuning": True, "attention_chunk_size": 8192,
    "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
}  # fmt: skip


@pytest.fixture(autouse=True)
def known_attention(package):
    """``tiny`` names it."""
    package.models.use_attention()


def tempered(floor_scale):
    config = Llama4TextConfig(**{**SIZES, **TEMPERED, "floor_scale": floor_scale})
    return randomized(Llama4ForCausalLM(config))


def difference(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_kernelized", [False, True])
def test_a_layer_that_asks_for_its_own_length(package, device, run_kernelized, is_kernelized):
    """Llama 4's, which do so before they write: behind others of the same call that have written,
    in a prompt, its chunks, a step that is run and steps that are replayed."""
    model, prompt = tempered(floor_scale=4).to(device), tokens(1, 13).to(device) % 150 + 5
    if is_kernelized:
        package.models.quantize_model_(model, activations="none")
        model = run_kernelized(model, Mode.INFERENCE)
    step = stepping(package, model)
    for way in ({}, {"prefill_chunk_size": 5}):
        given = {"input_ids": prompt, "max_new_tokens": 9, **WITH_LOGITS, **way}
        said = [torch.stack(each.generate(**given).logits) for each in (step, model)]
        assert difference(*said) < 1e-5
    assert package.models.decode_steps(step).replayed == 15


@pytest.mark.parametrize("floor_scale", [4, 8192])
def test_a_temperature_is_seen_wherever_it_begins(package, floor_scale):
    """The probe's few tokens lie before the first position that 8192 changes."""
    for is_tempered in (True, False):
        model = tempered(floor_scale)
        attention = model.model.layers[1].self_attn  # which does not turn
        attention.attn_temperature_tuning = is_tempered
        package.models.quantize_model_(model, activations="none")
        assert hasattr(attention, "kernel_attention") != is_tempered


def test_positions_that_are_handed_on_are_seen(package):
    """By a module that looks for them among the arguments that it hands on."""

    class Attention(type(tiny("Llama")[1].model.layers[0].self_attn)):
        def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None,
                    **kwargs):  # fmt: skip
            places = kwargs.get("position_ids")
            if places is not None:
                cos, sin = position_embeddings
                far = 1 + (places[..., None] > 1000)
                position_embeddings = cos * far, sin * far
            return super().forward(
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )

    _, model = tiny("Llama")
    model.model.layers[1].self_attn.__class__ = Attention
    package.models.quantize_model_(model, activations="none")
    assert [hasattr(x.self_attn, "kernel_attention") for x in model.model.layers] == [True, False]


def test_a_growing_caches_lengths_are_a_dynamic_ones(package):
    """Of each layer at each moment of a forward, in the order of its writes."""
    _, model = tiny("Llama")
    ours = package.models.growing_cache.growing_cache(model, 20, False)
    theirs = DynamicCache(config=model.config)
    lengths = []
    for rows in (3, 1, 2):
        for cache in (theirs, ours):
            said = []
            with package.models.growing_cache.serving(cache), torch.no_grad():
                for written in (None, 0, 1):
                    if written is not None:
                        cache.update(*torch.zeros(2, 1, 2, rows, 16), written)
                    said.append([int(cache.get_seq_length(layer)) for layer in range(3)])
            lengths.append(said)
        assert lengths[-1] == lengths[-2]
        ours.tokens, ours.idle = int(ours.length), True
    ours.idle = False  # a forward that was cut off between two layers, and the next one
    with package.models.growing_cache.serving(ours):
        ours.update(*torch.zeros(2, 1, 2, 1, 16), 0)
    with package.models.growing_cache.serving(ours):
        assert int(ours.get_seq_length(1)) == int(ours.get_seq_length()) == 7


@pytest.mark.parametrize("change", ["a norm's forward", "scaling", "sliding_window", "softcap"])
def test_what_changes_behind_the_probe_is_noticed(package, run_kernelized, change):
    """Before the first answer, and between two."""
    package.models.use_attention()
    family = {"a norm's forward": "Qwen3", "softcap": "Gemma2"}.get(change, "Mistral")
    _, model = tiny(family)
    package.models.quantize_model_(model, activations="none")
    model = run_kernelized(model, Mode.INFERENCE)
    step = stepping(package, model)
    given = {"input_ids": tokens(1, 13) % 150 + 5, "max_new_tokens": 5, **WITH_LOGITS}
    said = []
    for turn in range(3):
        if turn:
            for each in (step, model):
                for layer in each.model.layers:
                    alter(layer.self_attn, change, turn)
        pair = [torch.stack(each.generate(**given).logits) for each in (step, model)]
        assert difference(*pair) < 1e-5
        assert all(difference(pair[1], before) > 1e-3 for before in said)
        said.append(pair[1])


def alter(attention, change, turn):
    if change == "a norm's forward":
        forward = attention.q_norm.forward
        attention.q_norm.forward = lambda x: forward(x) * 0.5
    elif change == "scaling":
        attention.scaling = 0.1 / turn
    elif change == "sliding_window":
        attention.scaling, attention.sliding_window = 0.1 / turn, 3
    else:
        attention.attn_logit_softcapping = 0.5 / turn


@pytest.mark.parametrize(
    "name", ["self_attn.k_norm", "input_layernorm", "post_attention_layernorm", "mlp.act_fn"]
)
def test_a_forward_of_the_users_behind_kernelize_runs(package, device, run_kernelized, name):
    """Of a module whose work a layer around it would do."""
    model = tiny("Qwen3")[1].to(device)
    package.models.quantize_model_(model, activations="none")
    plain = copy.deepcopy(model)
    step = stepping(package, run_kernelized(model, Mode.INFERENCE))
    prompt = tokens(1, 13).to(device) % 150 + 5
    given = {"input_ids": prompt, "max_new_tokens": 5, **WITH_LOGITS}
    before = torch.stack(plain.generate(**given).logits)
    for each in (step, plain):
        module = each.model.layers[1].get_submodule(name)
        module.forward = lambda x, forward=module.forward: forward(x) * 0.5
    pair = [torch.stack(each.generate(**given).logits) for each in (step, plain)]
    assert difference(*pair) < 1e-5 and difference(pair[1], before) > 1e-2
