"""What of a gfx942, or of the AMD GPU that FAKED_ARCH names, is there before vLLM is imported: its
torch, and the entry point by which vLLM finds its platform. Nothing here may import vLLM: 0.26 asks
for the platform while its own are still being imported."""

import os
import sys
from types import SimpleNamespace

import torch

ARCH = os.environ.get("FAKED_ARCH", "gfx942")

# The ops of vLLM's ROCm build that its fusion passes name, with their schemas (vLLM 0.33.0).
SCHEMAS = (
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
    "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None)"
    " -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, "
    "Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, "
    "float eps, float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, "
    "bool dummy_is_tma_aligned) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, "
    "Tensor weight, Tensor scale, float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, "
    "float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()",
    "rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, "
    "float epsilon, Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed)"
    " -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, "
    "Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
)


def platform() -> str:
    """The entry point of `vllm.platform_plugins`."""
    return "faked_gfx942.FakedGfx942"


def fake_torch() -> torch.library.Library:
    """The parts of torch and of vLLM's binary that vLLM asks on such a machine. Its CPU binary has
    ops of the same names with other schemas, and stays out."""
    for binary in ("_C", "_C_AVX2", "_C_AVX512"):
        sys.modules[f"vllm.{binary}"] = None
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        gcnArchName=f"{ARCH}:sramecc+:xnack-", multi_processor_count=304, warp_size=64
    )
    library = torch.library.Library("_C", "FRAGMENT")
    for schema in SCHEMAS:
        if not hasattr(torch.ops._C, schema.partition("(")[0]):
            library.define(schema)
    return library
