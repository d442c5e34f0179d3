"""Tiny random checkpoints in the FP8 formats that vLLM loads, written as files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 512, 4, 2, 64, 512
EXPERTS, EXPERT_INTERMEDIATE, LAYERS = 4, 256, 2
FP8 = torch.float8_e4m3fn
LARGEST = 448.0

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    # A block and a half. vLLM itself loads no fused weight whose parts are no whole blocks.
    "llama, odd size": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 192,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 64,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "mixtral": MIXTRAL,
    "mixtral, 16-bit experts": MIXTRAL,
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "shared_expert_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
    },
}

# Format -> how weights are scaled, whether activations are static, quantization_config.
FORMATS = {
    "compressed-tensors channel, dynamic": ("channel", False),
    "compressed-tensors tensor, static": ("tensor", True),
    "compressed-tensors tensor, dynamic": ("tensor", False),
    "compressed-tensors block": ("block", False),
    "compressed-tensors weight-only": ("channel", None),
    "fp8 dynamic": ("tensor", False),
    "fp8 static": ("tensor", True),
    "fp8 block": ("block", False),
    "16-bit": (None, None),
}


# What they have between the embedding and the head: the norms of a layer, and what its attention
# norms, one head or all at once.
NORMS = {
    "gemma3": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "olmo2": ("post_attention", "post_feedforward"),
}
NORMED_HEADS = {
    "qwen3": (1, 1),
    "qwen3_moe": (1, 1),
    "gemma3": (1, 1),
    "olmo2": (HEADS, KV_HEADS),
}


def moe_of(model: str, index: int) -> str:
    """Where layer ``index`` has its experts."""
    return f"model.layers.{index}." + ("block_sparse_moe" if "mixtral" in model else "mlp")


def kept(model: str) -> list[str]:
    """Left in 16 bits, as checkpoints do."""
    parts = ["gate", "shared_expert_gate"] + (["experts"] if "16-bit experts" in model else [])
    return ["lm_head", *(f"{moe_of(model, i)}.{part}" for i in range(LAYERS) for part in parts)]


def quantization_config(model: str, name: str) -> dict:
    strategy, static = FORMATS[name]
    if name.startswith("fp8"):
        config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
        if strategy == "block":
            config |= {"weight_block_size": [128, 128], "fmt": "e4m3"}
        return config | {"modules_to_not_convert": kept(model)}
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = number | {"strategy": strategy, "dynamic": False}
    activations = None
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        activations = number | {"strategy": "group", "group_size": 128, "dynamic": True}
    elif static is not None:
        token = "token" if strategy == "channel" or not static else "tensor"
        activations = number | {"strategy": token, "dynamic": not static}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept(model) + (["re:.*experts.*"] if "16-bit experts" in model else []),
    }


def quantized(weight: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` in FP8, and a scale that dequantises."""
    n, k = weight.shape
    rows = {"channel": n, "tensor": 1, "block": -(-n // 128)}[strategy]
    columns = -(-k // 128) if strategy == "block" else 1
    height, width = (128, 128) if strategy == "block" else (n // rows, k)
    padding = (0, columns * width - k, 0, rows * height - n)
    blocks = torch.nn.functional.pad(weight, padding).view(rows, height, columns, width)
    scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    q = (blocks / scale).to(FP8).view(rows * height, columns * width)[:n, :k]
    scale = scale.view(rows, columns)
    return q, scale.reshape(()) if strategy == "tensor" else scale


def write(folder: Path, model: str, name: str, dequantize: bool = False) -> Path:
    """A checkpoint of ``MODELS[model]`` in ``FORMATS[name]``; or what its weights stand for, in
    bfloat16."""
    generator = torch.Generator().manual_seed(0)
    strategy, static = FORMATS[name]
    block_name = "weight_scale_inv" if name == "fp8 block" else "weight_scale"
    tensors: dict[str, torch.Tensor] = {}
    config = COMMON | MODELS[model]
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    queries, keys = HEADS * config["head_dim"], KV_HEADS * config["head_dim"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def linear(path: str, n: int, k: int) -> None:
        if strategy is None:
            tensors[f"{path}.weight"] = random(n, k).bfloat16()
            return
        q, scale = quantized(random(n, k), strategy)
        if dequantize:
            if strategy == "block":
                scale = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            tensors[f"{path}.weight"] = (q.float() * scale).bfloat16()
            return
        tensors[f"{path}.weight"], tensors[f"{path}.{block_name}"] = q, scale
        if static:
            tensors[f"{path}.input_scale"] = torch.tensor(0.02)

    def bias(path: str, n: int) -> None:
        tensors[f"{path}.bias"] = random(n).bfloat16() * n**0.5

    def norm(path: str, size: int) -> None:
        weight = 0.5 + torch.rand(size, generator=generator)
        tensors[f"{path}.weight"] = weight.bfloat16()

    def mlp(path: str, size: int, names=("gate_proj", "up_proj", "down_proj"), bits=8) -> None:
        for part, n, k in zip(names, (size, size, hidden), (hidden, hidden, size), strict=True):
            if bits == 8:
                linear(f"{path}.{part}", n, k)
            else:
                tensors[f"{path}.{part}.weight"] = random(n, k).bfloat16()

    def experts(path: str) -> None:
        tensors[f"{path}.gate.weight"] = random(EXPERTS, hidden).bfloat16() * 4
        for expert in range(EXPERTS):
            if "mixtral" in model:
                bits = 16 if "16-bit" in model else 8
                mlp(f"{path}.experts.{expert}", intermediate, ("w1", "w3", "w2"), bits)
            else:
                mlp(f"{path}.experts.{expert}", EXPERT_INTERMEDIATE)
        if model == "qwen2_moe":
            mlp(f"{path}.shared_expert", intermediate)
            tensors[f"{path}.shared_expert_gate.weight"] = random(1, hidden).bfloat16()

    def experts_of_gpt_oss(path: str) -> None:
        """Of all experts at once, gate and up in turn, with biases."""
        linear(f"{path}.router", EXPERTS, hidden)
        bias(f"{path}.router", EXPERTS)
        for part, n, k in (
            ("gate_up_proj", 2 * intermediate, hidden),
            ("down_proj", hidden, intermediate),
        ):
            weights = random(EXPERTS, n, k).transpose(1, 2).bfloat16()
            tensors[f"{path}.experts.{part}"] = weights
            tensors[f"{path}.experts.{part}_bias"] = random(EXPERTS, n).bfloat16() * n**0.5

    tensors["model.embed_tokens.weight"] = random(VOCABULARY, hidden).bfloat16() * hidden**0.5
    tensors["lm_head.weight"] = random(VOCABULARY, hidden).bfloat16() * 4
    norm("model.norm", hidden)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        for place in NORMS.get(model, ("input", "post_attention")):
            norm(f"{layer}.{place}_layernorm", hidden)
        if model == "phi3":
            linear(f"{attention}.qkv_proj", queries + 2 * keys, hidden)
        else:
            for part, n in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                linear(f"{attention}.{part}", n, hidden)
                if model in ("qwen2", "qwen2_moe", "gpt_oss"):
                    bias(f"{attention}.{part}", n)
        linear(f"{attention}.o_proj", hidden, queries)
        if model in NORMED_HEADS:
            of_queries, of_keys = NORMED_HEADS[model]
            norm(f"{attention}.q_norm", of_queries * HEAD_DIM)
            norm(f"{attention}.k_norm", of_keys * HEAD_DIM)
        if model == "gpt_oss":
            bias(f"{attention}.o_proj", hidden)
            tensors[f"{attention}.sinks"] = random(HEADS).bfloat16()
            experts_of_gpt_oss(f"{layer}.mlp")
        elif model == "phi3":
            linear(f"{layer}.mlp.gate_up_proj", 2 * intermediate, hidden)
            linear(f"{layer}.mlp.down_proj", hidden, intermediate)
        elif "mixtral" in model or "moe" in model:
            experts(moe_of(model, index))
        else:
            mlp(f"{layer}.mlp", intermediate)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    if not dequantize and strategy is not None:
        config["quantization_config"] = quantization_config(model, name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
