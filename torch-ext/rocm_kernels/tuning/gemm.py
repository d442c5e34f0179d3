"""Configs of gemm: the candidates that the tuner times, and configs set by hand."""

from typing import List, Optional

import torch

from .._ops import ops
from ..functional.product import gemm_configs, run_product
from .products import ProductOp

LAST_CLASS = 16384  # M beyond is of this class too


def gemm_candidates(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
) -> List[str]:
    """All configs worth timing for these operands and an output in bfloat16; the backend's own
    choice comes first. ``gemm_config`` tells what runs.

    Args:
        a: ``[M, K]``; w, scale_a, scale_w as in ``gemm``.
    """
    return gemm_configs(a, w, scale_a, scale_w, torch.bfloat16, tuned=False)


def gemm_with_config(
    config: str,
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``gemm`` with this config. RuntimeError when it cannot serve the operands.

    Args:
        config: as :func:`gemm_candidates` words it.
        a: ``[M, K]``; the others as in ``gemm``.
    """

    def run(*operands: Optional[torch.Tensor]) -> None:
        ops.gemm(*operands, config)

    return run_product(run, a, w, scale_a, scale_w, bias, out_dtype, None)


def _last_row_of_class(m: int) -> int:
    """16 or a further power of two, as gemm.h has it."""
    return min(max(16, 1 << (m - 1).bit_length()), LAST_CLASS)


# A 16-bit output: the kernels of FP8 tensor cores have no other, and are judged by it.
OP = ProductOp(
    "gemm",
    _last_row_of_class,
    gemm_candidates,
    ops.gemm,
    ops.tune_gemm,
    torch.bfloat16,
)
