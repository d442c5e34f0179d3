"""Linears of FP8 checkpoints, as transformers and its helpers load them: read, to become ours."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Union

import torch
from torch import nn

from ..functional import FP8_DTYPES, SCALE_BLOCK
from .formats import BLOCK
from .formats.compressed_tensors import layout_of_scheme
from .formats.layout import ONE_A_TENSOR, Unknown
from .linear import scale_fmt_of


@dataclass(frozen=True)
class Stored:
    """An FP8 linear of a checkpoint.

    Attributes:
        weight: FP8, ``[N, K]``.
        scale: of the weight, float32, as ``FP8Linear`` takes it.
        scheme: of the activations: ``"dynamic"``, ``"static"`` or ``"none"``.
        static: ``[1]``, the activations' scale.
        scale_ub: largest magnitude that a computed scale of the activations covers.
        scale_fmt: of computed scales of the activations, as ``FP8Linear`` takes it.
        instead: what is done here instead of what the checkpoint says.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    scheme: str = "dynamic"
    static: Optional[torch.Tensor] = None
    scale_ub: Optional[float] = None
    scale_fmt: Optional[str] = None
    instead: Optional[str] = None


class Unreadable(Exception):
    """Why a linear cannot be adopted."""


def read_stored(module: nn.Module) -> Union[Stored, str, None]:
    """What a checkpoint's FP8 linear holds; why it cannot be read; or None, if it is no such
    linear."""
    reader = _READERS.get(type(module).__name__)
    if type(module) is nn.Linear:
        if hasattr(module, "quantization_scheme"):
            reader = _compressed_tensors
        elif type(module.weight).__name__ == "Float8Tensor":
            reader = _torchao
    if reader is None:
        return None
    try:
        return reader(module)
    except (Unknown, Unreadable) as reason:
        return str(reason)


def weight_scale(scale: torch.Tensor, n: int, k: int, blocks: bool = False) -> torch.Tensor:
    """A weight's scale of any shape that means one value, one a row or one a block, as
    ``FP8Linear`` takes it."""
    scale = scale.detach().float()
    rows, columns = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    if blocks and scale.shape == (rows, columns):
        if columns > 1:
            return scale.contiguous()
        return scale.repeat_interleave(SCALE_BLOCK, 0)[:n].contiguous()
    if scale.numel() == 1:
        return scale.reshape(1)
    if not blocks and scale.numel() == n:
        return scale.reshape(n, 1).contiguous()
    raise Unreadable(
        f"has scales of shape {tuple(scale.shape)} for a weight of {(n, k)}: one, one a row, or "
        f"one for {SCALE_BLOCK} x {SCALE_BLOCK} are known"
    )


def _stored(weight: torch.Tensor, scale: torch.Tensor, blocks: bool = False, **rest: Any) -> Stored:
    if weight.dtype not in FP8_DTYPES:
        raise Unreadable(f"weight is {weight.dtype}")
    return Stored(weight.detach(), weight_scale(scale, *weight.shape, blocks), **rest)


def _static(scale: torch.Tensor) -> Dict[str, Any]:
    if scale.numel() != 1:
        raise Unreadable(f"has a static scale of shape {tuple(scale.shape)} for its input")
    return {"scheme": "static", "static": scale.detach().float().reshape(1)}


def _finegrained(module: nn.Module) -> Stored:
    blocks = module.block_size
    if blocks is not None and tuple(blocks) != (SCALE_BLOCK, SCALE_BLOCK):
        raise Unreadable(f"has scale blocks of {tuple(blocks)}, not {(SCALE_BLOCK, SCALE_BLOCK)}")
    if module.activation_scale is not None:
        inputs = _static(module.activation_scale)
    else:
        inputs = {"scale_fmt": scale_fmt_of(module)}
    return _stored(module.weight, module.weight_scale_inv, blocks is not None, **inputs)


def _fbgemm(module: nn.Module) -> Stored:
    return _stored(module.weight, module.weight_scale, scale_ub=float(module.input_scale_ub))


def _compressed_tensors_kernel(module: nn.Module) -> Stored:
    return _stored(module.weight, module.weight_scale)  # its own forward is dynamic, too


def _compressed_tensors(module: nn.Module) -> Stored:
    scheme = module.quantization_scheme
    if scheme.output_activations is not None:
        raise Unreadable("quantises its output")
    if scheme.weights is None:
        raise Unreadable("is compressed-tensors, and its weight is not quantised")
    weights, inputs = (_fields(said) for said in (scheme.weights, scheme.input_activations))
    layout = layout_of_scheme(weights, inputs)
    if layout.block != BLOCK:
        raise Unreadable(f"has scale blocks of {layout.block}, not {BLOCK}")
    rest: Dict[str, Any] = {"scheme": layout.inputs, "instead": layout.instead}
    if layout.inputs == "static":
        rest = _static(module.input_scale)
    return _stored(module.weight, module.weight_scale, layout.weights == "block", **rest)


def _fields(said: Any) -> Optional[Dict[str, Any]]:
    """As they stand in a config."""
    if said is None:
        return None
    block = said.block_structure
    return {
        "type": _text(said.type),
        "num_bits": said.num_bits,
        "symmetric": said.symmetric,
        "strategy": None if said.strategy is None else _text(said.strategy),
        "dynamic": said.dynamic,
        "group_size": said.group_size,
        "block_structure": None if block is None else [*block],
    }


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _quark(module: nn.Module) -> Stored:
    # An output_quantizer is that of keys and values: a cache's business, here they are as computed.
    inputs = module.input_quantizer
    if module.weight_quantizer is None:
        raise Unreadable("has no quantised weight")
    if inputs is None:
        rest: Dict[str, Any] = {"scheme": "none"}
    elif not inputs.qspec.is_dynamic:
        rest = _static(inputs.scale)
    else:
        per_tensor = _text(inputs.qspec.qscheme).endswith("per_tensor")
        rest = {"scheme": "dynamic", "instead": ONE_A_TENSOR if per_tensor else None}
    return _stored(module.weight, module.weight_quantizer.scale, **rest)


def _torchao(module: nn.Module) -> Stored:
    weight = module.weight
    block, (n, k) = tuple(weight.block_size), tuple(weight.shape)
    blocks = block == (SCALE_BLOCK, SCALE_BLOCK)
    if not blocks and block not in ((1, k), (n, k)):
        raise Unreadable(f"has scale blocks of {block}")
    inputs = weight.act_quant_kwargs
    if inputs is None:
        return _stored(weight.qdata, weight.scale, blocks, scheme="none")
    per_tensor = type(inputs.granularity).__name__ == "PerTensor"
    rest = {"scale_ub": inputs.hp_value_ub, "instead": ONE_A_TENSOR if per_tensor else None}
    return _stored(weight.qdata, weight.scale, blocks, **rest)


_READERS: Dict[str, Callable[[nn.Module], Stored]] = {
    "FP8Linear": _finegrained,
    "FbgemmFp8Linear": _fbgemm,
    "CompressedTensorsFP8Linear": _compressed_tensors_kernel,
    "QParamsLinear": _quark,
}
