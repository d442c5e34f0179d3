"""Model preparation: a loaded 16-bit model's linears to FP8 weights, in place.

    report = rocm_kernels.models.quantize_model_(model)
    kernelize(model, mode=Mode.INFERENCE)

Between the two calls the model works too, through plain torch and without the speed.

Projections that share an input are fused: ``self_attn.qkv_proj`` and ``mlp.gate_up_proj`` hold one
weight each, and ``q_proj``, ``k_proj``, ``v_proj``, ``gate_proj``, ``up_proj`` remain as parts of
it, each usable by itself. The attention's own forward stays the model's: when the decoder layer has
projected already, it hands over a ``Projected``, out of which the parts cut their columns.

families.py says what models call these modules, linear.py has those that take their place,
quantize.py and adopt.py make them of 16-bit and FP8 linears, reads.py tells which must stay,
fuse.py joins them, norms.py tells what a norm computes, known.py shows the result to ``kernelize``.
experts.py has the module for experts and makes it of theirs, mxfp4.py finds their format again.
checkpoints.py is another way in: transformers' own FP8 modules, with the products of this package.
"""

from .checkpoints import serve_finegrained_fp8
from .experts import Experts
from .linear import FP8Linear, FP8LinearPart
from .quantize import quantize_model_
from .report import QuantizationReport, kernelized_layers

__all__ = [
    "Experts",
    "FP8Linear",
    "FP8LinearPart",
    "QuantizationReport",
    "kernelized_layers",
    "quantize_model_",
    "serve_finegrained_fp8",
]
