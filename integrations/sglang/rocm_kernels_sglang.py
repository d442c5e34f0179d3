"""An example of SGLang's hooks (0.5.23): its FP8 linears by our products.

SGLang calls :func:`register` in each of its processes, for the entry point in
``sglang.srt.plugins``; ``SGLANG_PLUGINS`` lists which plugins may run. One hook is shown.
``HookRegistry`` takes any dotted path: ``srt.layers.layernorm.RMSNorm.forward_hip`` for the norm is
another candidate, ``dispatch_w8a8_block_fp8_linear`` for blocks.
"""

import functools
import importlib

TARGET = "sglang.srt.layers.quantization.fp8_utils.apply_fp8_linear"


def register() -> None:
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(TARGET, apply_fp8_linear, hooks.HookType.AROUND)


@functools.cache
def kernels():
    """Loaded by the first linear: in the worker, which has the device."""
    client = importlib.import_module("kernels")
    return client.get_kernel("org/rocm-kernels", version=1, trust_remote_code=True)


def apply_fp8_linear(
    original,
    input,
    weight,
    weight_scale,
    input_scale=None,
    input_scale_ub=None,
    bias=None,
    *args,
    pre_quant_output_dtype=None,
    **kwargs,
):
    """``input [..., K]``, 16-bit or quantised already; ``weight [K, N]``, a transposed view of the
    checkpoint's. What SGLang lays out in another way, or bounds, stays with its own function."""
    given = (input_scale, input_scale_ub, bias, *args)
    w = weight.t()
    if input_scale_ub is not None or w.stride(-1) != 1:
        if pre_quant_output_dtype is not None:
            kwargs["pre_quant_output_dtype"] = pre_quant_output_dtype
        return original(input, weight, weight_scale, *given, **kwargs)
    out_dtype = pre_quant_output_dtype if input.element_size() == 1 else input.dtype
    rows = input.reshape(-1, input.shape[-1])
    scale_w = weight_scale if weight_scale.numel() == 1 else weight_scale.reshape(-1, 1)
    out = kernels().fp8_linear(
        rows, w, scale_w, scale_x=input_scale, bias=bias, out_dtype=out_dtype
    )
    return out.view(*input.shape[:-1], w.shape[0])
