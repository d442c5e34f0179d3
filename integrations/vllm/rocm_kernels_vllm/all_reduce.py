"""The sum over GPUs, residual, RMSNorm and FP8 in one kernel, in vLLM's compiled graphs on NVIDIA.

vLLM's pass has no table for that: where FlashInfer is installed and has made its memory, it puts an
op of FlashInfer's into the graph, which its module holds under a name. An op of ours with the same
arguments takes that name, and hands to FlashInfer's whatever it does not serve. On ROCm the pass
is AITER's, which asks AITER for its own communicator: no other can take part there.
"""

import functools
import importlib
from typing import Any

import torch
from vllm.platforms import current_platform

from . import kernels, parts
from .fusion import arguments, pass_module
from .ops import define_op

MAX_BYTES = 1 << 21  # of a sum: beyond, links count, and FlashInfer's two shots are as good
NAME = "flashinfer_trtllm_fused_allreduce_norm"


def all_reduce_norm() -> bool:
    if not current_platform.is_cuda() or not parts.asked_for("all_reduce_norm"):
        return False
    module = pass_module("allreduce_rms_fusion")
    if module.flashinfer_comm is None:
        raise parts.HookMoved("FlashInfer, whose op it replaces, is not installed")
    theirs = getattr(module, NAME)
    ours = define_op(
        f"{NAME}(Tensor(a!) allreduce_in, Tensor(b!) residual, Tensor rms_gamma, float rms_eps, "
        "int world_size, bool launch_with_pdl, bool fp32_acc, int max_token_num, "
        "int pattern_code, Tensor(c!)? norm_out=None, Tensor(d!)? quant_out=None, "
        "Tensor(e!)? scale_out=None, Tensor? scale_factor=None, float weight_bias=0.0) -> ()",
        functools.partial(sum_norm_quantize, theirs),
    )
    if arguments(theirs) != arguments(ours):
        raise parts.HookMoved(f"{theirs} takes {arguments(theirs)}, not {arguments(ours)}")
    setattr(module, NAME, ours)
    return True


def sum_norm_quantize(
    theirs: Any,
    allreduce_in: torch.Tensor,
    residual: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    world_size: int,
    launch_with_pdl: bool,
    fp32_acc: bool,
    max_token_num: int,
    pattern_code: int,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    scale_factor: torch.Tensor | None = None,
    weight_bias: float = 0.0,
) -> None:
    """``quant_out``: of the norm of the ranks' sum and the residual, which becomes that sum; with a
    ``norm_out``, of the sum alone, which ``allreduce_in`` becomes. Nobody reads the norm itself."""
    in_fp8 = quant_out is not None and scale_out is None
    communicator = communicator_for(allreduce_in) if in_fp8 else None
    if communicator is None:
        theirs(
            allreduce_in, residual, rms_gamma, rms_eps, world_size, launch_with_pdl, fp32_acc,
            max_token_num, pattern_code, norm_out, quant_out, scale_out, scale_factor, weight_bias,
        )  # fmt: skip
        return
    x, residual, out = (t.view(-1, t.shape[-1]) for t in (allreduce_in, residual, quant_out))
    how = {"scale": scale_factor, "weight_offset": weight_bias, "out": out}
    if norm_out is None:
        communicator.all_reduce_rmsnorm_fp8(x, rms_gamma, rms_eps, residual, **how)
    else:
        communicator.all_reduce(x, out=x)
        kernels.package().rmsnorm_fp8(x, rms_gamma, rms_eps, **how)


def communicator_for(x: torch.Tensor) -> Any:
    """The Communicator of vLLM's tensor-parallel group; None if it does not serve this call. All
    ranks get the same answer. Made at the first call, even one that is too large, as vLLM's is:
    while a graph is captured memory cannot be shared."""
    if not _made and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if not _made:
        group = importlib.import_module("vllm.distributed").get_tp_group().device_group
        try:
            made = kernels.package().comm.Communicator(group, MAX_BYTES, device=x.device)
        except (RuntimeError, ValueError) as error:  # on all ranks alike
            parts.logger().warning("rocm-kernels: sums stay FlashInfer's: %s", error)
            made = None
        _made.append(made)
    fits = x.numel() * x.element_size() <= MAX_BYTES and x.is_contiguous()
    return _made[0] if fits else None


_made: list[Any] = []
