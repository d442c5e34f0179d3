"""What the tuner needs of a matrix product: its key in a file, random operands, and the check of
its result."""

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES, SCALE_BLOCK
from ..reference import dequantize


class ProductOp(NamedTuple):
    """An op that multiplies, as the tuner calls it.

    Attributes:
        name: the op's.
        last_row_of_class: the last M of the class of an M.
        configs: ``(a, w, scale_a, scale_w)`` to the configs worth timing, the op's own first.
        run: ``(out, a, w, scale_a, scale_w, bias, config)``.
        force: ``(device, m, n, k, a_dtype, w_dtype, block_scales, config)``; an empty config: the
            op's own choice.
        checked_dtype: of the output by which a config's errors are judged.
    """

    name: str
    last_row_of_class: Callable[[int], int]
    configs: Callable[..., List[str]]
    run: Callable[..., None]
    force: Callable[..., None]
    checked_dtype: torch.dtype


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
        return torch.rand(size, dtype=torch.float32, device=self.device) + 0.5


class ProductCase:
    """A product and the values of M that share a config; see tuner.Case."""

    def __init__(self, op: ProductOp, shape: GemmShape, members: List[int], weights: Weights):
        self.op, self.shape, self.members = op, shape, members
        self.weights, self.inputs = weights, weights.copies
        self.operands = {m: weights.operands(m) for m in members}
        self.exact: Dict[int, Tuple[torch.Tensor, List[torch.Tensor]]] = {}
        self.key = {
            "op": op.name,
            "m": op.last_row_of_class(members[0]),
            "n": shape.n,
            "k": shape.k,
            "a_dtype": _name(shape.a_dtype),
            "w_dtype": _name(shape.w_dtype),
            "block_scales": shape.block_scales,
        }

    def __str__(self) -> str:
        return f"{self.op.name} {self.shape}"

    def configs(self) -> List[str]:
        a, scale_a = self.operands[self.members[-1]]
        return self.op.configs(a, self.weights.w, scale_a, self.weights.scale)

    def within_contract(self, config: str) -> bool:
        """Whether a config errs at most twice as much as a float32 product, both rounded once."""
        return all(self._right(config, m) for m in self.members)

    def call(self, config: str, m: int) -> Callable[[torch.Tensor], None]:
        (a, scale_a), scale_w, run = self.operands[m], self.weights.scale, self.op.run
        out = torch.empty((m, self.shape.n), dtype=torch.bfloat16, device=a.device)

        def multiply(w: torch.Tensor) -> None:
            run(out, a, w, scale_a, scale_w, None, config)

        return multiply

    def _right(self, config: str, m: int) -> bool:
        (a, scale_a), dtype = self.operands[m], self.op.checked_dtype
        if m not in self.exact:
            exact, plain = self._products(a, scale_a)
            unit = exact.abs().max() * torch.finfo(torch.float32).eps / 2
            baseline = plain.to(dtype).double() - exact
            # A unit where float32 happens to be exact.
            largest = 2 * baseline.abs().max() + unit
            norm = 2 * baseline.norm() + unit * baseline.numel() ** 0.5
            self.exact[m] = exact, [largest, norm]
        exact, (largest, norm) = self.exact[m]
        out = torch.full_like(exact, torch.nan, dtype=dtype)
        self.op.run(out, a, self.weights.w, scale_a, self.weights.scale, None, config)
        error = out - exact
        return bool(error.abs().max() <= largest) and bool(error.norm() <= norm)  # no for NaN

    def _products(self, a: torch.Tensor, scale_a: Optional[torch.Tensor]):
        """Computes the product in float64 and in float32."""
        w, scale, step = self.weights.w, self.weights.scale, SCALE_BLOCK * 8
        block = SCALE_BLOCK if self.shape.block_scales else 1
        wide_a = dequantize(a, scale_a, 1)
        exact, plain = [], []
        for begin in range(0, self.shape.n, step):  # float64 of all of w might not fit
            part = None if scale is None else scale[begin // block : (begin + step) // block]
            wide_w = dequantize(w[begin : begin + step], part, SCALE_BLOCK)
            exact.append(wide_a @ wide_w.t())
            plain.append(wide_a.float() @ wide_w.float().t())
        return torch.cat(exact, 1), torch.cat(plain, 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]
