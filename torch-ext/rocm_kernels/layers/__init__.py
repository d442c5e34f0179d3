"""Layers for ``kernels.kernelize``: each forward takes the place of a model's own.

A layer is pure: no constructor, no state, no arithmetic. Its forward reads attributes of the module
that it is bound to and calls the functional API. All are for inference (``has_backward`` is False:
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
``SwiGLUMLP``          ``gate_proj``, ``up_proj``, ``down_proj``, ``act_fn``, or what
                       ``kernel_family`` calls them. With FP8 weights the activation quantises its
                       own result for ``down_proj``
``LlamaDecoderLayer``  ``kernel_family``, which ``quantize_model_`` leaves there, and what it names:
                       the attention, the MLP and a norm for each. The norms quantise their own
                       result, the second one adds the residual too
=====================  ============================================================================

:func:`kernel_mapping` readies them all for ``kernels.register_kernel_mapping``.
"""

from typing import Any, Callable, Dict

from .decoder import LlamaDecoderLayer
from .linear import FbgemmFp8Linear, FP8Linear, FP8LinearPart
from .mlp import SwiGLUMLP
from .norm import RMSNorm

__all__ = [
    "FP8Linear",
    "FP8LinearPart",
    "FbgemmFp8Linear",
    "LlamaDecoderLayer",
    "RMSNorm",
    "SwiGLUMLP",
    "kernel_mapping",
]

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


def kernel_mapping(
    repository: Callable[..., Any], *args: Any, **kwargs: Any
) -> Dict[str, Dict[str, Any]]:
    """The layers for every backend, ready for ``kernels.register_kernel_mapping``.

    Args:
        repository: one of the repository classes of ``kernels``; it is called with the other
            arguments and each ``layer_name``::

                kernel_mapping(LayerRepository, "org/rocm-kernels", version=1)
                kernel_mapping(LocalLayerRepository, Path("build"))
    """
    mapping = {}
    for name, layer in LAYERS.items():
        repo = repository(*args, layer_name=layer, **kwargs)
        mapping[name] = {device: repo for device in DEVICES}
    return mapping
