"""The functional API: dtypes and output allocation; the ops check and compute.

``rmsnorm`` and ``rmsnorm_fp8`` are in norm.py, the gated activations in activation.py, products
and linear layers in product.py, mixtures of experts in moe.py, the products of finegrained FP8
checkpoints in finegrained.py, attention in attention.py, what lies before it in rope.py, decoder
layers in layers.py, quantising and the FP8 dialects in fp8.py.
Beside an op's functions stand its fake, which has nothing to allocate because everything that an op
writes is an argument, and its overload, looked up once: a decode step makes hundreds of calls of a
few microseconds.

Shapes are written with ``...`` for any leading dimensions, folded into rows. Inputs may have any
strides: rows may be further apart than they are long, and what does not fold, or has a last
dimension that is not contiguous, is copied, as ``nn.Linear`` does. Matrices of weights (``w``) must
be contiguous in their last dimension: they would be copied with every call. What is written
(``out``, ``residual``) must be so too, and must fold without a copy.

No function has a gradient: one that is asked for is refused (gradients.py).

A *scale* always dequantises: real value = FP8 value * scale, in float32. The quantising functions
share these keyword arguments:

``scale``
    float32 tensor of one value on the input's device: static, per tensor.
``group_size``
    128: one computed scale for each 128 columns. None, without ``scale``: one for each row.
``scale_ub``
    Upper bound of the largest magnitude that a computed scale covers (FBGEMM checkpoints: 1200).
``scale_fmt``
    ``"ue8m0"``: computed scales are powers of two, rounded up, as DeepSeek-V3.1 and later want
    their inputs quantised (the ``scale_fmt`` of their configs). They stay float32. Not with
    ``scale``. None: as they come.
``fp8_dtype``
    ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``; None: :func:`native_fp8_dtype`.
``out``
    The FP8 tensor to write, or a pair of it and the float32 scales to write.

They return ``(q, scale)``: q has the shape of the result in FP8; scale is the one given, or
``[..., 1]`` per row, or ``[..., ceil(columns / 128)]`` per group.

Errors: RuntimeError (or ValueError where Python decides) names what was required and what came, and
nothing has been written.
"""

from .._ops import ops as ops
from .activation import (
    gelu_and_mul,
    gelu_tanh_and_mul,
    mul_and_silu,
    silu_and_mul,
    swiglu,
    swiglu_fp8,
)
from .attention import (
    attention_config,
    attention_configs,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from .finegrained import matmul_2d, matmul_batched, matmul_grouped
from .fp8 import FP8_DTYPES, SCALE_BLOCK, native_fp8_dtype, quantize_fp8, to_native_fp8
from .kvcache import kvcache_append_path
from .layers import decode_layers
from .moe import fused_moe, grouped_gemm, topk_sigmoid, topk_softmax
from .norm import apply_rms_norm, rmsnorm, rmsnorm_fp8
from .product import (
    SKINNY_GEMM_MAX_ROWS,
    fp8_linear,
    fp8_linear_path,
    gemm,
    gemm_config,
    skinny_gemm,
)
from .rope import rope_and_cache

__all__ = [
    "FP8_DTYPES",
    "SCALE_BLOCK",
    "SKINNY_GEMM_MAX_ROWS",
    "apply_rms_norm",
    "attention_config",
    "attention_configs",
    "decode_layers",
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
    "matmul_2d",
    "matmul_batched",
    "matmul_grouped",
    "mul_and_silu",
    "native_fp8_dtype",
    "quantize_fp8",
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
]
