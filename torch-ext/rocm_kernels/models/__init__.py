"""Model preparation: a loaded 16-bit model's linears to FP8 weights, in place.

    report = rocm_kernels.models.quantize_model_(model)
    kernelize(model, mode=Mode.INFERENCE)

Between the two calls the model works too, through plain torch and without the speed.

Projections that share an input are fused: ``self_attn.qkv_proj`` and ``mlp.gate_up_proj`` hold one
weight each, and ``q_proj``, ``k_proj``, ``v_proj``, ``gate_proj``, ``up_proj`` remain as parts of
it, each usable by itself. The attention's own forward stays the model's: when the decoder layer has
projected already, it hands over a ``Projected``, out of which the parts cut their columns.

The files, by what they are about:

- linears: linear.py has the modules, quantize.py makes them by a plan (plan.py), fuse.py joins
  those of one input, tensor_parallel.py handles one process's shard, weight_access.py finds the
  linears that must stay, edits.py serves adapters and resized heads, state.py state dicts,
  offload.py accelerate.
- experts: experts.py has the module, convert_experts.py makes it, mxfp4.py encodes MXFP4.
- kernel layers: families.py has the names in each family, probe.py, probe_attention.py and norms.py
  run a module's own forward to learn what it computes, registration.py registers it for
  ``kernelize``, hooks.py keeps forward hooks.
- checkpoints: formats/ has a record a format, checkpoints.py loads and saves through transformers,
  stored_linears.py and stored_experts.py put empty modules in place, join_experts.py fills those
  of experts, store_experts.py saves them, check_loaded.py finds what is missing, compute_dtype.py
  keeps ``model.dtype``. finegrained.py runs transformers' own FP8 modules on these kernels.
- attention.py gives transformers this package's attention by name, spans.py has what stands in a
  mask's place, attention_traits.py finds models that work on their masks, cache.py has a static
  cache in FP8. decode_step.py replays whole decode steps, with the cache of growing_cache.py, of
  models that probe_step.py has asked, as long as they are what model_state.py has seen; aside.py
  makes branches of a graph of what concerns positions alone; cpu_recording.py is how a step is
  recorded on the CPU.
- sums.py has the sums of tensor parallelism go through a Communicator.
"""

from .attention import delegated_attention, use_attention
from .cache import fp8_static_cache
from .checkpoints import fp8_checkpoints
from .decode_step import DecodeSteps, decode_steps, stop_decode_step, use_decode_step
from .experts import Experts
from .finegrained import serve_finegrained_fp8
from .linear import FP8Linear, FP8LinearPart
from .quantize import quantize_model_
from .registration import unkernelized_layers
from .report import QuantizationReport, kernelized_layers
from .sums import CommunicatedSums, communicated_sums, stop_communicator, use_communicator

__all__ = [
    "CommunicatedSums",
    "DecodeSteps",
    "Experts",
    "FP8Linear",
    "FP8LinearPart",
    "QuantizationReport",
    "communicated_sums",
    "decode_steps",
    "delegated_attention",
    "fp8_checkpoints",
    "fp8_static_cache",
    "kernelized_layers",
    "quantize_model_",
    "serve_finegrained_fp8",
    "stop_communicator",
    "stop_decode_step",
    "unkernelized_layers",
    "use_attention",
    "use_communicator",
    "use_decode_step",
]
