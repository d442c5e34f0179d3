"""A tiny random model of any family that transformers has, by the names of its configuration's
numbers: hidden sizes become 64, layers 2 or one of each kind, windows 7."""

import importlib
import inspect
import re

import torch
import transformers
from tiny_models import randomized
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEADS, KV_HEADS, HEAD = 4, 2, 16
# The first that fits a name, of what is a number or a list of numbers.
RULES = [
    (re.compile(rf"^({names})$"), size)
    for names, size in (
        (r".*vocab_size", 160),
        (r"n_layers?|num_layers|encoder_layers|decoder_layers|depths?|num_blocks|predictor_.*layers"
         r"|num_(encoder|decoder)_(layers|blocks)|(encoder_|decoder_)?num_(hidden_)?layers", 2),
        (r"n_heads?|num_heads|(encoder_|decoder_)?attention_heads|.*num_attention_heads", HEADS),
        (r".*num_key_value_heads|multi_query_group_num|num_kv_heads|kv_n_heads", KV_HEADS),
        (r"(.*_)?hidden_size|d_model|n_embd|(vision_)?embed_dim|dim|word_embed_proj_dim|hidden_dim"
         r"|embedding_size|emb_dim|project(ion|or)_dim|lru_width|output_dim|d_embed|hidden_sizes"
         r"|encoder_hidden_dim", 64),
        (r"moe_intermediate_size|.*expert.*intermediate_size|.*expert_ffn.*|moe_(ffn|hidden).*",
         64),
        (r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|d_ff|n_inner|mlp_dim|inner_dim"
         r"|dim_feedforward|ffn_size|.*mlp_hidden.*", 96),
        (r"d_kv|(.*_)?head_dim|kv_channels|.*head_size|query_pre_attn_scalar", HEAD),
        (r"q_lora_rank", 48), (r"kv_lora_rank", 32), (r".*lora_rank", 16),
        (r".*num_experts|num_local_experts|n_routed_experts|num_routed_experts", 4),
        # All experts for each token: a router that chooses anew for a rounding drowns the rest.
        (r".*experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|.*_top_k|num_selected_experts", 4),
        (r"n_group|topk_group|num_expert_group|first_k_dense_replace|.*n?(um)?_shared_experts", 1),
        (r".*max_position_embeddings|n_positions|max_seq_len|max_sequence_length|seq_length|n_ctx"
         r"|max_(source|target)_positions|max_length|model_max_length", 256),
        (r".*sliding_window.*|attention_window_size|(local_)?window_size|local_attention|swa_window"
         r"|(attention_)?chunk_size", 7),
        (r"hidden_size_per_layer_input|per_layer_.*|altup.*dim|mamba_d_state|ssm_state_size"
         r"|state_size|mamba_d_head|linear_.*_head_dim|num_mel_bins", 16),
        (r".*mamba_(n_|num_)?heads|mamba_chunk_size|mamba_dt_rank|time_step_rank|block_size", 8),
        (r"rotary_dim|patch_size", 8),
        (r"mamba_n_groups|n_groups", 1), (r"mamba_d_ssm", 128), (r"linear_num_value_heads", 4),
        (r"linear_num_key_heads", 2), (r"index_n_heads", 16), (r"index_head_dim|image_size", 32),
        (r"index_topk", 4), (r"num_nextn_predict_layers", 0),
    )
]  # fmt: skip
IDS = {
    "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "decoder_start_token_id": 1,
    "eos_token_id": 2, "sep_token_id": 2, "image_token_id": 152, "image_token_index": 152,
    "video_token_id": 153, "audio_token_id": 154, "vision_start_token_id": 155,
    "vision_end_token_id": 156,
}  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# What no name tells.
OTHERS = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "gemma3n_text": {
        "num_hidden_layers": 5, "num_kv_shared_layers": 1, "intermediate_size": [96] * 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 16, "qk_head_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"], "index_block_size": 2,
        "index_topk_blocks": 2, "index_n_heads": 2,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 16),
        "attn_layers": ["local", "lsh"],
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "moe_router_topk": 1},
}  # fmt: skip


def small(name, value):
    """A number's small value; None: it stays."""
    size = next((size for names, size in RULES if names.match(name)), None)
    if size is None:
        return None
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return type(value)([min(each, size) for each in value])
    if type(value) is not int or value <= 0:
        return None
    return min(value, size) if "key_value" in name else size


def shrunk(cls, **others):
    """A tiny configuration of a class."""
    base = cls()
    parts = getattr(cls, "sub_configs", None) or {}
    was = {
        name: value
        for name, value in vars(base).items()
        if name not in parts and not isinstance(getattr(cls, name, None), property)
    }
    given = {}
    for name, value in was.items():
        size = None if name.startswith("_") or name == "layer_types" else small(name, value)
        if size is not None:
            given[name] = size
    given.update({name: number for name, number in IDS.items() if hasattr(base, name)})
    if "head_dim" in was and was["head_dim"] is None:
        given["head_dim"] = HEAD
    if "kv_lora_rank" in was and was.get("num_key_value_heads", 0) != 0:
        given["num_key_value_heads"] = HEADS  # latent keys and values are of all heads
    elif "num_key_value_heads" in was and was["num_key_value_heads"] is None:
        given["num_key_value_heads"] = KV_HEADS
    # One layer of each kind; lists that have an item a layer follow.
    kinds = getattr(base, "layer_types", None)
    count = next((given[name] for name in LAYERS if name in given), 2)
    chosen = list(range(count))
    if kinds:
        chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        chosen = (chosen * count)[: max(count, len(chosen))]
        given.update({name: len(chosen) for name in LAYERS if name in given})
        if "layer_types" in was:
            given["layer_types"] = [kinds[i] for i in chosen]
    of_all = next((was[name] for name in LAYERS if type(was.get(name)) is int), 0)
    for name, value in was.items():
        a_layer = isinstance(value, (list, tuple)) and len(value) == of_all > 4
        if a_layer and name != "layer_types":
            given[name] = type(value)([given.get(name, value)[i] for i in chosen])
    for name, part in parts.items():
        own = part if part.__name__ != "AutoConfig" else type(getattr(base, name, None))
        if own is not type(None):
            given[name] = shrunk(own)
    if isinstance(was.get("rope_parameters"), dict) and "mrope_section" in _code_of(cls):
        given["rope_parameters"] = {**base.rope_parameters, "mrope_section": [2, 3, 3]}
    return cls(**{**given, **others})


def _code_of(config):
    name = config.__module__.replace("configuration_", "modeling_")
    try:
        return inspect.getsource(importlib.import_module(name))
    except ImportError:
        return ""


def tiny_of(kind, table="CAUSAL_LM"):
    """A tiny random model of a type, in float32, with its own eager attention."""
    name = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")[kind]
    architecture = getattr(transformers, name if isinstance(name, str) else name[0])
    config = shrunk(CONFIG_MAPPING[kind], **OTHERS.get(kind, {}))
    wanted = architecture.config_class
    if not isinstance(config, wanted):  # a part of a larger model
        parts = [getattr(config, part, None) for part in config.sub_configs]
        config = next(part for part in parts if isinstance(part, wanted))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if hasattr(part, "is_decoder") and not part.is_encoder_decoder:
            part.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in architecture(config).parameters())
    if size > 3e7:
        raise ValueError(f"{size:,} weights are not tiny")
    config._attn_implementation = "eager"
    config.use_cache = True
    # What randomized would change may be more than weights: rates and states of recurrences.
    model = architecture(config)
    kept = {name: each.clone() for name, each in model.named_parameters() if each.dim() < 2}
    model = randomized(model)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name in kept or "A_log" in name:
                each.copy_(kept.get(name, torch.zeros_like(each)))
    return model


def families(table="CAUSAL_LM"):
    return [*getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")]
