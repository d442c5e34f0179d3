"""vLLM's mixtures of experts on fused_moe: FP8 and 16-bit weights, in its modular kernels.

vLLM asks one function for the class that runs a layer's experts, by the dtype of their weights. It
walks a fixed list of vLLM's own; here ours is asked first, and what it does not take goes on to
that list. Routing, shared experts and what ranks exchange stay vLLM's.

The backend that ours says it is, TRITON, is the one whose weights stay as they were loaded.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform

from . import devices, kernels, ops, parts
from .parts import HookMoved

ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
# The oracle's module, the function that selects, the backends' class.
SELECTED = (
    ("fp8", "select_fp8_moe_backend", "Fp8MoeBackend"),
    ("unquantized", "select_unquantized_moe_backend", "UnquantizedMoeBackend"),
)
ASKED_OF_CONFIGS = (
    "moe_backend", "rocm_aiter_fmoe_enabled", "num_local_experts", "experts_per_token", "in_dtype",
    "intermediate_size_per_partition",
)  # fmt: skip
ASKED_OF_PARALLEL_CONFIGS = ("use_all2all_kernels", "use_ag_rs_all2all_kernels")
# vLLM 0.26 and 0.27 have none: the limit of gate and up is the quantisation's.
HAS_ACTIVATION_CONFIG = hasattr(mk, "ApplyMoEActivationConfig")

ACTIVATIONS = {
    MoEActivation.SILU: "silu",
    MoEActivation.GELU: "gelu",
    MoEActivation.GELU_TANH: "gelu_tanh",
    MoEActivation.SWIGLUOAI: "swigluoai",
}
SWIGLUOAI_LIMIT = 7.0  # what vLLM's own op of this activation has built in
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
BLOCK = 128
MAX_EXPERTS, MAX_TOPK = 2048, 32  # of fused_moe

# By the weights' scales, the activations that fused_moe quantises as well or better: by token, or
# by 128 columns where the weights have blocks. That is finer than one scale for all, static or not.
FP8_SCHEMES = {
    kFp8StaticTensorSym: (
        kFp8StaticTensorSym,
        kFp8DynamicTensorSym,
        kFp8DynamicTokenSym,
        kFp8Dynamic128Sym,  # what vLLM calls compressed-tensors' dynamic scheme per tensor
    ),
    kFp8StaticChannelSym: (kFp8DynamicTokenSym,),
    kFp8Static128BlockSym: (kFp8Dynamic128Sym,),
}


def experts() -> bool:
    _require_hooks()
    found = []
    for oracle, function, backends in SELECTED:
        module = importlib.import_module(f"{ORACLES}.{oracle}")
        theirs = getattr(module, function)
        theirs = getattr(theirs, "vllms", theirs)  # once, whoever calls again
        found.append((function, theirs, getattr(module, backends).TRITON))
    for function, theirs, backend in found:
        _replace_everywhere(function, theirs, _asking_ours_first(theirs, backend))
    return True


def _require_hooks() -> None:
    """What a served model would otherwise be the first to miss."""
    limit = (
        (mk.ApplyMoEActivationConfig, ("clamp_limit",))
        if HAS_ACTIVATION_CONFIG
        else (FusedMoEQuantConfig, ("gemm1_clamp_limit",))
    )
    parallel = (FusedMoEParallelConfig, ASKED_OF_PARALLEL_CONFIGS)
    for cls, asked in ((FusedMoEConfig, ASKED_OF_CONFIGS), parallel, limit):
        known = {*cls.__dataclass_fields__, *vars(cls)}
        if missing := sorted(set(asked) - known):
            raise HookMoved(f"{cls.__name__} has no {missing}")
    if inspect.isabstract(RocmKernelsExperts):
        raise HookMoved(f"experts must have {sorted(RocmKernelsExperts.__abstractmethods__)} too")
    for method in ("apply", "workspace_shapes", "is_supported_config"):
        theirs, ours = (
            list(inspect.signature(getattr(cls, method)).parameters)
            for cls in (mk.FusedMoEExpertsModular, RocmKernelsExperts)
        )
        if theirs != ours:
            raise HookMoved(f"FusedMoEExpertsModular.{method} takes {theirs}, not {ours}")


def _asking_ours_first(theirs: Callable, backend) -> Callable:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def select(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        config = given.get("config", given.get("moe_config"))
        weight_key, activation_key = given.get("weight_key"), given.get("activation_key")
        log = init_logger(parts.logger().name)
        try:
            supported, reason = RocmKernelsExperts.is_supported_config(
                RocmKernelsExperts, config, weight_key, activation_key,
                mk.FusedMoEActivationFormat.Standard,
            )  # fmt: skip
        except Exception as error:  # whatever a vLLM of other shape raises: a server must start
            message = "Experts stay with vLLM %s, whose configs are not as they were (%s: %s)"
            log.warning_once(message, parts.version_of_vllm(), type(error).__name__, f"{error}")
            return theirs(*args, **kwargs)
        if supported:
            log.info_once(
                "Selected RocmKernelsExperts for %s weights",
                "16-bit" if weight_key is None else weight_key,
            )
            return backend, RocmKernelsExperts
        log.info_once("Experts stay with vLLM: %s", reason)
        return theirs(*args, **kwargs)

    select.vllms = theirs
    return select


def _replace_everywhere(name: str, theirs: Callable, ours: Callable) -> None:
    """Replaces a function of vLLM in its own module, and in those that imported it before."""
    for module in [m for key, m in sys.modules.items() if m and key.startswith("vllm.")]:
        found = vars(module).get(name)
        if found is theirs or getattr(found, "vllms", None) is theirs:
            setattr(module, name, ours)


class RocmKernelsExperts(mk.FusedMoEExpertsModular):
    """Both products, the activation between them, quantising and the sum over a token's experts."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # fused_moe quantises them

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        blocks = weight_key == kFp8Static128BlockSym
        here = devices.here()
        slower = devices.why_off("experts", here) or devices.why_experts_wait(here, weight_key)
        for not_ours, reason in (
            (kernels.why_not(), kernels.why_not()),
            (slower, slower),
            (moe_config.moe_backend != "auto", f"{moe_config.moe_backend} is asked for"),
            (moe_config.rocm_aiter_fmoe_enabled, "AITER is turned on"),
            (moe_config.num_local_experts > MAX_EXPERTS, f"takes up to {MAX_EXPERTS} experts"),
            (moe_config.experts_per_token > MAX_TOPK, f"takes up to {MAX_TOPK} a token"),
            (moe_config.in_dtype not in SIXTEEN_BIT, f"takes no inputs of {moe_config.in_dtype}"),
            (
                blocks and moe_config.intermediate_size_per_partition % BLOCK,
                "gate and up must be whole blocks",
            ),
        ):
            if not_ours:
                return False, reason
        return mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda_alike() or current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key) -> bool:
        if weight_key is None:
            return activation_key is None
        return activation_key in FP8_SCHEMES.get(weight_key, ())

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config) -> bool:
        """Tensor and expert parallel, and ranks that gather all tokens; not exchanges that bring
        tokens already sorted by expert."""
        parallel = moe_parallel_config
        exchanged = parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels
        # Of vLLM 0.32 and later.
        return not exchanged and not getattr(parallel, "use_passthrough_all2all", False)

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        return (0,), (0,), (M, K)  # fused_moe has memory of its own

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
        global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
        expert_tokens_meta, apply_router_weight_on_input,
    ):  # fmt: skip
        """``output [M, K]``, ``hidden_states [M, K]`` 16-bit, ``w1 [E, 2 * I, K]``,
        ``w2 [E, K, I]``; ``expert_map`` from all experts to this rank's, or -1."""
        if apply_router_weight_on_input:  # which vLLM has done
            topk_weights = torch.ones_like(topk_weights)
        interleaved = activation == MoEActivation.SWIGLUOAI
        limit = SWIGLUOAI_LIMIT if interleaved else self._clamp_limit()
        ops.fused_moe(
            output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map,
            _scale_of(w1, self.w1_scale), _scale_of(w2, self.w2_scale), self.w1_bias, self.w2_bias,
            ACTIVATIONS[activation], limit, interleaved,
        )  # fmt: skip

    def _clamp_limit(self) -> float | None:
        """Of gate and up."""
        if HAS_ACTIVATION_CONFIG:
            return self.activation_config.clamp_limit
        return self.quant_config.gemm1_clamp_limit


def _scale_of(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor | None:
    """Reshapes a scale to what fused_moe takes: ``[E]``, ``[E, N, 1]`` or blocks."""
    experts = w.shape[0]
    if scale is None or (scale.dim() == 3 and scale.numel() != experts):
        return scale
    return scale.view(experts) if scale.numel() == experts else scale.view(experts, w.shape[1], 1)
