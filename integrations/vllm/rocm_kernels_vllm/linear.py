"""Adds this package's FP8 linears to vLLM's three lists of linear kernels: first in each, and once
more behind all others, for GPUs where the package has plain kernels alone and vLLM may have none.

The classes quantise nothing themselves: vLLM's ``QuantFP8`` does, so that its passes still see a
quantisation to fuse with the norm before it, and an activation that comes quantised goes straight
into the product.
"""

import torch
import vllm.envs as envs
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.kernels.linear import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.fusion.quant_activation import (
    as_quantized_activation,
    expose_input_quant_key,
)
from vllm.platforms import current_platform

from . import devices, kernels, ops
from .parts import HookMoved

BLOCK = (128, 128)


def fp8_linear() -> bool:
    return _offer("_POSSIBLE_FP8_KERNELS", RocmKernelsFP8Linear, PlainFP8Linear)


def fp8_block_linear() -> bool:
    return _offer("_POSSIBLE_FP8_BLOCK_KERNELS", RocmKernelsFP8BlockLinear, PlainFP8BlockLinear)


def weight_only() -> bool:
    return _offer("_POSSIBLE_WFP8A16_KERNELS", RocmKernelsWeightOnlyLinear, PlainWeightOnlyLinear)


def _offer(table: str, first: type, last: type) -> bool:
    """Puts a class first and another last among a platform's candidates, of which vLLM takes the
    first that can do it. Calling it again changes nothing."""
    platforms = getattr(vllm_linear, table)
    candidates = platforms.get(current_platform._enum)
    if candidates is None:
        raise HookMoved(f"{table} has no list for {current_platform._enum}")
    ours = (first.__name__, last.__name__)
    candidates[:] = [first, *(c for c in candidates if c.__name__ not in ours), last]
    return True


def _is_supported(part: str, plain: bool = False):
    """plain: as the last resort."""
    if envs.VLLM_BATCH_INVARIANT:
        return False, "computes a row in an order that depends on how many there are"
    if reason := kernels.why_not():
        return False, f"has no kernels here ({reason})"
    here = devices.here()
    if plain and devices.is_plain(part, here):
        return True, None
    if reason := devices.why_off(part, here):
        return False, f"is off here ({reason})"
    return True, None


def _expose_input_quant_key(layer: torch.nn.Module, kernel) -> None:
    """Says what a fused activation may hand to the layer. Not where a checkpoint bounds its scales,
    as FBGEMM's do: a fused activation knows no bound, and vLLM's QuantFP8 does."""
    if getattr(layer, "input_scale_ub", None) is None:
        expose_input_quant_key(layer, kernel)


class RocmKernelsFP8Linear(FP8ScaledMMLinearKernel):
    """Weights with one scale or one a channel; activations with one or one a token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None):
        return _is_supported("fp8_linear")

    @classmethod
    def can_implement(cls, c):
        shapes = [key.scale.group_shape for key in (c.activation_quant_key, c.weight_quant_key)]
        if any(shape.is_per_group() for shape in shapes):
            return False, f"takes scales per tensor, token and channel, got {shapes}"
        return True, None

    def input_quant_key(self):
        return self.config.activation_quant_key

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _expose_input_quant_key(layer, self)  # the method of `fp8` checkpoints does not

    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
        # B is a transposed view of the weight as it was loaded. Scales of an activation that came
        # quantised have its dimensions, three in Pixtral's vision; A has two.
        As = As.reshape(-1, As.shape[-1]) if As.dim() > 2 else As
        return ops.fp8_product(A, B.t(), As, Bs, bias, out_dtype).view(*output_shape)


class RocmKernelsFP8BlockLinear(Fp8BlockScaledMMLinearKernel):
    """Weights with 128 x 128 blocks; activations with a scale for each 128 columns."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None):
        return _is_supported("fp8_block_linear")

    @classmethod
    def can_implement(cls, config):
        able, reason = super().can_implement(config)
        weight = config.weight_quant_key.scale.group_shape
        group = config.activation_quant_key.scale.group_shape
        if able and ((weight.row, weight.col) != BLOCK or (group.row, group.col) != (1, 128)):
            able, reason = False, f"takes 128 x 128 blocks and 1 x 128 groups, got {weight, group}"
        return able, reason

    def input_quant_key(self):
        return self.config.activation_quant_key

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        _expose_input_quant_key(layer, self)

    def apply_weights(self, layer, x, bias=None, **kwargs):
        quantized = as_quantized_activation(x, self.input_quant_key())
        if quantized is None:
            return super().apply_weights(layer, x, bias, **kwargs)
        params = self._get_layer_params(layer)
        shape = (*quantized.orig_shape[:-1], params.weight.shape[0])
        data, scale = quantized.data, quantized.scale
        out = ops.fp8_product(
            data.reshape(-1, data.shape[-1]), params.weight, scale.reshape(-1, scale.shape[-1]),
            params.block_scale, bias, self.config.out_dtype,
        )  # fmt: skip
        return out.view(*shape)

    def apply_block_scaled_mm(self, A, B, As, Bs):
        return ops.fp8_product(A, B, As, Bs, None, self.config.out_dtype)


class RocmKernelsWeightOnlyLinear(FP8ScaledMMLinearKernel):
    """FP8 weights with one scale, one a channel or 128 x 128 blocks; 16-bit activations."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None):
        return _is_supported("weight_only")

    @classmethod
    def can_implement(cls, c):
        shape = c.weight_quant_key.scale.group_shape
        if shape.is_per_group() and (shape.row, shape.col) != BLOCK:
            return False, f"takes blocks of 128 x 128, got {shape}"
        if c.input_dtype not in (torch.float16, torch.bfloat16):
            return False, f"takes float16 and bfloat16 activations, got {c.input_dtype}"
        return True, None

    def __init__(self, c, layer_param_names) -> None:
        super().__init__(c, layer_param_names)
        self.blocks = c.weight_quant_key.scale.group_shape.is_per_group()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights come as [N, K] blocks or [K, N]; the kernels of the device want its dialect."""
        weight = layer.weight if self.blocks else layer.weight.t()
        name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
        weight, scale = kernels.package().to_native_fp8(weight.data, getattr(layer, name).data)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        setattr(layer, name, torch.nn.Parameter(scale, requires_grad=False))
        layer.rocm_kernels_scale = name

    def apply_weights(self, layer, x, bias=None):
        scale = getattr(layer, layer.rocm_kernels_scale)
        rows = x.reshape(-1, x.shape[-1])
        out = ops.weight_only_product(rows, layer.weight, scale, bias)
        return out.view(*x.shape[:-1], layer.weight.shape[0])

    def apply_scaled_mm(self, **_):
        raise NotImplementedError("a weight-only linear has no quantised activations to multiply")


class PlainFP8Linear(RocmKernelsFP8Linear):
    @classmethod
    def is_supported(cls, compute_capability: int | None = None):
        return _is_supported("fp8_linear", plain=True)


class PlainFP8BlockLinear(RocmKernelsFP8BlockLinear):
    @classmethod
    def is_supported(cls, compute_capability: int | None = None):
        return _is_supported("fp8_block_linear", plain=True)


class PlainWeightOnlyLinear(RocmKernelsWeightOnlyLinear):
    @classmethod
    def is_supported(cls, compute_capability: int | None = None):
        return _is_supported("weight_only", plain=True)
