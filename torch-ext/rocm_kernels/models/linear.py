"""``FP8Linear``, the linear that quantisation puts in place, and ``FP8LinearPart``, a part of a
joined one."""

import copy
from typing import Any, Callable, Dict, NamedTuple, Optional, Union

import torch
from torch import nn

from ..functional import SCALE_BLOCK
from ..functional.fp8 import E8M0, is_ue8m0
from ..reference import dequantize
from .edits import Edited
from .hooks import is_offloaded, move_accelerate_hook
from .offload import Offloadable
from .state import fp8_tensors, in_dialect, load_linear, save_linear, unset


class Projected(NamedTuple):
    """What a fused projection made of an input ``[..., K]``, in that input's place.

    A decoder layer that has norm and projection in one go hands it to the attention or the MLP. It
    is a type of its own because widths do not tell ``[..., N]`` from ``[..., K]``: they may be
    equal. It has what an attention asks its input for before the parts of the projection get it.
    """

    result: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.result.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.result.dtype

    @property
    def device(self) -> torch.device:
        return self.result.device

    def size(self, dim: Optional[int] = None) -> Union[int, torch.Size]:
        return self.shape if dim is None else self.shape[dim]


class Quantized(NamedTuple):
    """A linear's input that is quantised already, in that input's place: so the linear is called as
    a module, with whatever is hooked to it."""

    q: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype  # of the result


class FP8Linear(Offloadable, Edited, nn.Linear):
    """Linear layer with an FP8 weight ``[N, K]``.

    The attributes are those of transformers' finegrained ``FP8Linear``: ``weight``,
    ``weight_scale_inv`` (float32; despite the name it dequantises), ``bias``, ``activation_scheme``
    and ``activation_scale``; two more say how the input's scales are computed: a bound, as FBGEMM
    has it, and powers of two, as DeepSeek-V3.1 has them.

    This class's forward is the reference: plain torch, with a gradient for the input, no
    quantisation of the input. ``kernelize`` puts the kernels in its place. Given a
    :class:`Projected`, which is its own result already, it returns that.

    Args:
        weight: FP8, ``[N, K]``.
        weight_scale_inv: ``[1]``, ``[N, 1]``, or ``[ceil(N / 128), ceil(K / 128)]`` for blocks.
        bias: ``[N]``.
        activation_scheme: how kernels take the input: ``"dynamic"``, quantised per token (per 128
            columns where the weight has blocks); ``"static"``, quantised with
            ``activation_scale [1]``; or ``"none"``, as it is.
        scale_ub: largest magnitude that a computed scale covers.
        scale_fmt: ``"ue8m0"``: computed scales are powers of two. With ``"dynamic"`` alone.
        process_group: of tensor parallelism, where K is divided: results are summed over it.
    """

    kernel_layer_name = "FP8Linear"
    kernel_condition = staticmethod(move_accelerate_hook)
    joins = ()  # names of its FP8LinearParts, beside it, which stand for it in a state dict
    is_shard = False  # one process's, of tensor parallelism
    sums: Optional[Any] = None  # a Sums of its process_group; None: torch.distributed adds
    leaves_sum = False  # for a moment: whoever calls it sums its result, and it has no bias
    stored_as: Optional[Any] = None  # its Layout, if quantize_model_ has not seen it since loading

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
        activation_scheme: str = "dynamic",
        *,
        activation_scale: Optional[torch.Tensor] = None,
        scale_ub: Optional[float] = None,
        scale_fmt: Optional[str] = None,
        process_group: Optional[Any] = None,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.activation_scheme = activation_scheme
        self.scale_ub = scale_ub
        self.scale_fmt = checked_scale_fmt(scale_fmt, activation_scheme)
        self.process_group = process_group
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight_scale_inv, requires_grad=False)
        if activation_scale is not None:
            activation_scale = nn.Parameter(activation_scale, requires_grad=False)
        self.register_parameter("activation_scale", activation_scale)
        self.register_parameter("bias", bias)
        self.eval()  # what it replaces says otherwise

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result
        return _reference_linear(input, self)

    def extra_repr(self) -> str:
        return _extra_repr(self)

    def convert_dialect(self, fp8_dtype: Optional[torch.dtype] = None) -> None:
        """Has the weight, and what scales it, in a dialect of FP8; None: in the device's."""
        for name, tensor in in_dialect(fp8_tensors(self), fp8_dtype).items():
            self._parameters[name].data = tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Keeps the FP8 bits and float32 scales through ``model.half()`` and the like, and gives
        them the dialect of the device that they move to."""
        kept = fp8_tensors(self)
        super()._apply(fn, recurse)
        old, device = kept["weight"].device, self.weight.device
        if device != old and old.type == "meta":  # to_empty: there is nothing to move
            kept = {name: unset(was, device) for name, was in kept.items()}
        elif device != old:
            kept = {name: was.to(device) for name, was in kept.items()}
        for name, tensor in kept.items():
            self._parameters[name].data = tensor
        if device != old and "meta" not in (device.type, old.type):
            self.convert_dialect()
        return self

    def _save_to_state_dict(self, destination: Dict, prefix: str, keep_vars: bool) -> None:
        if not self.joins:
            save_linear(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Dict, prefix: str, *rest: Any) -> None:
        if not self.joins:
            load_linear(self, state_dict, prefix, *rest)


class FP8LinearPart(Offloadable, Edited, nn.Linear):
    """Output channels ``start`` to ``stop`` of a fused :class:`FP8Linear`.

    Takes the fused projection's input ``[..., K]``; or, of its result, the :class:`Projected`, of
    which it returns its columns. In a state dict it is a linear of its own, so fusing does not show
    there.
    """

    kernel_layer_name = "FP8LinearPart"
    kernel_condition = staticmethod(move_accelerate_hook)

    def __init__(self, fused: FP8Linear, start: int, stop: int) -> None:
        nn.Module.__init__(self)
        # In a tuple: the fused module is registered with the parent, not once more with each part.
        self._fused = (fused,)
        self.start, self.stop = start, stop
        self.in_features, self.out_features = fused.in_features, stop - start
        self.eval()

    @property
    def fused(self) -> FP8Linear:
        return self._fused[0]

    @property
    def weight(self) -> torch.Tensor:
        return self.fused.weight[self.start : self.stop]

    @weight.setter
    def weight(self, weight: torch.Tensor) -> None:
        if weight.dtype != self.weight.dtype:  # a cast would leave its scale out
            raise ValueError(f"weight must be {self.weight.dtype}, got {weight.dtype}")
        with torch.no_grad():  # peft hands a layer that it lets go what it has already
            self.weight.copy_(weight)

    @property
    def weight_scale_inv(self) -> torch.Tensor:
        scale = self.fused.weight_scale_inv
        if scale.numel() == 1:
            return scale
        rows = SCALE_BLOCK if scale.shape[1] > 1 else 1
        return scale[self.start // rows : -(-self.stop // rows)]

    @property
    def bias(self) -> Optional[torch.Tensor]:
        bias = self.fused.bias
        return None if bias is None else bias[self.start : self.stop]

    @bias.setter
    def bias(self, bias: Optional[torch.Tensor]) -> None:
        if bias is not None:
            with torch.no_grad():
                self.bias.copy_(bias)

    @property
    def activation_scheme(self) -> str:
        return self.fused.activation_scheme

    @property
    def activation_scale(self) -> Optional[torch.Tensor]:
        return self.fused.activation_scale

    @property
    def scale_ub(self) -> Optional[float]:
        return self.fused.scale_ub

    @property
    def scale_fmt(self) -> Optional[str]:
        return self.fused.scale_fmt

    @property
    def process_group(self) -> Optional[Any]:
        return self.fused.process_group

    @property
    def sums(self) -> Optional[Any]:
        return self.fused.sums

    @property
    def leaves_sum(self) -> bool:
        return self.fused.leaves_sum

    @property
    def is_shard(self) -> bool:
        return self.fused.is_shard

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result[..., self.start : self.stop]
        if is_offloaded(self.fused):  # it alone brings its weight
            return self.fused(input)[..., self.start : self.stop]
        return _reference_linear(input, self)

    def extra_repr(self) -> str:
        return _extra_repr(self)

    def _save_to_state_dict(self, destination: Dict, prefix: str, keep_vars: bool) -> None:
        save_linear(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Dict, prefix: str, *rest: Any) -> None:
        load_linear(self, state_dict, prefix, *rest)


def checked_scale_fmt(scale_fmt: Optional[str], activation_scheme: str) -> Optional[str]:
    """``scale_fmt`` itself, if inputs of that scheme can have such scales."""
    if scale_fmt is None:
        return None
    if is_ue8m0(scale_fmt, None) and activation_scheme != "dynamic":
        raise ValueError(
            f"scale_fmt is for scales that are computed, with activation_scheme 'dynamic', got "
            f"{scale_fmt!r} and {activation_scheme!r}"
        )
    return scale_fmt


def scale_fmt_of(module: nn.Module, scale: str = "weight_scale_inv") -> Optional[str]:
    """The ``scale_fmt`` of the scales that are computed for a module's input. transformers' own
    linears and experts keep a checkpoint's ``scale_fmt``, which is of both, as the dtype of the
    weight's ``scale`` alone."""
    if getattr(module, scale).dtype is E8M0:
        return "ue8m0"
    return getattr(module, "scale_fmt", None)


def computes_linear(module: nn.Module) -> bool:
    """Whether a 16-bit module is an ``nn.Linear``, or a subclass whose own forward computes the
    same: asked of it, with numbers, small and large."""
    if type(module) is nn.Linear:
        return True
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or set(module._parameters) != {"weight", "bias"}:
        return False
    if weight is None or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    exactly = {"dtype": torch.float32, "device": "cpu"}
    probe = copy.copy(module)
    probe._parameters = {"weight": torch.linspace(-1, 2, 12, **exactly).view(4, 3)}
    probe._parameters["bias"] = None if module.bias is None else torch.arange(4, **exactly)
    x = torch.linspace(-2, 3, 6, **exactly).view(2, 3) * torch.tensor([[1], [1e4]], **exactly)
    expected = nn.functional.linear(x, probe._parameters["weight"], probe._parameters["bias"])
    try:
        with torch.no_grad():
            computed = type(module).forward(probe, x)
    except Exception:  # it takes something else: the report names it
        return False
    return isinstance(computed, torch.Tensor) and torch.allclose(computed, expected, rtol=1e-5)


def _reference_linear(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    if isinstance(x, Quantized):
        x = dequantize(x.q, x.scale, 1).to(x.dtype)
    weight = dequantize(linear.weight, linear.weight_scale_inv, SCALE_BLOCK).to(x.dtype)
    return finished(nn.functional.linear(x, weight, inner_bias(linear)), linear)


def inner_bias(linear: nn.Module) -> Optional[torch.Tensor]:
    """The bias that a product adds: none where results are summed over processes first."""
    return linear.bias if linear.process_group is None else None


def finished(product: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """A product summed over the processes that have a share of K, and the bias added once."""
    if linear.process_group is None or linear.leaves_sum:
        return product
    product = summed(product, linear)
    return product if linear.bias is None else product + linear.bias


def summed(part: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """The sum of what the processes that divide a module have of its result."""
    if module.process_group is None:
        return part
    if module.sums is not None:
        return module.sums.add(part)
    torch.distributed.all_reduce(part, group=module.process_group)
    return part


def _extra_repr(linear: nn.Module) -> str:
    return (
        f"in_features={linear.in_features}, out_features={linear.out_features}, "
        f"bias={linear.bias is not None}, dtype={linear.weight.dtype}, "
        f"activation_scheme={linear.activation_scheme!r}"
        + (f", scale_fmt={linear.scale_fmt!r}" if linear.scale_fmt is not None else "")
    )
