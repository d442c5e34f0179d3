"""What the tuner knows of skinny_gemm, and its configs by hand."""

from typing import List, Optional

import torch

from .._ops import ops
from ..functional.product import run_product
from ..functional.rows import input_rows
from .products import ProductOp

CLASSES = (16, 32, 64)  # the last M of each


def skinny_gemm_config(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
) -> str:
    """The config that ``skinny_gemm(a, w, scale_a, scale_w)`` runs with, in words.

    Args:
        a: ``[M, K]``; w, scale_a, scale_w as in ``skinny_gemm``.

    Returns:
        The backend's own text: on AMD and CUDA the kernel's design, then ``name=value`` for each of
        its parameters; on the CPU the instruction set.
    """
    return _configs(a, w, scale_a, scale_w, tuned=True)[0]


def candidates(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
) -> List[str]:
    """All configs worth timing for these operands; the backend's own choice comes first."""
    return _configs(a, w, scale_a, scale_w, tuned=False)


def skinny_gemm_with_config(
    config: str,
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``skinny_gemm`` with this config. RuntimeError when it cannot serve the operands.

    Args:
        config: as :func:`candidates` words it.
        a: ``[M, K]``; the others as in ``skinny_gemm``.
    """

    def run(*operands: Optional[torch.Tensor]) -> None:
        ops.skinny_gemm(*operands, config)

    return run_product(run, a, w, scale_a, scale_w, bias, out_dtype, None)


def _configs(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor],
    scale_w: Optional[torch.Tensor],
    tuned: bool,
) -> List[str]:
    a = input_rows(a)
    out = torch.empty((a.shape[0], w.shape[0]), dtype=torch.bfloat16, device=a.device)
    return ops.skinny_gemm_configs(out, a, w, scale_a, scale_w, tuned).splitlines()


OP = ProductOp(
    "skinny_gemm",
    lambda m: next(last for last in CLASSES if m <= last),
    candidates,
    ops.skinny_gemm,
    ops.tune_skinny_gemm,
    torch.float32,
)
