"""Layers for ``kernels.kernelize``: each forward takes the place of a model's own.

A layer is pure: no constructor, no state, no arithmetic. Its forward reads attributes of the module
that it is bound to and calls the functional API. All work under ``torch.compile(fullgraph=True)``.

All are for inference. ``has_backward`` is False, so ``kernelize(mode=Mode.TRAINING)`` keeps the
model's own forward; so does a kernelized module in training mode, for as long as it is and unless
gradients are turned off. In evaluation mode a forward that would need a gradient raises.

=====================  ============================================================================
layer                  module attributes that it reads
=====================  ============================================================================
``RMSNorm``            ``weight``, and ``variance_epsilon`` or ``eps``, unless ``quantize_model_``
                       left a ``kernel_norm``, which says another name or 1 + weight
``RMSNormZero-``       ``weight`` and ``kernel_norm``; without that the module's own forward runs
``Centered``
``FP8Linear``          ``weight`` (FP8), ``weight_scale_inv``, ``bias``, ``activation_scheme``,
                       ``activation_scale``: transformers' finegrained FP8, whose conventions
                       ``models.FP8Linear`` follows; of that one ``scale_ub``,
                       ``scale_fmt`` and ``process_group`` too
``FP8LinearPart``      the same, and ``fused``, ``start``, ``stop`` (see ``models``)
``FbgemmFp8Linear``    ``weight`` (FP8), ``weight_scale``, ``input_scale_ub``, ``bias``
``SwiGLUMLP``          ``gate_proj``, ``up_proj``, ``down_proj``, ``act_fn``, or what
                       ``kernel_family`` calls them. With FP8 weights the activation quantises its
                       own result for ``down_proj``
``LlamaDecoderLayer``  ``kernel_family`` and ``kernel_call``, which ``quantize_model_`` leaves
                       there, and what they name: the attention, the MLP and a norm for each. The
                       norms quantise their own result, the one before the MLP adds the residual
                       too. Where an adapter or a hook has come between, plain tensors are handed
                       over, or the module's own forward runs
``GemmaDecoderLayer``  the same, for forwards with other numbers of parameters, which ``kernelize``
``DecoderLayer4``, ..  compares: so there is a class for each
``Attention4``, ..     ``kernel_family`` and ``kernel_attention``, which ``quantize_model_`` leaves
                       there, and what they name: in decoder layers that keep their own forward
``Experts``            those of a ``models.Experts``: all experts of a layer in one call
``TopKRouter``,        ``kernel_router`` and ``kernel_routed``, which ``quantize_model_`` leaves
``TopKRouterGiven-``   there, ``weight`` and the biases that the first names
``Bias``
``Llama4TextMoe``      ``router``, ``shared_expert``, ``experts``, ``hidden_dim``, ``top_k``
``SiluAndMul``,        none: ``[..., 2 * d]`` in, ``[..., d]`` out, as in the Hub's ``activation``
``MulAndSilu``,
``GeluAndMul``,
``GeluTanhAndMul``
=====================  ============================================================================

:func:`experts_forward` is for transformers' ``experts_implementation`` instead.

:func:`kernel_mapping` readies them all for ``kernels.register_kernel_mapping``.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Type

from torch import nn

from . import attention, decoder
from .activation import GeluAndMul, GeluTanhAndMul, MulAndSilu, SiluAndMul
from .decoder import GemmaDecoderLayer, LlamaDecoderLayer
from .experts import Experts, Llama4TextMoe, experts_forward
from .linear import FbgemmFp8Linear, FP8Linear, FP8LinearPart
from .mlp import SwiGLUMLP
from .norm import RMSNorm, RMSNormZeroCentered
from .router import TopKRouter, TopKRouterGivenBias

__all__ = [
    "Experts",
    "FP8Linear",
    "FP8LinearPart",
    "FbgemmFp8Linear",
    "GeluAndMul",
    "GeluTanhAndMul",
    "GemmaDecoderLayer",
    "Llama4TextMoe",
    "LlamaDecoderLayer",
    "MulAndSilu",
    "RMSNorm",
    "RMSNormZeroCentered",
    "SiluAndMul",
    "SwiGLUMLP",
    "TopKRouter",
    "TopKRouterGivenBias",
    "experts_forward",
    "kernel_mapping",
]

globals().update(decoder.LAYERS)
globals().update(attention.LAYERS)

# Name of a kernel layer in models -> the layer here.
LAYERS = {
    "RMSNorm": "RMSNorm",
    "RMSNormZeroCentered": "RMSNormZeroCentered",
    "FP8Linear": "FP8Linear",
    "FP8LinearPart": "FP8LinearPart",
    "FbgemmFp8Linear": "FbgemmFp8Linear",
    "LlamaMLP": "SwiGLUMLP",
    "SwiGLUMLP": "SwiGLUMLP",
    **{name: name for name in (*decoder.LAYERS, *attention.LAYERS)},
    "Experts": "Experts",
    "Llama4TextMoe": "Llama4TextMoe",
    "TopKRouter": "TopKRouter",
    "TopKRouterGivenBias": "TopKRouterGivenBias",
    "SiluAndMul": "SiluAndMul",
    "MulAndSilu": "MulAndSilu",
    "GeluAndMul": "GeluAndMul",
    "GeluTanhAndMul": "GeluTanhAndMul",
}

DEVICES = ("cpu", "cuda", "rocm")

# Names that transformers decorates its modules with, and that have no layer here. Unknown to a
# mapping, each such module makes kernelize warn; known without a device, it keeps its own forward.
OTHER_NAMES = (
    "EsmFold2TriangleMultiplication",
    "FastGELU",
    "GeLU",
    "GeluTanh",
    "MegaBlocksMoeMLP",
    "MultiScaleDeformableAttention",
    "NewGELU",
    "QuickGELU",
    "Qwen3_5GatedDeltaNet",
    "RMSNormGated",
    "SiLU",
    "SoftmaxTopKRouter",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "rotary_pos_emb",
    "selective_scan_fn",
    "selective_state_update",
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
