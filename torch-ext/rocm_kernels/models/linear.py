"""The linears that quantisation puts in place: whole ones, and parts of fused ones."""

from typing import Callable, NamedTuple, Optional

import torch
from torch import nn

from ..functional import SCALE_BLOCK, to_native_fp8
from ..reference import dequantize


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


class FP8Linear(nn.Module):
    """Linear layer with an FP8 weight ``[N, K]`` and one scale for each output channel.

    The attributes are those of transformers' finegrained ``FP8Linear``, with blocks of 1 x K:
    ``weight``, ``weight_scale_inv [N, 1]`` (float32; despite the name it dequantises),
    ``block_size``, ``activation_scheme`` and ``activation_scale`` (None). ``activation_scheme`` is
    ``"dynamic"``: the input is quantised per token; or ``"none"``: it is used as it is.

    This class's forward is the reference: plain torch, with a gradient for the input, no
    quantisation of the input. ``kernelize`` puts the kernels in its place. Given a
    :class:`Projected`, which is its own result already, it returns that.
    """

    kernel_layer_name = "FP8Linear"

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
        activation_scheme: str = "dynamic",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.block_size = (1, self.in_features)
        self.activation_scheme = activation_scheme
        self.activation_scale = None
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight_scale_inv, requires_grad=False)
        self.bias = bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result
        return _reference_linear(input, self)

    def extra_repr(self) -> str:
        return _extra_repr(self)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Keeps the FP8 bits and float32 scales through ``model.half()`` and the like, and gives
        them the dialect of the device that they move to."""
        weight, scale = self.weight.data, self.weight_scale_inv.data
        super()._apply(fn, recurse)
        if self.weight.device != weight.device:
            weight, scale = weight.to(self.weight.device), scale.to(self.weight.device)
            if weight.device.type != "meta":
                weight, scale = to_native_fp8(weight, scale)
        self.weight.data, self.weight_scale_inv.data = weight, scale
        return self


class FP8LinearPart(nn.Module):
    """Output channels ``start`` to ``stop`` of a fused :class:`FP8Linear`.

    Takes the fused projection's input ``[..., K]``; or, of its result, the :class:`Projected`, of
    which it returns its columns.
    """

    kernel_layer_name = "FP8LinearPart"

    def __init__(self, fused: FP8Linear, start: int, stop: int) -> None:
        super().__init__()
        # In a tuple: the fused module is registered with the parent, not once more with each part.
        self._fused = (fused,)
        self.start, self.stop = start, stop
        self.in_features, self.out_features = fused.in_features, stop - start

    @property
    def fused(self) -> FP8Linear:
        return self._fused[0]

    @property
    def weight(self) -> torch.Tensor:
        return self.fused.weight[self.start : self.stop]

    @property
    def weight_scale_inv(self) -> torch.Tensor:
        return self.fused.weight_scale_inv[self.start : self.stop]

    @property
    def bias(self) -> Optional[torch.Tensor]:
        bias = self.fused.bias
        return None if bias is None else bias[self.start : self.stop]

    @property
    def activation_scheme(self) -> str:
        return self.fused.activation_scheme

    @property
    def activation_scale(self) -> None:
        return None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Projected):
            return input.result[..., self.start : self.stop]
        return _reference_linear(input, self)

    def extra_repr(self) -> str:
        return _extra_repr(self)


def _reference_linear(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    weight = dequantize(linear.weight, linear.weight_scale_inv, SCALE_BLOCK).to(x.dtype)
    return nn.functional.linear(x, weight, linear.bias)


def _extra_repr(linear: nn.Module) -> str:
    return (
        f"in_features={linear.in_features}, out_features={linear.out_features}, "
        f"bias={linear.bias is not None}, dtype={linear.weight.dtype}, "
        f"activation_scheme={linear.activation_scheme!r}"
    )
