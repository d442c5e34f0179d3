"""FP8 checkpoints of tiny models, written as their makers' tools write them: one function a format,
from float32 weights to what stands in the file and in its config."""

import copy
import functools
import importlib
import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

FP8 = torch.float8_e4m3fn


def static_scale(name):
    """Of a linear's input, by its name: one for what shares an input, as calibration gives."""
    of_mlp = {"gate_proj": 0.012, "up_proj": 0.012, "gate_up_proj": 0.012, "down_proj": 0.02}
    return {"o_proj": 0.007, **of_mlp}.get(name.rpartition(".")[2], 0.011)


def quantised(weight, amax):
    scale = amax / 448
    return (weight / scale).to(FP8), scale


def by_tensor(weight):
    q, scale = quantised(weight, weight.abs().max())
    return q, scale.reshape(())


def by_channel(weight):
    return quantised(weight, weight.abs().amax(1, keepdim=True))


def by_block(weight, powers_of_two=False):
    n, k = weight.shape
    rows, columns = -(-n // 128), -(-k // 128)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[:n, :k] = weight
    scale = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
    scale = torch.exp2(scale.log2().ceil()) if powers_of_two else scale
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (weight / spread).to(FP8), scale


def dequantised(q, scale):
    scale = scale.flatten(2).flatten(0, 1) if scale.dim() == 4 else scale
    if (scale.dim() == 2 and scale.shape[1] > 1) or scale.numel() not in (1, q.shape[0]):
        scale = scale.repeat_interleave(128, 0)[: q.shape[0]]
        scale = scale.repeat_interleave(128, 1)[:, : q.shape[1]]
    elif scale.numel() > 1:
        scale = scale.reshape(-1, 1)
    return q.float() * scale.reshape(()) if scale.numel() == 1 else q.float() * scale


def finegrained(scheme, blocks):
    config = {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "weight_block_size": [128, 128] if blocks else None,
        "modules_to_not_convert": ["lm_head"],
    }
    return config, by_block if blocks else by_tensor, "weight_scale_inv", "activation_scale"


def ue8m0():
    """DeepSeek-V3.1's: its files have such scales in float32."""
    config, by, *names = finegrained("dynamic", True)
    return {**config, "scale_fmt": "ue8m0"}, functools.partial(by, powers_of_two=True), *names


def compressed_tensors(weights, inputs):
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    dynamic = {**fp8, "strategy": "token", "dynamic": True}
    for_all = {**fp8, "strategy": "tensor", "dynamic": True}
    if weights == "block":
        dynamic = {**fp8, "strategy": "group", "group_size": 128, "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": {**fp8, "strategy": weights, "dynamic": False},
        "input_activations": {
            "dynamic": dynamic,
            "one for all tokens": for_all,
            "static": {**fp8, "strategy": "tensor", "dynamic": False},
            "none": None,
        }[inputs],
    }
    if weights == "block":
        group["weights"]["block_structure"] = [128, 128]
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    by = {"tensor": by_tensor, "channel": by_channel, "block": by_block}[weights]
    return config, by, "weight_scale", "input_scale"


def quark(inputs):
    fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None,
           "group_size": None, "observer_cls": "PerTensorMinMaxObserver", "symmetric": None,
           "round_method": None, "scale_type": None}  # fmt: skip
    channels = {**fp8, "qscheme": "per_channel", "observer_cls": "PerChannelMinMaxObserver"}
    layer = {
        "weight": {**channels, "ch_axis": 0} if inputs == "per token" else fp8,
        "input_tensors": {
            "static": fp8, "none": None, "per token": {**channels, "ch_axis": 1, "is_dynamic": True}
        }[inputs],
        "output_tensors": None, "bias": None,
    }  # fmt: skip
    config = {
        "quant_method": "quark",
        "global_quant_config": layer,
        # AMD's checkpoints with FP8 in their names' end: keys and values for a cache in FP8.
        "layer_quant_config": {
            name: {**layer, "output_tensors": fp8} for name in ("*k_proj", "*v_proj")
        },
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "quant_mode": "eager_mode",
        "algo_config": None,
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder",
                   "weight_format": "real_quantized", "weight_merge_groups": None},
    }  # fmt: skip
    by = by_channel if inputs == "per token" else by_tensor
    return config, by, "weight_scale", "input_scale"


def modelopt(algorithm):
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.40.0"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }
    by = {"FP8": by_tensor, "FP8_PER_CHANNEL_PER_TOKEN": by_row, "FP8_PB_WO": by_block_of_four}
    return config, by[algorithm], "weight_scale", "input_scale"


def by_row(weight):
    q, scale = by_channel(weight)
    return q, scale.squeeze(1)


def by_block_of_four(weight):
    """Scales ``[rows, 1, columns, 1]``."""
    q, scale = by_block(weight)
    return q, scale[:, None, :, None]


def autofp8(scheme):
    config = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["re:.*head"]}
    return config, by_tensor, "weight_scale", "input_scale"


def fbgemm():
    config = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    }
    return config, by_channel, "weight_scale", None


FORMATS = {
    "finegrained, blocks": finegrained("dynamic", True),
    "finegrained, tensor": finegrained("dynamic", False),
    "finegrained, static": finegrained("static", False),
    "finegrained, ue8m0": ue8m0(),
    "FBGEMM": fbgemm(),
    **{
        f"compressed-tensors, {weights}, {inputs}": compressed_tensors(weights, inputs)
        for weights, inputs in (
            ("channel", "dynamic"), ("tensor", "dynamic"), ("tensor", "static"),
            ("channel", "static"), ("channel", "none"), ("block", "dynamic"),
            ("channel", "one for all tokens"),
        )
    },
    "Quark, static": quark("static"),
    "Quark, weights alone": quark("none"),
    "Quark, per token": quark("per token"),
    "ModelOpt, static": modelopt("FP8"),
    "ModelOpt, per token": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "ModelOpt, blocks, none": modelopt("FP8_PB_WO"),
    "AutoFP8, static": autofp8("static"),
    "AutoFP8, dynamic": autofp8("dynamic"),
}  # fmt: skip


def write(model, folder, name, static_of=static_scale, experts=False):
    """Saves a float model in a format, with static scales by linear; experts stay as they are, or
    become FP8 too, as far as the format has them. Returns the weights that the FP8 ones stand for,
    by name in the file."""
    config, by, scale_name, static_name = FORMATS[name]
    model.save_pretrained(folder)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    linears = [n for n, module in model.named_modules() if type(module) is nn.Linear]
    linears.remove("lm_head")
    if experts and config["quant_method"] == "fbgemm_fp8":
        in_one_tensor(tensors, meant)
    elif experts:
        one_by_one(tensors)
        linears += [k.removesuffix(".weight") for k in tensors if re.search(EXPERT, k)]
    # compressed-tensors writes vectors of one value; older files have plain values, as others do.
    one = (1,) if config["quant_method"] == "compressed-tensors" else ()
    for linear in linears:
        q, scale = by(tensors[f"{linear}.weight"].float())
        meant[linear] = dequantised(q, scale)
        if ".experts." in linear and config["quant_method"] == "fp8" and scale.dim() == 0:
            scale = scale.reshape(1, 1)  # or transformers cannot join them
        scale = scale.reshape(one) if scale.dim() == 0 else scale
        tensors[f"{linear}.weight"], tensors[f"{linear}.{scale_name}"] = q, scale
        if name.endswith("static"):
            tensors[f"{linear}.{static_name}"] = torch.tensor(static_of(linear)).reshape(one)
        if config["quant_method"] == "quark" and linear.endswith(("k_proj", "v_proj")):
            tensors[f"{linear}.output_scale"] = torch.tensor(0.5)
        if config["quant_method"] == "modelopt" and linear.endswith(("k_proj", "v_proj")):
            tensors[f"{linear}.{linear[-6]}_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    config = copy.deepcopy(config)
    described["quantization_config"] = config if experts else without_experts(config, model)
    (folder / "config.json").write_text(json.dumps(described))
    return meant


EXPERT = r"\.experts\.\d+\.\w+\.weight$"
FUSED = r"\.experts\.(gate_up|down)_proj$"


def one_by_one(tensors):
    """Llama 4's experts, which its own files have in one tensor ``[E, K, N]``, as linears."""
    for key in [key for key in tensors if re.search(FUSED, key)]:
        experts, _, which = key.rpartition(".")
        linears = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        for i, weight in enumerate(tensors.pop(key)):
            for linear, part in zip(linears, weight.t().chunk(len(linears)), strict=True):
                tensors[f"{experts}.{i}.{linear}.weight"] = part.contiguous()


def in_one_tensor(tensors, meant):
    """Experts as FBGEMM has them: Llama 4's in one tensor ``[E, K, N]`` with scales ``[E, 1, N]``
    of gate and up, ``[E, N, 1]`` of down; others' one by one."""
    for key in [key for key in tensors if re.search(FUSED, key)]:
        pairs = [by_channel(weight.t().float()) for weight in tensors[key]]
        meant[key] = torch.stack([dequantised(*pair) for pair in pairs])
        tensors[key] = torch.stack([q.t().contiguous() for q, _ in pairs])
        scales = torch.stack([scale for _, scale in pairs])
        tensors[f"{key}_scale"] = scales.mT.contiguous() if "gate_up" in key else scales
    for key in [key for key in tensors if re.search(EXPERT, key)]:
        q, scale = by_channel(tensors[key].float())
        tensors[key], tensors[f"{key}_scale"] = q, scale
        meant[key.removesuffix(".weight")] = dequantised(q, scale)


def without_experts(config, model):
    """The config, of a checkpoint that has a model's experts in 16 bits."""
    experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    if experts and config["quant_method"] in ("fp8", "fbgemm_fp8"):
        left = "ignored_layers" if "ignored_layers" in config else "modules_to_not_convert"
        config[left] += experts
    elif experts and config["quant_method"] == "compressed-tensors":
        config["ignore"].append(r"re:.*\.experts\..*")
    elif experts and config["quant_method"] == "modelopt":
        config["ignore"].append("*.experts*")
    elif experts:
        config["exclude"].append("*.experts.*")
    return config


def to_torchao_(model, inputs):
    """What torchao makes of the projections of a model that is loaded, a scale a row. By hand: its
    own call for quantised inputs asks for a GPU."""
    # In a folder of its own: requirements-torchao.txt says why.
    sys.path.append(str(Path(sys.prefix) / "torchao"))
    try:
        granularity = importlib.import_module("torchao.quantization").PerRow()
        workflows = importlib.import_module("torchao.quantization.quantize_.workflows")
    finally:
        sys.path.pop()
    kwargs = workflows.QuantizeTensorToFloat8Kwargs(granularity=granularity) if inputs else None
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            made = workflows.Float8Tensor.from_hp(
                module.weight.detach(), granularity=granularity, act_quant_kwargs=kwargs
            )
            module.weight = nn.Parameter(made, requires_grad=False)
