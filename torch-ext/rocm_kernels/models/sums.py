"""Sums of tensor parallelism through a ``Communicator``, whose kernels are made for the few rows of
a decode step.

    model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")
    rocm_kernels.models.quantize_model_(model)
    kernelize(model, mode=Mode.INFERENCE)
    rocm_kernels.models.use_communicator(model)               # on every process
    print(rocm_kernels.models.communicated_sums(model))       # what was summed how

A linear whose K is divided among processes has a part of each of its results, and so have experts
of which each process has a part. ``quantize_model_`` leaves their process group with them; here
they get a ``Sums`` of that group besides.
"""

from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..comm import Communicator
from ..functional import quantize_fp8
from .experts import Experts
from .linear import FP8Linear
from .tensor_parallel import others_that_exchange

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CommunicatedSums(NamedTuple):
    """What :func:`use_communicator` has done with a model's sums so far."""

    linears: Dict[str, int]  # and experts: over how many processes a Communicator sums each
    summed: int  # by a Communicator; what a compiled or recorded graph sums is not counted
    passed_on: Dict[str, int]  # sums by torch.distributed, by the reason
    others: Dict[str, str]  # modules that exchange by themselves, through torch.distributed


def use_communicator(
    model: nn.Module,
    *,
    whole_row_scales: bool = False,
    max_bytes: int = 1 << 23,
    timeout: float = 300.0,
) -> None:
    """Has the FP8 linears and experts of a model that is divided among processes
    (``tp_plan="auto"``) sum their results through :class:`rocm_kernels.comm.Communicator`.

    Call it on every process, after ``quantize_model_``, before or after ``kernelize``, and before
    ``torch.compile``. With two processes results have the same bits as without it; with more they
    differ by the rounding of a sum, which is now in the order of the processes.

    Args:
        whole_row_scales: inputs of what divides K are quantised with the scale of their whole row,
            as one process would, not of each process's share: one exchange more a product.
        max_bytes: of the largest result that a Communicator sums; those of long prompts that are
            larger go through torch.distributed as before.
        timeout: seconds until a process that does not come is an error.

    Raises:
        ValueError: the model has no such linear, or too many processes have a part of one. The
            model is as it was.
        RuntimeError: the processes have no memory that all of them reach. Likewise.
    """
    linears = _divided(model)
    if not linears:
        raise ValueError(
            f"model must have FP8 linears whose K is divided among processes, and this "
            f'{type(model).__name__} has none: load it with tp_plan="auto" and call '
            "quantize_model_ first"
        )
    devices = {_weight(linear).device for linear in linears.values()}
    if len(devices) > 1:
        raise ValueError(
            "a process must have its share on one device, got "
            + ", ".join(sorted(map(str, devices)))
        )
    if whole_row_scales:
        _require_row_scales(linears)
    groups: List[Any] = []
    for linear in linears.values():
        if all(linear.process_group is not group for group in groups):
            groups.append(linear.process_group)
    device = devices.pop()
    made = [Sums(group, whole_row_scales, max_bytes, device, timeout) for group in groups]
    for linear in linears.values():
        linear.sums = next(sums for sums in made if sums.group is linear.process_group)


def stop_communicator(model: nn.Module) -> None:
    """Takes back what :func:`use_communicator` has done. The memory goes when no recorded step
    reads it any more."""
    for linear in _divided(model).values():
        linear.sums = None


def communicated_sums(model: nn.Module) -> CommunicatedSums:
    """How a model's results are summed, and what became of its sums since
    :func:`use_communicator`."""
    linears = {n: m for n, m in _divided(model).items() if m.sums is not None}
    if not linears:
        raise ValueError(f"use_communicator was not called with this {type(model).__name__}")
    every: List[Sums] = []
    for linear in linears.values():
        if linear.sums not in every:
            every.append(linear.sums)
    passed_on: Counter = Counter()
    for sums in every:
        passed_on.update(sums.passed_on)
    return CommunicatedSums(
        {name: linear.sums.communicator.ranks for name, linear in linears.items()},
        sum(sums.summed for sums in every),
        dict(passed_on),
        others_that_exchange(model),
    )


class Sums:
    """Sums over the processes of a group."""

    def __init__(
        self,
        group: Any,
        whole_row_scales: bool,
        max_bytes: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        self.group, self.whole_row_scales = group, whole_row_scales
        self.communicator = Communicator(group, max_bytes, device=device, timeout=timeout)
        self.summed = 0
        self.passed_on: Counter = Counter()

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the Communicator can add this x."""
        return self._why_not(x) is None

    def add_norm_quantize(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """``Communicator.all_reduce_rmsnorm_fp8``, for an x that it takes."""
        self.summed += 1
        return self.communicator.all_reduce_rmsnorm_fp8(x, *arguments, **options)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the processes' x, in x's memory if it has no gaps."""
        why = self._why_not(x)
        if not torch.compiler.is_compiling():
            if why is None:
                self.summed += 1
            else:
                self.passed_on[why] += 1
        if why is not None:
            torch.distributed.all_reduce(x, group=self.group)
            return x
        return self.communicator.all_reduce(x, out=x if x.is_contiguous() else None)

    def quantize(self, x: torch.Tensor, **options: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """``quantize_fp8`` of this process's columns of rows ``[M, K]``, with the whole rows'
        scales."""
        largest = x.abs().amax(-1, keepdim=True)
        if self.takes(largest):
            every = self.communicator.all_gather(largest)
            largest = every.view(self.communicator.ranks, *largest.shape).amax(0)
        else:
            maximum = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(largest, maximum, group=self.group)
        q, scale = quantize_fp8(torch.cat([x, largest], -1), **options)
        return q[:, :-1].contiguous(), scale

    def _why_not(self, x: torch.Tensor) -> Optional[str]:
        """Why the Communicator cannot add them, the same on all processes; None: it can."""
        if x.requires_grad:
            return "a gradient is wanted"
        if x.dtype not in _DTYPES:
            return f"{x.dtype}"
        if x.numel() * x.element_size() > self.communicator.max_bytes:
            return f"more than {self.communicator.max_bytes} bytes"
        return None


def _require_row_scales(linears: Dict[str, nn.Module]) -> None:
    for name, linear in linears.items():
        if isinstance(linear, Experts):
            if linear.activation_scheme == "dynamic":
                raise ValueError(
                    f"whole_row_scales needs experts whose inputs stay in 16 bits, and {name} "
                    "quantise what is between their products: call quantize_model_ with "
                    f'activations="none", or skip=[{name!r}]'
                )
            continue
        scale = linear.weight_scale_inv
        if linear.activation_scheme == "dynamic" and scale.dim() == 2 and scale.shape[1] > 1:
            raise ValueError(
                f"whole_row_scales needs linears whose inputs have one scale a row, and those of "
                f"{name} have one for 128 columns"
            )


def _divided(model: nn.Module) -> Dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (FP8Linear, Experts)) and module.process_group is not None
    }


def _weight(module: nn.Module) -> torch.Tensor:
    return module.down_proj if isinstance(module, Experts) else module.weight
