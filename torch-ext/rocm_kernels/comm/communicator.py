"""The ops that exchange, as methods of what they share."""

import ctypes
from typing import Any, Optional, Tuple, Union

import torch

from .._ops import ops
from ..functional.fp8 import QuantizedOut, is_ue8m0, quantized_out, written_pair
from ..functional.gradients import mark_written, needs_gradient, refuse_gradient
from ..functional.norm import sum_and_addend
from ..functional.product import linear_by
from ..functional.rows import explain, input_rows, input_vector, optional_rows, written_rows
from ..functional.shapes import register_shapes
from .memory import MOST_RANKS, gpu_memory, require_on_all_ranks, shared_memory

_all_reduce = ops.all_reduce.default
_all_reduce_rmsnorm_fp8 = ops.all_reduce_rmsnorm_fp8.default
_reduce_scatter = ops.reduce_scatter.default
_all_gather = ops.all_gather.default
_linear_all_reduce = ops.linear_all_reduce.default
_WRITING = (
    "all_reduce", "all_reduce_rmsnorm_fp8", "reduce_scatter", "all_gather", "linear_all_reduce",
)  # fmt: skip

for _name in _WRITING:
    register_shapes(_name)


class Communicator:
    """Memory that 2 to 8 ranks of one host share, and the ops that exchange through it.

    The result of a sum has the same bits on every rank: the ranks' elements are added in their
    order, from 0 on, in float32, and rounded once.

    All ranks make the same calls in the same order, one after the other: a rank that does not call
    within ``timeout`` is an error on the others, and the communicator is of no more use then.

    Args:
        group: a process group of torch.distributed; None: the default one. All its ranks must make
            the communicator.
        max_bytes: of the largest tensor of a call; the memory taken is twice as much on the CPU,
            four times on a GPU.
        device: where the tensors are; None: the current GPU for a group of NCCL, else the CPU.
        timeout: seconds. Generous, since a rank may compile or load while the others wait.

    On a GPU a call returns before its kernel has run, so a rank that did not come is an error of a
    later call, or of :meth:`check`. All calls belong to one stream at a time: another takes a
    communicator of its own, or waits for the first.
    """

    def __init__(
        self,
        group: Optional[Any] = None,
        max_bytes: int = 1 << 23,
        *,
        device: Optional[Union[str, torch.device]] = None,
        timeout: float = 300.0,
    ) -> None:
        dist = torch.distributed
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "a Communicator needs a process group: call torch.distributed.init_process_group "
                "first"
            )
        group = dist.group.WORLD if group is None else group
        self.rank: int = dist.get_rank(group)
        self.ranks: int = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("a Communicator is made by the ranks of its group, and this is none")
        if not 2 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"a Communicator takes 2 to {MOST_RANKS} ranks, got {self.ranks}")
        self.max_bytes, self.timeout = int(max_bytes), float(timeout)
        asked = [None] * self.ranks
        dist.all_gather_object(asked, self.max_bytes, group=group)
        why = None
        if self.max_bytes <= 0 or len({*asked}) > 1:
            why = f"max_bytes must be positive and the same on every rank, got {asked}"
        require_on_all_ranks(group, why)
        if device is None:
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        self.device = torch.device(device)
        self._report: Optional[torch.Tensor] = None
        self._memory: Optional[torch.Tensor] = None
        self._peers: Any = None  # what keeps the other ranks' memory mapped
        if self.device.type == "cpu":
            self._memory = shared_memory(group, 2 * self.max_bytes)
        else:
            if self.device.index is None:
                self.device = torch.device(self.device.type, torch.cuda.current_device())
            self._report = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
            self._memory, self._peers = gpu_memory(
                group, 4 * self.max_bytes, self.device, self._report
            )
        self._address, self._bytes = self._memory.data_ptr(), self._memory.numel()

    def close(self) -> None:
        """Gives this rank's memory back; what others still read of it stays until they close."""
        self._memory, self._peers, self._address = None, None, 0

    def check(self) -> None:
        """Raises if a rank did not come to a call made so far; waits for a GPU to finish them."""
        if self._report is not None:
            torch.cuda.synchronize(self.device)
            self._raise_what_was_reported()

    def all_reduce(self, x: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """The sum of the ranks' x.

        Args:
            x: ``[...]``, float32, float16 or bfloat16, of the same shape on every rank.
            out: like x, to write the sum to; may be x.
        """
        return self._exchange("all_reduce", _all_reduce, x, out, None)

    def reduce_scatter(self, x: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """The sum of the ranks' x, of which each rank gets a part of the first dimension.

        Args:
            x: ``[ranks * n, ...]``, as in :meth:`all_reduce`.
            out: ``[n, ...]``.
        """
        rows = x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else 0
        if rows % self.ranks:
            raise ValueError(
                f"x must have a multiple of {self.ranks} rows for as many ranks, got "
                f"{tuple(x.shape)}"
            )
        return self._exchange("reduce_scatter", _reduce_scatter, x, out, rows // self.ranks)

    def all_gather(self, x: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
        """The ranks' x, one after the other along the first dimension.

        Args:
            x: ``[n, ...]``, as in :meth:`all_reduce`.
            out: ``[ranks * n, ...]``.
        """
        rows = x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else 1
        return self._exchange("all_gather", _all_gather, x, out, rows * self.ranks)

    def all_reduce_rmsnorm_fp8(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        residual: Optional[torch.Tensor] = None,
        *,
        scale: Optional[torch.Tensor] = None,
        group_size: Optional[int] = None,
        scale_ub: Optional[float] = None,
        scale_fmt: Optional[str] = None,
        fp8_dtype: Optional[torch.dtype] = None,
        weight_offset: float = 0.0,
        residual_out: Optional[torch.Tensor] = None,
        out: QuantizedOut = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """:func:`rocm_kernels.rmsnorm_fp8` of :meth:`all_reduce`'s result, to the bit, with the
        arguments and results of that; on a GPU one kernel, at the sizes of a decode step."""
        self._require_use()
        try:
            if needs_gradient(x, weight, residual, scale, residual_out, *written_pair(out)):
                refuse_gradient(
                    "all_reduce_rmsnorm_fp8", x=x, weight=weight, residual=residual, scale=scale,
                    residual_out=residual_out, out=out,
                )  # fmt: skip
            q, scales = quantized_out(x, None, scale, group_size, fp8_dtype, out)
            h, addend = sum_and_addend(residual, residual_out)
            _all_reduce_rmsnorm_fp8(
                written_rows(q, "out"), optional_rows(scales, "scales"),
                input_rows(x.contiguous()), h, input_vector(weight), scale, eps, group_size or 0,
                scale_ub or 0.0, scale_fmt is not None and is_ue8m0(scale_fmt, scale),
                weight_offset, addend, self._address, self._bytes, self.rank, self.ranks,
                self.timeout,
            )  # fmt: skip
            mark_written(residual if residual_out is None else residual_out, *written_pair(out))
            return q, (scales if scale is None else scale)
        except Exception:
            optional = {"residual": residual, "residual_out": residual_out, "scale": scale}
            explain({"x": x, "weight": weight}, optional)
            raise

    def linear_all_reduce(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        scale_w: torch.Tensor,
        *,
        scale_x: Optional[torch.Tensor] = None,
        scale_fmt: Optional[str] = None,
        bias: Optional[torch.Tensor] = None,
        out_dtype: Optional[torch.dtype] = None,
    ) -> torch.Tensor:
        """The sum of the ranks' :func:`rocm_kernels.fp8_linear`, each of its share of K.

        Args as there; a bias is added once, by rank 0. On a GPU the product sends its tiles itself
        where :meth:`linear_all_reduce_config` says so, else it is a product and a sum.
        """
        self._require_use()

        def summed(*operands: Optional[torch.Tensor]) -> None:
            _linear_all_reduce(
                *operands, self._address, self._bytes, self.rank, self.ranks, self.timeout
            )

        bias = bias if self.rank == 0 else None
        y, is_summed = linear_by(
            summed, "linear_all_reduce", x, w, scale_w, scale_x, scale_fmt, bias, out_dtype
        )
        return y if is_summed else self.all_reduce(y, out=y)

    def linear_all_reduce_config(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        scale_w: torch.Tensor,
        *,
        scale_x: Optional[torch.Tensor] = None,
        scale_fmt: Optional[str] = None,
        out_dtype: Optional[torch.dtype] = None,
    ) -> str:
        """How :meth:`linear_all_reduce` runs for these operands on this rank.

        Returns:
            ``"sent"``: the product sends its tiles to all ranks, and a kernel adds them up.
            ``"apart"``: a product, and :meth:`all_reduce` of its result. The bits are the same.
            No kernel runs for the answer.
        """
        self._require_use()
        found = ["apart"]

        def tell(*operands: Optional[torch.Tensor]) -> None:
            group = self._address, self._bytes, self.rank, self.ranks
            found[0] = ops.linear_all_reduce_configs(*operands[:-1], *group)

        name = "linear_all_reduce_config"
        linear_by(tell, name, x, w, scale_w, scale_x, scale_fmt, None, out_dtype, told=True)
        return found[0]

    def _exchange(
        self, name: str, op: Any, x: torch.Tensor, out: Optional[torch.Tensor], rows: Optional[int]
    ) -> torch.Tensor:
        """`rows`: of the result; None: as many as x has."""
        self._require_use()
        try:
            if needs_gradient(x, out):
                refuse_gradient(name, x=x, out=out)
            x = x.contiguous()
            result = out
            if result is None:
                shape = x.shape if rows is None else (rows, *x.shape[1:])
                result = torch.empty(shape, dtype=x.dtype, device=x.device)
            op(result, x, self._address, self._bytes, self.rank, self.ranks, self.timeout)
            mark_written(out)
            return result
        except Exception:
            explain({"x": x}, {"out": out})
            raise

    def _require_use(self) -> None:
        if self._address == 0:
            raise RuntimeError("the Communicator is closed: make a new one")
        if self._report is not None and not torch.compiler.is_compiling():
            self._raise_what_was_reported()

    def _raise_what_was_reported(self) -> None:
        # Not by a method of the tensor, which takes some microseconds.
        missing = ctypes.c_int64.from_address(self._report.data_ptr()).value
        if missing:
            raise RuntimeError(
                f"rank {missing - 1} did not come within {self.timeout:g} seconds: has its process "
                "ended? What was computed from an exchange since then is wrong. Make a new "
                "Communicator on every rank"
            )
