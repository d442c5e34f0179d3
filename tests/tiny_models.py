"""Models of a few thousand weights, and what a quantised one is compared with."""

import copy
import functools

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def randomized(model):
    """Weights of a size that keeps activations near one, so that every layer matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_()
    return model.eval()


def tiny_llama(dtype=torch.float32, **changes):
    config = {
        "hidden_size": 96,
        "intermediate_size": 272,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "tie_word_embeddings": True,
    }
    return randomized(LlamaForCausalLM(LlamaConfig(**{**config, **changes}))).to(dtype)


def tokens(rows, columns, device="cpu", vocabulary=160):
    return torch.randint(0, vocabulary, (rows, columns), device=device)


def dequantized(package, model):
    """The model with its FP8 weights in nn.Linear again."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (package.models.FP8Linear, package.models.FP8LinearPart)):
                linear = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                weight = package.reference.dequantize(child.weight, child.weight_scale_inv, 128)
                linear.weight.data = weight.float()
                if child.bias is not None:
                    linear.bias.data = child.bias.detach().float()
                setattr(parent, name, linear)
    return model


def reference_experts(package, module, x, top_k_index=None, top_k_weights=None):
    if top_k_index is None:  # Llama 4: equally many rows of each expert in turn
        top_k_index = torch.arange(module.num_experts, device=x.device)[:, None]
        top_k_index = top_k_index.repeat_interleave(x.shape[0] // module.num_experts, 0)
        top_k_weights = x.new_ones(x.shape[0], 1)
    return package.reference.fused_moe(
        x, module.gate_up_proj, module.down_proj, top_k_weights, top_k_index,
        scale_gate_up=module.gate_up_proj_scale_inv, scale_down=module.down_proj_scale_inv,
        bias_gate_up=module.gate_up_proj_bias, bias_down=module.down_proj_bias,
        activation=module.activation, limit=module.limit, interleaved=module.interleaved,
        quantize_input=module.activation_scheme == "dynamic", scale_fmt=module.scale_fmt,
    )  # fmt: skip


def quantizing_inputs(package, model):
    """The model with its FP8 linears and experts computed by the reference, inputs quantised as
    each says."""
    model = copy.deepcopy(model)
    for child in model.modules():
        if isinstance(child, package.models.Experts):
            child.forward = functools.partial(reference_experts, package, child)
        if isinstance(child, (package.models.FP8Linear, package.models.FP8LinearPart)):
            child.forward = functools.partial(reference_linear, package.reference, child)
    return model


def reference_linear(reference, linear, x):
    scale_w, static = linear.weight_scale_inv, linear.activation_scale
    rows = x.flatten(0, -2)
    if linear.activation_scheme == "none":
        exact = rows.double() @ reference.dequantize(linear.weight, scale_w, 128).t()
        exact = exact if linear.bias is None else exact + linear.bias.double()
        return exact.to(x.dtype).view(*x.shape[:-1], exact.shape[-1])
    blocks = scale_w.dim() == 2 and scale_w.shape[1] > 1 and static is None
    q, scale = reference.quantize_fp8(
        rows, scale=static, group_size=128 if blocks else None, scale_ub=linear.scale_ub,
        scale_fmt=linear.scale_fmt, fp8_dtype=linear.weight.dtype,
    )  # fmt: skip
    out = reference.gemm(q, linear.weight, scale, scale_w, bias=linear.bias, out_dtype=x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1])
