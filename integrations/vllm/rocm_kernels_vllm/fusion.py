"""Adds norm and activation with FP8 results to vLLM's compiled graphs.

vLLM's compilation passes find norm-then-quantise and activation-then-quantise in the graph and put
the op of a table there: ours have the same schemas, so they go into the tables.
"""

import importlib
from types import ModuleType

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform

from . import ops
from .parts import HookMoved


def norm() -> bool:
    if not current_platform.is_cuda_alike():
        return False  # no passes run there
    rms_quant_fusion = pass_module("rms_quant_fusion")
    key = rms_quant_fusion.FusedRMSQuantKey
    fused = {
        key(kFp8StaticTensorSym, False): ops.rms_norm_static_fp8_quant,
        key(kFp8StaticTensorSym, True): ops.fused_add_rms_norm_static_fp8_quant,
        key(kFp8DynamicTokenSym, False): ops.rms_norm_dynamic_per_token_quant,
        key(kFp8DynamicTokenSym, True): ops.rms_norm_dynamic_per_token_quant,
        key(kFp8Dynamic128Sym, False): ops.rms_norm_per_block_quant,
        key(kFp8Dynamic128Sym, True): ops.rms_norm_per_block_quant,
    }
    _replace(rms_quant_fusion.FUSED_OPS, fused)
    return True


def swiglu_pass() -> bool:
    if not current_platform.is_cuda_alike():
        return False
    fused = {
        kFp8StaticTensorSym: ops.silu_and_mul_quant,
        kFp8Dynamic128Sym: ops.silu_and_mul_per_block_quant,
    }
    _replace(pass_module("act_quant_fusion").FUSED_OPS, fused)
    return True


def pass_module(name: str) -> ModuleType:
    """Its module, which names vLLM's own ops as it is imported."""
    current_platform.import_kernels()
    return importlib.import_module(f"vllm.compilation.passes.fusion.{name}")


def _replace(table: dict, fused: dict) -> None:
    """Entries of a table by ops that take the same arguments; those that vLLM has not got on this
    platform stay away, for then it has no pattern either."""
    replaced = {key: op for key, op in fused.items() if key in table}
    if not replaced:
        raise HookMoved(f"none of {list(fused)} is in its table")
    for key, op in replaced.items():
        theirs, ours = (arguments(known) for known in (table[key], op))
        if theirs != ours:
            raise HookMoved(f"{table[key]} takes {theirs}, not {ours}")
    table.update(replaced)


def arguments(op: torch._ops.OpOverload) -> list:
    return sorted(argument.name for argument in op._schema.arguments)
