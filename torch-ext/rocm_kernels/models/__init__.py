"""Model preparation: a loaded 16-bit model's linears to FP8 weights, in place.

    report = rocm_kernels.models.quantize_model_(model)
    kernelize(model, mode=Mode.INFERENCE)

Between the two calls the model works too, through plain torch and without the speed.

Projections that share an input are fused: ``self_attn.qkv_proj`` and ``mlp.gate_up_proj`` hold one
weight each, and ``q_proj``, ``k_proj``, ``v_proj``, ``gate_proj``, ``up_proj`` remain as parts of
it, each usable by itself. The attention's own forward stays the model's: when the decoder layer has
projected already, it hands over a ``Projected``, out of which the parts cut their columns.

families.py says what models call these modules, linear.py has those that take their place, state.py
loads them from state dicts. quantize.py makes them: of 16-bit linears, of FP8 ones that adopt.py
reads, of one process's shares (shares.py). reads.py tells which must stay, hooks.py keeps what
hangs on a module, offload.py serves accelerate's, fuse.py joins, norms.py and ask.py tell what
norms, MLPs and decoder layers compute, known.py shows the result to ``kernelize``, compute_dtype.py
keeps ``model.dtype``, edits.py has peft merge and heads resized.
experts.py has the module for experts, convert_experts.py makes it of theirs, mxfp4.py finds their
format again, stored_experts.py knows them in files. formats knows FP8 checkpoints, checkpoints.py
loads and saves them through transformers; finegrained.py is another way in: transformers' own FP8
modules, with the products of this package. attention.py gives transformers this package's
attention by name.
"""

from .attention import delegated_attention, use_attention
from .checkpoints import fp8_checkpoints
from .experts import Experts
from .finegrained import serve_finegrained_fp8
from .known import unkernelized_layers
from .linear import FP8Linear, FP8LinearPart
from .quantize import quantize_model_
from .report import QuantizationReport, kernelized_layers

__all__ = [
    "Experts",
    "FP8Linear",
    "FP8LinearPart",
    "QuantizationReport",
    "delegated_attention",
    "fp8_checkpoints",
    "kernelized_layers",
    "quantize_model_",
    "serve_finegrained_fp8",
    "unkernelized_layers",
    "use_attention",
]
