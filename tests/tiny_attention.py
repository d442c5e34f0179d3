"""Tiny models of each kind of attention, with transformers' own and with this package's."""

import copy
import importlib

import torch
from tiny_models import randomized, tokens

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3Text": {**MIXED, "query_pre_attn_scalar": 16},
    "GptOss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3": {"num_key_value_heads": 1},
}


def tiny(family, dtype=torch.float32, **changes):
    """Two models of the same weights: eager attention's, and ours."""
    module = importlib.import_module("transformers")
    name = {"Gemma3Text": "Gemma3"}.get(family, family)
    own = {**SIZES, **FAMILIES.get(family, {}), **changes}
    config = getattr(module, f"{family}Config")(**own)
    config._attn_implementation = "eager"
    eager = randomized(getattr(module, f"{name}ForCausalLM")(config)).to(dtype)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("rocm_kernels")
    return eager, ours


def prompt(rows=3, columns=12, padding=(0, 4, 1)):
    """Tokens, and a mask of as many paddings on the left of each row."""
    ids = tokens(rows, columns) % 150 + 5
    mask = torch.arange(columns) >= torch.tensor(padding)[:, None]
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


# Greedy answers of one length, with the logits of each step.
WITH_LOGITS = {
    "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True,
    "return_dict_in_generate": True,
}  # fmt: skip


def assert_same_answers(got, expected):
    """Of what generate returns with those options, or without their logits."""
    assert torch.equal(got.sequences, expected.sequences)
    if "logits" in got:
        pair = torch.stack(got.logits), torch.stack(expected.logits)
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


def stepping(package, model, **options):
    """A copy of the model with use_decode_step."""
    model = copy.deepcopy(model)
    package.models.use_decode_step(model, **options)
    return model


def beside_a_step(package, monkeypatch, model):
    """The model, and one of the same weights with use_decode_step, whose cache grows within an
    answer."""
    monkeypatch.setattr(package.models.decode_step, "_SPARE", 6)
    return model, stepping(package, model)


def assert_same_logits(ours, eager, mask):
    seen = mask.bool()
    torch.testing.assert_close(ours[seen], eager[seen], rtol=1e-4, atol=1e-4)
