"""On a faked gfx942: prints, as JSON, which of vLLM's hooks are there, what the plugin hooked in,
which linears vLLM selects, and which ops its fusion passes put into graphs.

    python select_on_gfx942.py [HOOK]       # as if vLLM had not got that one
"""

import functools
import importlib
import json
import sys

import torch
from faked_gfx942 import fake_torch
from hooks import HOOKS

library = fake_torch()

import vllm  # noqa: E402
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402


def owner_of(hook: str):
    """The module or class that has the hook, and the hook's name there."""
    module, _, path = hook.partition(":")
    *parents, name = path.split(".")
    return functools.reduce(getattr, parents, importlib.import_module(module)), name


def main() -> None:
    from rocm_kernels_vllm import register

    hooks = {hook: hasattr(*owner_of(hook)) for hook in HOOKS}
    for moved in sys.argv[1:]:
        delattr(*owner_of(moved))
    state = register()
    result = {"version": vllm.__version__, "hooks": hooks, "on": state.on, "failed": state.failed}
    if len(sys.argv) == 1:
        assert register() == state  # twice does what once does
        config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none", "+quant_fp8"]))
        with set_current_vllm_config(config):
            result |= {"rocm": current_platform.is_rocm(), "linears": linears()}
            result |= {"graphs": graphs(config), "activation": activation(), "gemm": gemm()}
    print("RESULT " + json.dumps(result))


def linears() -> dict:
    from vllm.model_executor.kernels.linear import (
        init_fp8_linear_kernel,
        init_wfp8_a16_linear_kernel,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        GroupShape,
        create_fp8_quant_key,
        kFp8DynamicTensorSym,
        kFp8DynamicTokenSym,
        kFp8StaticChannelSym,
        kFp8StaticTensorSym,
    )

    group = create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128))
    block = create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128))
    schemes = {
        "static": (kFp8StaticTensorSym, kFp8StaticTensorSym),
        "dynamic tensor": (kFp8DynamicTensorSym, kFp8StaticTensorSym),
        "token, tensor": (kFp8DynamicTokenSym, kFp8StaticTensorSym),
        "token, channel": (kFp8DynamicTokenSym, kFp8StaticChannelSym),
        "block": (group, block),
    }
    shapes = {
        "weight_shape": (512, 256),
        "input_dtype": torch.bfloat16,
        "out_dtype": torch.bfloat16,
    }
    chosen = {
        name: type(init_fp8_linear_kernel(activation_quant_key=a, weight_quant_key=w, **shapes))
        for name, (a, w) in schemes.items()
    }
    chosen["weight only"] = type(
        init_wfp8_a16_linear_kernel(
            activation_quant_key=kFp8DynamicTensorSym, weight_quant_key=kFp8StaticChannelSym,
            **shapes,
        )
    )  # fmt: skip
    return {name: cls.__name__ for name, cls in chosen.items()}


def graphs(config: VllmConfig) -> dict:
    """Each pattern's graph after vLLM's own pass: the ops in it."""
    import vllm.ir.ops as ir
    from torch._higher_order_ops.auto_functionalize import auto_functionalized
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from vllm.compilation.passes.fusion.matcher_utils import MatcherQuantFP8
    from vllm.compilation.passes.fusion.rms_quant_fusion import RMSNormQuantFusionPass
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8DynamicTokenSym,
        kFp8StaticTensorSym,
    )

    # What vLLM's own quantisation leaves in a graph, static and per token.
    quantize, quantize_token = (
        MatcherQuantFP8(kFp8StaticTensorSym),
        MatcherQuantFP8(kFp8DynamicTokenSym),
    )

    def static(x, residual, weight, scale):
        return quantize(ir.rms_norm(x, weight, 1e-5), scale)[0]

    def static_add(x, residual, weight, scale):
        y, residual = ir.fused_add_rms_norm(x, residual, weight, 1e-5)
        return quantize(y, scale)[0], residual

    def token(x, residual, weight, scale):
        return quantize_token(ir.rms_norm(x, weight, 1e-6))

    def token_add(x, residual, weight, scale):
        y, residual = ir.fused_add_rms_norm(x, residual, weight, 1e-6)
        return *quantize_token(y), residual

    found = {}
    fusion = RMSNormQuantFusionPass(config)
    for function in (static, static_add, token, token_add):
        with FakeTensorMode():
            x, residual = (torch.empty(5, 16, dtype=torch.bfloat16) for _ in range(2))
            weight, scale = torch.empty(16, dtype=torch.bfloat16), torch.empty(1, 1)
            graph = make_fx(function)(x, residual, weight, scale).graph
        graph.eliminate_dead_code()
        fusion(graph)
        called = [str(node.args[0]) for node in graph.nodes if node.target is auto_functionalized]
        found[function.__name__] = called
    return found


def activation() -> dict:
    from rocm_kernels_vllm import fusion
    from vllm.model_executor.layers.fusion.fused_act_quant import _FUSED_ACT_QUANT

    return {
        str(key): producer.__module__ == fusion.__name__
        for (cls, key), producer in _FUSED_ACT_QUANT.items()
        if cls.__name__ == "SiluAndMul"
    }


def gemm() -> str:
    from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

    return dispatch_unquantized_gemm().__module__


if __name__ == "__main__":
    sys.exit(main())
