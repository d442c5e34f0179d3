"""What the tuner knows of skinny_gemm: its key, its configs, its data and its contract."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .._ops import add_op_namespace_prefix, ops
from ..functional import FP8_DTYPES, SCALE_BLOCK
from ..reference import dequantize

CLASSES = (16, 32, 64)  # the last M of each


@torch.library.register_fake(add_op_namespace_prefix("skinny_gemm_with_config"))
def _(out, a, w, scale_a, scale_w, bias, config):
    return None


class GemmShape(NamedTuple):
    """A product to tune: ``w [n, k]``, its dtypes, and whether its scales are of blocks."""

    n: int
    k: int
    a_dtype: torch.dtype
    w_dtype: torch.dtype
    block_scales: bool = False

    def __str__(self) -> str:
        dtypes = f"{_name(self.a_dtype)} x {_name(self.w_dtype)}"
        return f"N={self.n} K={self.k} {dtypes}{', block scales' if self.block_scales else ''}"


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
    out = torch.empty((a.shape[0], w.shape[0]), dtype=out_dtype, device=a.device)
    ops.skinny_gemm_with_config(out, a, w, scale_a, scale_w, bias, config)
    return out


def shapes_of(model: nn.Module) -> List[GemmShape]:
    """The products of a model's FP8 linears, each once.

    Knows the linears of ``quantize_model_``, and transformers' finegrained and FBGEMM ones.
    """
    shapes: Dict[GemmShape, None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        scale = getattr(module, "weight_scale_inv", getattr(module, "weight_scale", None))
        fp8 = isinstance(weight, torch.Tensor) and weight.dtype in FP8_DTYPES and weight.dim() == 2
        if not fp8 or scale is None or hasattr(module, "fused"):  # a part's weight is its fused's
            continue
        wide = getattr(module, "activation_scheme", "dynamic") == "none"
        a_dtype = torch.bfloat16 if wide else weight.dtype
        blocks = scale.dim() == 2 and scale.shape[1] > 1
        shapes[GemmShape(weight.shape[0], weight.shape[1], a_dtype, weight.dtype, blocks)] = None
    return list(shapes)


def force(device: int, entry: Dict[str, Any], config: str) -> None:
    """Sets the launcher's config for an entry's key on a device; empty: its own choice."""
    ops.tune_skinny_gemm(
        device, entry["m"], entry["n"], entry["k"], entry["a_dtype"], entry["w_dtype"],
        entry["block_scales"], config,
    )  # fmt: skip


def class_of(m: int) -> int:
    return next(last for last in CLASSES if m <= last)


class Weights:
    """Random weights of a shape, and copies of them beyond what caches hold."""

    def __init__(self, shape: GemmShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        values = torch.randn(shape.n, shape.k, device=device, dtype=torch.bfloat16)
        self.w = values.to(shape.w_dtype)
        del values
        # The Infinity Cache of an MI300X holds 256 MB.
        rotated = (512 << 20) if device.type == "cuda" else (64 << 20)
        count = max(2, min(64, rotated // max(1, self.w.numel() * self.w.element_size()) + 1))
        self.copies = [self.w] + [self.w.clone() for _ in range(count - 1)]
        self.scale = self._scale(shape.n, SCALE_BLOCK) if shape.w_dtype in FP8_DTYPES else None

    def operands(self, m: int) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """``a`` and its scale."""
        values = torch.randn(m, self.shape.k, device=self.device, dtype=torch.bfloat16)
        a = values.to(self.shape.a_dtype)
        return a, (self._scale(m, 1) if a.dtype in FP8_DTYPES else None)

    def _scale(self, rows: int, row_block: int) -> torch.Tensor:
        size = (rows, 1)
        if self.shape.block_scales:
            size = (-(-rows // row_block), -(-self.shape.k // SCALE_BLOCK))
        return torch.rand(size, device=self.device) + 0.5


class GemmCase:
    """A product and the values of M that share a config; see tuner.Case."""

    def __init__(self, shape: GemmShape, last: int, members: List[int], weights: Weights) -> None:
        self.shape, self.members, self.weights, self.inputs = (
            shape,
            members,
            weights,
            weights.copies,
        )
        self.operands = {m: weights.operands(m) for m in members}
        self.key = {
            "op": "skinny_gemm",
            "m": last,
            "n": shape.n,
            "k": shape.k,
            "a_dtype": _name(shape.a_dtype),
            "w_dtype": _name(shape.w_dtype),
            "block_scales": shape.block_scales,
        }

    def __str__(self) -> str:
        return str(self.shape)

    def configs(self) -> List[str]:
        a, scale_a = self.operands[self.members[0]]
        return candidates(a, self.weights.w, scale_a, self.weights.scale)

    def within_contract(self, config: str) -> bool:
        return all(_within_contract(config, *self.operands[m], self.weights) for m in self.members)

    def call(self, config: str, m: int) -> Callable[[torch.Tensor], None]:
        (a, scale_a), scale_w = self.operands[m], self.weights.scale
        out = torch.empty((m, self.shape.n), dtype=torch.bfloat16, device=a.device)

        def multiply(w: torch.Tensor) -> None:
            ops.skinny_gemm_with_config(out, a, w, scale_a, scale_w, None, config)

        return multiply


def _within_contract(
    config: str, a: torch.Tensor, scale_a: Optional[torch.Tensor], weights: Weights
) -> bool:
    """Whether a config's float32 result errs at most twice as much as a float32 product."""
    out = torch.full((a.shape[0], weights.shape.n), torch.nan, device=a.device)
    ops.skinny_gemm_with_config(out, a, weights.w, scale_a, weights.scale, None, config)
    wide_a, step = dequantize(a, scale_a, 1), SCALE_BLOCK * 8
    error, baseline, largest = [], [], 0.0
    for begin in range(0, weights.shape.n, step):  # float64 of all of w might not fit
        scale = weights.scale
        if scale is not None:
            block = SCALE_BLOCK if weights.shape.block_scales else 1
            scale = scale[begin // block : (begin + step) // block]
        wide_w = dequantize(weights.w[begin : begin + step], scale, SCALE_BLOCK)
        exact = wide_a @ wide_w.t()
        plain = (wide_a.float() @ wide_w.float().t()).double()
        error.append((out[:, begin : begin + step] - exact).flatten())
        baseline.append((plain - exact).flatten())
        largest = max(largest, exact.abs().max().item())
    error, baseline = torch.cat(error), torch.cat(baseline)
    unit = largest * torch.finfo(torch.float32).eps / 2  # where float32 happens to be exact
    norms = [(error.abs().max(), baseline.abs().max(), unit)]
    norms += [(error.norm(), baseline.norm(), unit * error.numel() ** 0.5)]
    return all(bool(e <= 2 * b + u) for e, b, u in norms)  # False where an error is NaN


def _configs(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor],
    scale_w: Optional[torch.Tensor],
    tuned: bool,
) -> List[str]:
    out = torch.empty((a.shape[0], w.shape[0]), dtype=torch.bfloat16, device=a.device)
    return ops.skinny_gemm_configs(out, a, w, scale_a, scale_w, tuned).splitlines()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]
