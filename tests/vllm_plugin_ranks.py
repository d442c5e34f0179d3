"""Cases of comm_ranks.py: the vLLM plugin's sum with norm and FP8, without vLLM."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from comm_ranks import Here, bits, parts_of, require_same_bits
from project import ROOT
from torch._higher_order_ops.auto_functionalize import auto_functionalized

FP8 = torch.float8_e4m3fn
COLUMNS = 512
SETTINGS = (2, True, True, 1024, 2)  # FlashInfer's own


def stand_ins(group: object) -> dict[str, ModuleType]:
    """vLLM's modules, as far as the part asks them."""
    found = {}
    path = "vllm", "vllm.platforms", "vllm.distributed", "vllm.model_executor"
    layers = "vllm.model_executor.layers", "vllm.model_executor.layers.quantization"
    keys = f"{layers[1]}.utils.quant_utils"
    fusion = "vllm.compilation.passes.fusion.allreduce_rms_fusion"
    for name in (*path, *layers, f"{layers[1]}.utils", keys, fusion):
        found[name] = ModuleType(name)
    found["vllm.platforms"].current_platform = SimpleNamespace(
        is_cuda=lambda: True, import_kernels=lambda: None
    )
    found["vllm.distributed"].get_tp_group = lambda: SimpleNamespace(device_group=group)
    for key in ("kFp8Dynamic128Sym", "kFp8DynamicTokenSym", "kFp8StaticTensorSym"):
        setattr(found[keys], key, key)
    found[fusion].flashinfer_comm = object()
    return found


def flashinfers_op(calls: list) -> object:
    """With the arguments of vLLM 0.33."""
    library = torch.library.Library("vllm_stand_in", "DEF")
    library.define(
        "fused(Tensor(a!) allreduce_in, Tensor(b!) residual, Tensor rms_gamma, float rms_eps, "
        "SymInt world_size, bool launch_with_pdl, bool fp32_acc, SymInt max_token_num, "
        "SymInt pattern_code, Tensor(c!)? norm_out=None, Tensor(d!)? quant_out=None, "
        "Tensor(e!)? scale_out=None, Tensor? scale_factor=None, float weight_bias=0.) -> ()"
    )
    library.impl("fused", lambda *given: calls.append(given), "CompositeExplicitAutograd")
    calls.append(library)  # keeps it
    return torch.ops.vllm_stand_in.fused.default


def sum_norm_quantize(here: Here) -> dict[str, object]:
    group, calls = here.group(2), []
    package, reference = here.package, here.package.reference
    modules = stand_ins(group)
    fusion = modules["vllm.compilation.passes.fusion.allreduce_rms_fusion"]
    fusion.flashinfer_trtllm_fused_allreduce_norm = flashinfers_op(calls)
    asked = {"ROCM_KERNELS_VLLM_ON": "all_reduce_norm"}
    sys.path.insert(0, str(ROOT / "integrations" / "vllm"))
    with mock.patch.dict(sys.modules, modules), mock.patch.dict("os.environ", asked):
        part = importlib.import_module("rocm_kernels_vllm.all_reduce")
        part.kernels.package = lambda: package
        said = {"on": part.all_reduce_norm()}
        op = fusion.flashinfer_trtllm_fused_allreduce_norm
        parts = parts_of(3, 2, (5, COLUMNS), torch.bfloat16)
        whole = reference.all_reduce(parts)
        torch.manual_seed(3)
        weight = torch.randn(COLUMNS).bfloat16()
        scale, first = torch.tensor([0.05]), torch.randn(5, COLUMNS).bfloat16()

        # vLLM's first call is its largest: FlashInfer's. The next may be in the capture of a graph,
        # and no memory can be shared then.
        large = torch.zeros(part.MAX_BYTES // COLUMNS, COLUMNS).bfloat16()
        op(large, large.clone(), weight, 1e-5, *SETTINGS, None, large.to(FP8), None, scale)
        said["made"] = len(part._made)
        # With a residual; as the graph of a model that keeps a first dimension has it, too.
        for shape, bias in (((5, COLUMNS), 0.0), ((1, 5, COLUMNS), 1.0)):
            wanted = first.clone()
            q = package.rmsnorm_fp8(whole, weight, 1e-5, wanted, scale=scale, weight_offset=bias)[0]
            residual, out = first.clone().view(shape), torch.full(shape, 0.25).to(FP8)
            op(
                parts[here.rank].view(shape), residual, weight, 1e-5, *SETTINGS, None, out, None,
                scale, bias,
            )  # fmt: skip
            require_same_bits(out.view(5, COLUMNS), q)
            require_same_bits(residual.view(5, COLUMNS), wanted)
        # As vLLM's pass puts it into a graph.
        names = ["world_size", "launch_with_pdl", "fp32_acc", "max_token_num", "pattern_code"]
        made = auto_functionalized(
            op, allreduce_in=parts[here.rank], residual=first, rms_gamma=weight, rms_eps=1e-5,
            norm_out=None, quant_out=torch.empty(5, COLUMNS, dtype=FP8), scale_out=None,
            scale_factor=scale, **dict(zip(names, SETTINGS, strict=True)),
        )  # fmt: skip
        wanted = first.clone()
        q = package.rmsnorm_fp8(whole, weight, 1e-5, wanted, scale=scale)[0]
        require_same_bits(made[4], q)
        require_same_bits(made[2], wanted)
        # Without: the sum takes the place of what was summed.
        x, out = parts[here.rank].clone(), torch.full((5, COLUMNS), 0.25).to(FP8)
        nothing, norm = torch.zeros_like(x), torch.empty_like(x)
        op(x, nothing, weight, 1e-5, *SETTINGS, norm, out, None, scale)
        require_same_bits(x, whole)
        require_same_bits(out, package.rmsnorm_fp8(whole, weight, 1e-5, scale=scale)[0])
        assert len(calls) == 2  # the library, and the large one
        # Not in FP8, and in FP4: FlashInfer's.
        op(x, nothing, weight, 1e-5, *SETTINGS, norm)
        op(x, nothing, weight, 1e-5, *SETTINGS, norm, out, scale)
        said["theirs"] = [len(given[0]) for given in calls[1:]]
        said["again"] = (
            part.all_reduce_norm() and fusion.flashinfer_trtllm_fused_allreduce_norm is op
        )
        fusion.flashinfer_comm = None
        try:
            part.all_reduce_norm()
        except part.parts.HookMoved as moved:
            said["without FlashInfer"] = str(moved)
        said["bits"] = bits(out)
    return said
