"""Runs 16-bit products of few rows on ROCm by ``skinny_gemm``.

vLLM's own kernels there take up to 5 rows (wvSplitK), and on gfx950 10 to 128 of some shapes
(wvSplitKrc); the library gets the rest. On gfx942, 6 to 64 rows are for skinny_gemm, which the op
decides for each call.
"""

import torch
import vllm.envs as envs
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from . import devices, kernels, ops
from .parts import HookMoved


def skinny() -> bool:
    if not current_platform.is_rocm():
        return False  # vLLM's 16-bit linears elsewhere are the library's, and stay so
    for module, name in (
        (utils, "rocm_unquantized_gemm"),
        (envs, "VLLM_ROCM_USE_SKINNY_GEMM"),
        (envs, "VLLM_BATCH_INVARIANT"),
    ):
        if not hasattr(module, name):
            raise HookMoved(f"{module.__name__} has no {name}")
    utils.rocm_unquantized_gemm = rocm_unquantized_gemm
    return True


def rocm_unquantized_gemm(layer, x, weight, bias=None):
    """What vLLM's function of this name computes: ``x [..., K] @ weight[N, K].T + bias``."""
    if not _is_on():
        return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)
    out = ops.product_16bit(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


@torch.compiler.assume_constant_result
def _is_on() -> bool:
    """Asked while a model is traced, too. VLLM_ROCM_USE_SKINNY_GEMM=0 leaves few rows to the
    library, and vLLM's batch-invariant mode has a product of its own."""
    wanted = envs.VLLM_ROCM_USE_SKINNY_GEMM and not envs.VLLM_BATCH_INVARIANT
    return wanted and not kernels.why_not() and not devices.why_off("skinny", devices.here())
