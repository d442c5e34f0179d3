"""On a faked gfx942: prints, as JSON, which of vLLM's hooks are there, what the plugin hooked in,
which linears vLLM selects, and which ops its fusion passes put into graphs.

    python select_on_gfx942.py [HOOK]       # as if vLLM had not got that one, or module
    FAKED_ARCH=gfx90a python select_on_gfx942.py
"""

import functools
import importlib
import inspect
import json
import os
import sys

import torch
from faked_machine import fake_torch
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


def is_there(hook: str) -> bool:
    try:
        return hasattr(*owner_of(hook))
    except (ImportError, AttributeError):  # its module or class is not
        return False


def main() -> None:
    from rocm_kernels_vllm import parts, register

    hooks = {hook: is_there(hook) for hook in HOOKS}
    for moved in sys.argv[1:]:
        if ":" in moved:
            delattr(*owner_of(moved))
        else:
            delattr(*owner_of(":".join(moved.rsplit(".", 1))))
            sys.modules[moved] = None
    state = register()
    result = {"version": vllm.__version__, "hooks": hooks, "on": state.on, "failed": state.failed}
    if len(sys.argv) == 1:
        assert register() == state  # twice does what once does
        config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none", "+quant_fp8"]))
        with set_current_vllm_config(config):
            result |= {"rocm": current_platform.is_rocm(), "linears": linears()}
            result |= {"experts": experts()}
            result |= {"graphs": graphs(config), "activation": activation(), "gemm": gemm()}
            result |= {"attention": attention(), "variables": variables()}
            result |= {"what runs": parts.what_runs(), "drafts": drafts(config)}
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

    def chosen(init, activation_key, weight_key):
        keys = {"activation_quant_key": activation_key, "weight_quant_key": weight_key}
        try:
            return type(init(**keys, **shapes)).__name__
        except ValueError as error:  # vLLM has none either
            return f"{error}"

    found = {name: chosen(init_fp8_linear_kernel, *keys) for name, keys in schemes.items()}
    weight_only = (kFp8DynamicTensorSym, kFp8StaticChannelSym)
    return found | {"weight only": chosen(init_wfp8_a16_linear_kernel, *weight_only)}


def experts() -> dict:
    """By scheme, the class that vLLM selects and the backend that it prepares the weights for; then
    what vLLM is left with: a backend asked for by name, experts with LoRA, and what fused_moe does
    not compute."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8Dynamic128Sym,
        kFp8DynamicTensorSym,
        kFp8DynamicTokenSym,
        kFp8Static128BlockSym,
        kFp8StaticChannelSym,
        kFp8StaticTensorSym,
    )

    def config(**changes):
        parallel = {
            "tp_size": 1, "pcp_size": 1, "dp_size": 1, "ep_size": 1, "tp_rank": 0, "pcp_rank": 0,
            "dp_rank": 0, "ep_rank": 0, "sp_size": 1, "use_ep": False, "all2all_backend": "naive",
            "enable_eplb": False,
        }  # fmt: skip
        parallel |= changes.pop("parallel", {})
        shape = {
            "num_experts": 8, "experts_per_token": 2, "hidden_dim": 256, "intermediate_size": 512,
            "num_local_experts": 8, "num_logical_experts": 8, "activation": MoEActivation.SILU,
            "device": "cpu", "routing_method": RoutingMethodType.Renormalize,
            "in_dtype": torch.bfloat16,
        }  # fmt: skip
        return FusedMoEConfig(
            moe_parallel_config=FusedMoEParallelConfig(**parallel), **(shape | changes)
        )

    def selected(weight_key, activation_key, **changes):
        if weight_key is None:
            from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

            backend, cls = method.select_unquantized_moe_backend(moe_config=config(**changes))
        else:
            backend, cls = fp8.select_fp8_moe_backend(
                config=config(**changes), weight_key=weight_key, activation_key=activation_key
            )
        return [backend.name, cls.__name__]

    def limit_of_layer():
        """The limit of gate and up that reaches fused_moe, of a layer whose checkpoint has 1.5."""
        from rocm_kernels_vllm.experts import RocmKernelsExperts, ops
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

        scale, limits = torch.ones(8), []
        quant = fp8_w8a8_moe_quant_config(scale, scale, gemm1_clamp_limit=1.5)
        layer = RocmKernelsExperts(config(), quant)
        ops.fused_moe, theirs = lambda *arguments: limits.append(arguments[-2]), ops.fused_moe
        w = torch.empty(8, 2, 2)
        layer.apply(*[w] * 6, MoEActivation.SILU, 8, *[None] * 6, False)
        ops.fused_moe = theirs
        return limits

    def selected_as_ours_raises():
        from rocm_kernels_vllm.experts import RocmKernelsExperts

        asked = RocmKernelsExperts._supports_parallel_config
        RocmKernelsExperts._supports_parallel_config = lambda config: config.no_such_field
        found = [selected(*block), selected(*block)]
        RocmKernelsExperts._supports_parallel_config = asked
        return found

    block = (kFp8Static128BlockSym, kFp8Dynamic128Sym)
    sixteen_bit = (None, None)
    ranks = {"ep_size": 4, "use_ep": True}
    exchanged = ranks | {"dp_size": 4, "all2all_backend": "deepep_high_throughput"}
    return {
        "static": selected(kFp8StaticTensorSym, kFp8StaticTensorSym),
        "dynamic tensor": selected(kFp8StaticTensorSym, kFp8DynamicTensorSym),
        "token, channel": selected(kFp8StaticChannelSym, kFp8DynamicTokenSym),
        "block": selected(*block),
        "16-bit": selected(*sixteen_bit),
        "16-bit, GPT-OSS": selected(*sixteen_bit, activation=MoEActivation.SWIGLUOAI),
        "expert parallel": selected(*block, parallel=ranks, num_local_experts=2),
        "asked for": selected(*block, moe_backend="triton"),
        "LoRA": selected(*sixteen_bit, is_lora_enabled=True),
        "not gated": selected(*sixteen_bit, activation=MoEActivation.RELU2_NO_MUL),
        "half a block": selected(*block, intermediate_size=192),
        "many a token": selected(*block, num_experts=64, experts_per_token=33),
        "exchanged": selected(*block, parallel=exchanged, num_local_experts=2),
        "ours raises": selected_as_ours_raises(),
        "limit": limit_of_layer(),
    }


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
    """By what the next linear takes, whether the function is ours; none before vLLM 0.30."""
    try:
        from vllm.model_executor.layers.fusion.fused_act_quant import _FUSED_ACT_QUANT
    except ImportError:
        return {}
    from rocm_kernels_vllm import activation as ours

    return {
        str(key): producer.__module__ == ours.__name__
        for (cls, key), producer in _FUSED_ACT_QUANT.items()
        if cls.__name__ == "SiluAndMul"
    }


def attention() -> dict:
    """By layer, the class that vLLM selects where CUSTOM is asked for, or why it selects none."""
    from vllm.platforms.rocm import RocmPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    current_platform.get_valid_backends = RocmPlatform.get_valid_backends
    layer = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
    }  # fmt: skip
    layers = {
        "16 bits": {},
        "FP8": {"kv_cache_dtype": "fp8"},
        "window and sinks": {"has_sliding_window": True, "has_sink": True, "block_size": 48},
        "MLA": {"use_mla": True},
        "encoder": {"attn_type": "encoder_only"},
        "E5M2": {"kv_cache_dtype": "fp8_e5m2"},
        "float16 for bfloat16": {"kv_cache_dtype": "float16"},
        "head of 1024": {"head_size": 1024},
        "not causal": {"use_non_causal": True},
        "batch invariant": {"use_batch_invariant": True},
    }
    found = {}
    for name, changes in layers.items():
        config = AttentionSelectorConfig(**(layer | changes))
        select = RocmPlatform.get_attn_backend_cls.__func__
        try:
            found[name] = select(type(current_platform), AttentionBackendEnum.CUSTOM, config)
        except ValueError as error:
            found[name] = f"{error}"
    return found


def drafts(config: VllmConfig) -> dict:
    """Whether the plugin's metadata is among those that drafts may have: of a proposer that was
    made before the attention's builders, and after; and of one without a list, as on NVIDIA."""
    from rocm_kernels_vllm.attention import Metadata, MetadataBuilder
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    class Proposer(SpecDecodeBaseProposer):
        def __init__(self, types):
            self.allowed_attn_types = types

    before, unlisted = Proposer((int,)), Proposer(None)
    for _ in range(2):
        MetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    after = Proposer((int,))
    return {
        "vLLM lists": "self.allowed_attn_types = " in inspect.getsource(SpecDecodeBaseProposer),
        "before": before.allowed_attn_types == (int, Metadata),
        "after": after.allowed_attn_types == (int, Metadata),
        "unlisted": unlisted.allowed_attn_types is None,
    }


def variables() -> dict:
    """Of the plugin's: those that vLLM copies to Ray's workers, and what it hashes of each."""
    from vllm import envs
    from vllm.ray.ray_env import get_env_vars_to_copy

    known = {name for name in envs.environment_variables if "ROCM_KERNELS" in name}
    known.add("LOCAL_KERNELS")
    hashed = envs.compile_factors()
    return {name: hashed.get(name) for name in known & get_env_vars_to_copy()}


def gemm() -> list:
    """Of products of 16 rows, whose each is: as it is, then with each of vLLM's variables that keep
    them from the plugin's kernel."""
    from rocm_kernels_vllm import ops
    from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

    called = []
    ops.product_16bit = lambda x, w, bias: called.append("ours") or x.new_empty(16, 8)
    torch.ops.vllm.rocm_unquantized_gemm = lambda *_: called.append("vLLM's")
    x, w = torch.empty(16, 64), torch.empty(8, 64)
    multiply = dispatch_unquantized_gemm()
    multiply(None, x, w)
    for name, value in (("VLLM_BATCH_INVARIANT", "1"), ("VLLM_ROCM_USE_SKINNY_GEMM", "0")):
        os.environ[name] = value
        multiply(None, x, w)
        del os.environ[name]
    return called


if __name__ == "__main__":
    sys.exit(main())
