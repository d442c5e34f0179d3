"""Runs 16-bit products of few rows on ROCm by ``skinny_gemm``.

vLLM's own kernels there take up to 5 rows (wvSplitK), and on gfx950 10 to 128 of some shapes
(wvSplitKrc); the library gets the rest. Elsewhere than on gfx950, 6 to 64 rows are for skinny_gemm,
which the op decides for each call.
"""

import torch
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from . import kernels, ops
from .parts import HookMoved


def skinny() -> bool:
    if not current_platform.is_rocm():
        return False  # vLLM's 16-bit linears elsewhere are the library's, and stay so
    if not hasattr(utils, "rocm_unquantized_gemm"):
        raise HookMoved("vllm.model_executor.layers.utils has no rocm_unquantized_gemm")
    utils.rocm_unquantized_gemm = rocm_unquantized_gemm
    return True


def rocm_unquantized_gemm(layer, x, weight, bias=None):
    """What vLLM's function of this name computes: ``x [..., K] @ weight[N, K].T + bias``."""
    if kernels.why_not():
        return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)
    out = ops.product_16bit(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])
