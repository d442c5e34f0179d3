"""FP8 kernels: fused norm, fused activation, matrix products, mixtures of experts and attention.

Every function takes torch tensors on the CPU, a ROCm or a CUDA device and has a plain definition of
the same name in ``rocm_kernels.reference``.
"""

from . import comm, layers, models, reference, tuning
from .functional import (
    apply_rms_norm,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fp8_linear,
    fp8_linear_path,
    fused_moe,
    gelu_and_mul,
    gelu_tanh_and_mul,
    gemm,
    gemm_config,
    grouped_gemm,
    kvcache_append_path,
    matmul_2d,
    matmul_batched,
    matmul_grouped,
    mul_and_silu,
    native_fp8_dtype,
    quantize_fp8,
    rmsnorm,
    rmsnorm_fp8,
    rope_and_cache,
    silu_and_mul,
    skinny_gemm,
    swiglu,
    swiglu_fp8,
    to_native_fp8,
    topk_sigmoid,
    topk_softmax,
)
from .tuning.files import load_from_environment

load_from_environment()

__all__ = [
    "apply_rms_norm",
    "comm",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "fp8_linear",
    "fp8_linear_path",
    "fused_moe",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemm",
    "gemm_config",
    "grouped_gemm",
    "kvcache_append_path",
    "layers",
    "matmul_2d",
    "matmul_batched",
    "matmul_grouped",
    "models",
    "mul_and_silu",
    "native_fp8_dtype",
    "quantize_fp8",
    "reference",
    "rmsnorm",
    "rmsnorm_fp8",
    "rope_and_cache",
    "silu_and_mul",
    "skinny_gemm",
    "swiglu",
    "swiglu_fp8",
    "to_native_fp8",
    "topk_sigmoid",
    "topk_softmax",
    "tuning",
]
