"""Checkpoints whose experts are FP8, in each form that files have: one by one or in one tensor,
whatever form the model's own files have."""

import copy
import json
import re

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import by_block, by_channel, by_tensor
from tiny_models import randomized
from transformers import AutoConfig, AutoModelForCausalLM

# All experts for each token, so that no router can choose anew for a rounding.
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 160, "head_dim": 64, "pad_token_id": 0, "tie_word_embeddings": False,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 4,
}  # fmt: skip
# One expert's linears, in files: gate, up, down, or up and down.
OF_QWEN = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen3_moe": OF_QWEN,
    "llama4_text": OF_QWEN,
    "gpt_oss": OF_QWEN,
    "qwen3_5_moe_text": OF_QWEN,
    "nemotron_h": ("up_proj", "down_proj"),
}
_OWN = {
    "qwen3_5_moe_text": {"layer_types": ["full_attention"] * 2},
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "nemotron_h": {"layers_block_type": ["attention", "moe"], "n_group": 1, "topk_group": 1},
}


def tiny(family, inner=128, **changes):
    sizes = {**SIZES, "intermediate_size": inner, "moe_intermediate_size": inner,
             "intermediate_size_mlp": 128, "moe_shared_expert_intermediate_size": 128}  # fmt: skip
    config = AutoConfig.for_model(family, **{**sizes, **_OWN.get(family, {}), **changes})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def by_small_block(rows, columns):
    """Scales that are powers of two, stored as their exponents."""

    def quantised(weight):
        n, k = weight.shape
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        exponent = (blocks.abs().amax((1, 3)) / 448).frexp().exponent
        scale = torch.ldexp(torch.ones(exponent.shape), exponent)
        q = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        return q.flatten(2).flatten(0, 1).reshape(n, k), (exponent + 127).to(torch.uint8)

    return quantised


def by_mxfp4(weight):
    """Codes of 4 bits, two a byte, of blocks of 32 columns; the last may be a part of one."""
    n, k = weight.shape
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    return codes, torch.randint(120, 123, (n, -(-k // 32)), dtype=torch.uint8)


# How one expert's weight [N, K] is quantised.
BY = {
    "tensor": by_tensor,
    "channel": by_channel,
    "block": by_block,
    "32 x 32": by_small_block(32, 32),
    "1 x 32": by_small_block(1, 32),
    "mxfp4": by_mxfp4,
    "16 bits": None,
}


def meaning(q, scale):
    """What the numbers of a file stand for, in float32."""
    n, k = q.shape
    if q.dtype == torch.uint8:
        codes = torch.stack([q & 15, q >> 4], -1).flatten(1).int()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
        spread = scale.int().repeat_interleave(32, 1)[:, : 2 * k] - 127
        return torch.ldexp(values, spread)
    if scale.dtype == torch.uint8:
        scale = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
        rows, columns = n // scale.shape[0], k // scale.shape[1]
    elif scale.numel() == 1 or scale.shape == (n, 1):
        return q.float() * scale
    else:
        rows = columns = 128
    spread = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return q.float() * spread


def config_of(by, inputs="none"):
    if " x " in by:
        block = [int(size) for size in by.split(" x ")]
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                "weight_block_size": block, "modules_to_not_convert": _attention()}  # fmt: skip
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    by = "channel" if by == "16 bits" else by
    weights = {**fp8, "strategy": by, "dynamic": False}
    dynamic = {**fp8, "strategy": "token", "dynamic": True}
    if by == "block":
        weights["block_structure"] = [128, 128]
        dynamic = {**fp8, "strategy": "group", "group_size": 128, "dynamic": True}
    if by == "mxfp4":
        weights = {**weights, "num_bits": 4, "strategy": "group", "group_size": 32}
    group = {"targets": [r"re:.*\.experts\..*"], "weights": weights,
             "input_activations": dynamic if inputs == "dynamic" else None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": "float-quantized",
            "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": group}}  # fmt: skip


def finegrained(block):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block,
            "modules_to_not_convert": _attention()}  # fmt: skip


def _attention():
    return ["lm_head", r".*self_attn.*", r".*mixer\.[a-z]_proj", r".*(gate|router)", r".*shared.*"]


def write(model, folder, by, apart=True, config=None, scale="_scale", choose=None):
    """Saves a float32 model with its experts in FP8, all else as it is, into ``folder / "fp8"``,
    and with what those stand for into ``folder / "meant"``.

    Args:
        by: of ``BY``; or a function of a linear's name, in the file, that gives one.
        apart: one by one; False: all in one tensor.
        scale: end of a scale's name.
    """
    model.save_pretrained(folder / "meant")
    model.save_pretrained(folder / "fp8")
    stored = load_file(folder / "meant" / "model.safetensors")
    family = model.config.model_type
    linears = FAMILIES[family]
    modules = {name for name, _ in model.named_modules() if name.endswith(".experts")}
    blocks = sorted({re.sub(r"\.experts\..*", ".experts", k) for k in stored if ".experts." in k})
    assert len(blocks) == len(modules)
    meant, written = dict(stored), dict(stored)
    for block in blocks:
        pairs, biases = {}, {}
        for name, weight in _one_by_one(stored, block, family).items():
            how = by(name) if callable(by) else by
            if name.endswith("bias"):
                biases[name] = weight
            else:
                quantise = BY[how]
                pairs[name] = (weight, None) if quantise is None else quantise(weight)
        values = {n: w if s is None else meaning(w, s) for n, (w, s) in pairs.items()}
        for tensors in (meant, written):
            for key in [key for key in tensors if key.startswith(f"{block}.")]:
                del tensors[key]
        meant.update(_as_own(stored, block, family, {**values, **biases}))
        if apart:
            for name, (weight, own_scale) in pairs.items():
                packed = "_packed" if weight.dtype == torch.uint8 else ""
                written[f"{block}.{name}.weight{packed}"] = weight
                if own_scale is not None:
                    written[f"{block}.{name}.weight{scale}"] = own_scale
            written.update({f"{block}.{name}": bias for name, bias in biases.items()})
        else:
            written.update(_in_one(block, family, linears, pairs, biases, scale))
    _save(meant, folder / "meant")
    _save(written, folder / "fp8")
    described = json.loads((folder / "fp8" / "config.json").read_text())
    described["quantization_config"] = copy.deepcopy(config or config_of(by))
    (folder / "fp8" / "config.json").write_text(json.dumps(described))


def _save(tensors, folder):
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _one_by_one(stored, block, family):
    """``{"3.gate_proj": [N, K], "3.gate_proj.bias": [N]}`` of what a model saves."""
    own = {key[len(block) + 1 :]: t for key, t in stored.items() if key.startswith(f"{block}.")}
    if any(re.match(r"\d+\.", key) for key in own):
        return {key.removesuffix(".weight"): tensor for key, tensor in own.items()}
    found, linears = {}, FAMILIES[family]
    for which, parts in (("gate_up_proj", linears[:2]), ("down_proj", linears[2:])):
        for end in ("", "_bias"):
            for expert, tensor in enumerate(own.get(which + end, ())):
                tensor = tensor.t() if _is_transposed(family) and not end else tensor
                rows = _rows(tensor, parts, family)
                for part, row in zip(parts, rows, strict=True):
                    name = f"{expert}.{part}{end.replace('_', '.')}"
                    found[name] = row.contiguous()
    return found


def _rows(tensor, parts, family):
    if len(parts) == 2 and family == "gpt_oss":
        return tensor[::2], tensor[1::2]
    return tensor.chunk(len(parts))


def _is_transposed(family):
    return family in ("gpt_oss", "llama4_text")


def _joined(rows, family):
    if len(rows) == 2 and family == "gpt_oss":
        return torch.stack(rows, 1).flatten(0, 1)
    return torch.cat(rows)


def _as_own(stored, block, family, values):
    """Back to what a model saves."""
    if any(re.match(rf"{re.escape(block)}\.\d+\.", key) for key in stored):
        return {f"{block}.{name}.weight": value for name, value in values.items()}
    found, linears = {}, FAMILIES[family]
    for which, parts in (("gate_up_proj", linears[:2]), ("down_proj", linears[2:])):
        for end in ("", "_bias"):
            names = [[f"{e}.{p}{end.replace('_', '.')}" for p in parts] for e in range(4)]
            if names[0][0] not in values:
                continue
            each = [_joined([values[name] for name in own], family) for own in names]
            turned = _is_transposed(family) and not end
            found[f"{block}.{which}{end}"] = torch.stack([t.t() if turned else t for t in each])
    return found


def _in_one(block, family, linears, pairs, biases, scale):
    """All experts in one tensor, in the layout of the model's own."""
    found = {}
    halves = (linears[:-1], linears[-1:])
    names = ("gate_up_proj" if len(linears) == 3 else "up_proj", "down_proj")

    def add_bias(which, parts):
        own = [[biases.get(f"{e}.{part}.bias") for part in parts] for e in range(4)]
        if own[0][0] is not None:
            found[f"{block}.{which}_bias"] = torch.stack([_joined(rows, family) for rows in own])

    for which, parts in zip(names, halves, strict=True):
        if pairs[f"0.{parts[0]}"][0].dtype == torch.uint8:  # as GPT-OSS has them, of any family
            own = [[pairs[f"{e}.{part}"] for part in parts] for e in range(4)]
            codes, of_codes = (
                torch.stack([_joined([pair[i] for pair in each], family) for each in own])
                for i in range(2)
            )
            codes = torch.nn.functional.pad(codes, (0, -codes.shape[2] % 16))
            found[f"{block}.{which}_blocks"] = codes.unflatten(2, (-1, 16))
            found[f"{block}.{which}_scales"] = of_codes
            add_bias(which, parts)
            continue
        weights, scales = [], []
        for expert in range(4):
            own = [pairs[f"{expert}.{part}"] for part in parts]
            weights.append(_joined([w.view(torch.uint8) for w, _ in own], family))
            rows = [s.expand(w.shape[0], 1) if s.numel() == 1 else s for w, s in own]
            scales.append(_joined(rows, family))
        turned = _is_transposed(family)
        weights = torch.stack([w.t() if turned else w for w in weights])
        found[f"{block}.{which}"] = weights.contiguous().view(torch.float8_e4m3fn)
        found[f"{block}.{which}{scale}"] = torch.stack([s.t() if turned else s for s in scales])
        add_bias(which, parts)
    return found
