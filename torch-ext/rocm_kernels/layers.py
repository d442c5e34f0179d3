"""Layers for ``kernels.kernelize``: each forward takes the place of a model's own.

A layer is pure: no constructor, no state, no maths. Its forward reads attributes of the module that
it is bound to and calls the functional API. All are for inference (``has_backward`` is False:
``kernelize(mode=Mode.TRAINING)`` keeps the model's own forward) and work under
``torch.compile(fullgraph=True)``.

=====================  ============================================================================
layer                  module attributes that it reads
=====================  ============================================================================
``RMSNorm``            ``weight``, and ``variance_epsilon`` or ``eps``
``FP8Linear``          ``weight`` (FP8), ``weight_scale_inv``, ``bias``, ``activation_scheme``,
                       ``activation_scale``: transformers' finegrained FP8, whose conventions
                       ``quantize_model_`` follows
``FP8LinearPart``      the same, and ``fused``, ``start``, ``stop`` (see ``models``)
``FbgemmFp8Linear``    ``weight`` (FP8), ``weight_scale``, ``input_scale_ub``, ``bias``
``SwiGLUMLP``          ``gate_proj``, ``up_proj``, ``down_proj``, ``act_fn``. With FP8 weights the
                       activation quantises its own result for ``down_proj``
``LlamaDecoderLayer``  ``input_layernorm``, ``self_attn``, ``post_attention_layernorm`` and ``mlp``
                       of a model that ``quantize_model_`` has prepared. The norms quantise their
                       own result, the second one adds the residual too
=====================  ============================================================================

:func:`kernel_mapping` readies them all for ``kernels.register_kernel_mapping``.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple, Type

import torch
from torch import nn

from .functional import (
    SCALE_BLOCK,
    fp8_linear,
    fp8_linear_path,
    multiply,
    quantize_fp8,
    rms_norm,
    rms_norm_fp8,
    swiglu,
    swiglu_fp8,
    usable_bias,
)

# Name of a kernel layer in models -> the layer here.
LAYERS = {
    "RMSNorm": "RMSNorm",
    "FP8Linear": "FP8Linear",
    "FP8LinearPart": "FP8LinearPart",
    "FbgemmFp8Linear": "FbgemmFp8Linear",
    "LlamaMLP": "SwiGLUMLP",
    "SwiGLUMLP": "SwiGLUMLP",
    "LlamaDecoderLayer": "LlamaDecoderLayer",
}

DEVICES = ("cpu", "cuda", "rocm")

# What the ``act_fn`` modules of transformers compute, by class.
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


# Names that transformers decorates its modules with, and that have no layer here. Unknown to a
# mapping, each such module makes kernelize warn; known without a device, it keeps its own forward.
OTHER_NAMES = (
    "EsmFold2TriangleMultiplication",
    "FastGELU",
    "GeLU",
    "GeluTanh",
    "Llama4TextMoe",
    "MegaBlocksMoeMLP",
    "MultiScaleDeformableAttention",
    "NewGELU",
    "QuickGELU",
    "Qwen3_5GatedDeltaNet",
    "RMSNormGated",
    "RMSNormZeroCentered",
    "SiLU",
    "SoftmaxTopKRouter",
    "rotary_pos_emb",
)


def kernel_mapping(
    repository: Optional[Callable[..., Any]] = None, *args: Any, **kwargs: Any
) -> Dict[str, Dict[str, Any]]:
    """The layers for every backend, ready for ``kernels.register_kernel_mapping``.

    Args:
        repository: None: the layers of this very package, as it is loaded. Or one of the repository
            classes of ``kernels``, which look the package up once more when ``kernelize`` first
            needs it; it is called with the other arguments and each ``layer_name``::

                kernel_mapping(LayerRepository, "org/rocm-kernels", version=1)
    """
    mapping: Dict[str, Dict[str, Any]] = {name: {} for name in OTHER_NAMES}
    for name, layer in LAYERS.items():
        if repository is None:
            repo = _Loaded(globals()[layer])
        else:
            repo = repository(*args, layer_name=layer, **kwargs)
        mapping[name] = {device: repo for device in DEVICES}
    return mapping


@dataclass(frozen=True)
class _Loaded:
    """What ``kernels`` calls a repository, of a layer that is at hand.

    Its own repositories search for a variant by how torch was built, and cannot be told otherwise.
    """

    layer: Type[nn.Module]

    def load(self) -> Type[nn.Module]:
        return self.layer


class RMSNorm(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, _eps(self))


class FP8Linear(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _linear(input, self)


class FP8LinearPart(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[-1] == self.fused.out_features:
            return input[..., self.start : self.stop]
        return _linear(input, self)


class FbgemmFp8Linear(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The bound is a tensor, and reading its value would wait for the device. Clamping x to it
        # bounds the scale just the same: what lies beyond saturates either way.
        bounded = x.clamp(-self.input_scale_ub, self.input_scale_ub)
        q, scale = quantize_fp8(bounded, fp8_dtype=self.weight.dtype)
        return fp8_linear(
            q, self.weight, self.weight_scale, scale_x=scale, bias=self.bias, out_dtype=x.dtype
        )


class SwiGLUMLP(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = _gate_and_up(x, self)
        down = self.down_proj
        activation = ACTIVATIONS.get(type(self.act_fn).__name__)
        if activation is None:
            return down(self.act_fn(gate) * up)
        if not _is_fp8(down) or _weight_only(down):
            return down(swiglu(gate, up, activation=activation))
        q, scale = swiglu_fp8(gate, up, activation=activation, **_quantization(down))
        return _product(q, scale, down, x.dtype)


class LlamaDecoderLayer(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
        past_key_values: Optional[Any] = None,
        use_cache: Optional[bool] = False,
        position_embeddings: Optional[Any] = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attention, mlp = self.self_attn, self.mlp
        # Rows are folded once: at batch 1 each view costs a tenth of an op.
        x = hidden_states.flatten(0, -2)
        qkv = _norm_linear(x, None, self.input_layernorm, attention.qkv_proj)
        # The attention's result is fresh, so the residual sum may take its place. The layer's input
        # may not be written: output_hidden_states keeps it.
        residual, _ = attention(
            hidden_states=qkv.view(*hidden_states.shape[:-1], qkv.shape[-1]),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        rows = residual.view(x.shape)
        rows += mlp(_norm_linear(x, rows, self.post_attention_layernorm, mlp.gate_up_proj))
        return residual


def _eps(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _is_fp8(linear: nn.Module) -> bool:
    return hasattr(linear, "weight_scale_inv")


def _weight_only(linear: nn.Module) -> bool:
    return linear.activation_scheme == "none"


def _quantization(linear: nn.Module) -> Dict[str, Any]:
    """How an FP8 linear wants its input quantised, as keyword arguments of the quantising ops."""
    static, scale_w = linear.activation_scale, linear.weight_scale_inv
    blocks = static is None and scale_w.dim() == 2 and scale_w.shape[1] > 1
    return {
        "scale": static,
        "group_size": SCALE_BLOCK if blocks else None,
        "fp8_dtype": linear.weight.dtype,
    }


def _product(
    q: torch.Tensor, scale: torch.Tensor, linear: nn.Module, dtype: torch.dtype
) -> torch.Tensor:
    """An FP8 linear on an input that is quantised already."""
    return fp8_linear(
        q, linear.weight, linear.weight_scale_inv, scale_x=scale, bias=linear.bias, out_dtype=dtype
    )


def _linear(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """An FP8 linear on a 16-bit or float32 input."""
    if x.dim() != 2:
        out = _linear(x.reshape(-1, x.shape[-1]), linear)
        return out.view(*x.shape[:-1], out.shape[-1])
    if not _weight_only(linear):
        q, scale = quantize_fp8(x, **_quantization(linear))
        return _product(q, scale, linear, x.dtype)
    weight, scale, bias = linear.weight, linear.weight_scale_inv, linear.bias
    path = fp8_linear_path(x.shape[0], weight, scale)
    if path == "scaled_mm":
        # Where the library is quicker for many rows, unpacking the weight is a small part of it.
        bias = None if bias is None else bias.to(x.dtype)
        return nn.functional.linear(x, (weight.to(x.dtype) * scale).to(x.dtype), bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    multiply(path, out, x, weight, None, scale, usable_bias(bias, x.dtype))
    return out


def _norm_linear(
    x: torch.Tensor, residual: Optional[torch.Tensor], norm: nn.Module, linear: nn.Module
) -> torch.Tensor:
    """``linear(norm(x + residual))``; the sum is left in ``residual``."""
    if _weight_only(linear):
        return _linear(rms_norm(x, norm.weight, _eps(norm), residual), linear)
    q, scale = rms_norm_fp8(x, norm.weight, _eps(norm), residual, **_quantization(linear))
    return _product(q, scale, linear, x.dtype)


def _gate_and_up(x: torch.Tensor, mlp: nn.Module) -> Tuple[torch.Tensor, torch.Tensor]:
    """Both projections of an MLP. A fused one may have been applied to x already."""
    if "gate_up_proj" in mlp._modules:
        fused = mlp.gate_up_proj
        return (x if x.shape[-1] == fused.out_features else _linear(x, fused)).chunk(2, -1)
    gate, up = mlp.gate_proj, mlp.up_proj
    if not (_is_fp8(gate) and _is_fp8(up)) or gate.activation_scheme != "dynamic":
        return gate(x), up(x)
    q, scale = quantize_fp8(x, **_quantization(gate))
    return _product(q, scale, gate, x.dtype), _product(q, scale, up, x.dtype)
