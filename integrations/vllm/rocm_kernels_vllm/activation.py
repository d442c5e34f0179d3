"""Adds the activation with FP8 results to models that ask vLLM for a fused one.

Models that call ``maybe_fused_act_quant`` (Llama, and whoever takes its MLP) look up a function by
activation and by what the next linear wants: the row for one scale a token was missing. vLLM has
that table from 0.30 on.
"""

import functools

from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform

from . import kernels, ops


def swiglu() -> bool:
    rows = fused_act_quant._FUSED_ACT_QUANT
    for quant_key, group_size in (
        (kFp8StaticTensorSym, 0),
        (kFp8DynamicTokenSym, 0),
        (kFp8Dynamic128Sym, ops.GROUP),
    ):
        producer = functools.partial(_swiglu_fp8, group_size=group_size, quant_key=quant_key)
        rows[(SiluAndMul, quant_key)] = _or_vllms(producer, rows.get((SiluAndMul, quant_key)))
    return True


def _swiglu_fp8(x, linear, *, group_size, quant_key):
    scale = linear.input_scale if quant_key == kFp8StaticTensorSym else None
    q, scales = ops.swiglu_fp8(x, scale, group_size, current_platform.fp8_dtype())
    return QuantizedActivation(
        data=q,
        scale=scales if scale is None else scale,
        orig_dtype=x.dtype,
        orig_shape=q.shape,
        quant_key=quant_key,
    )


def _or_vllms(producer, theirs):
    """Ours where there are kernels; else what vLLM had, or the activation as it is."""

    def produce(x, linear):
        if not kernels.why_not():
            return producer(x, linear)
        return theirs(x, linear) if theirs is not None else SiluAndMul.forward_native(x)

    return produce
