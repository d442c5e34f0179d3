"""Linears of FP8 checkpoints, as transformers and its helpers load them: read, to become ours."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Union

import torch
from torch import nn

from ..functional import FP8_DTYPES, SCALE_BLOCK
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
    """

    weight: torch.Tensor
    scale: torch.Tensor
    scheme: str = "dynamic"
    static: Optional[torch.Tensor] = None
    scale_ub: Optional[float] = None
    scale_fmt: Optional[str] = None


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
    except Unreadable as reason:
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
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None or (_text(weights.type), weights.num_bits) != ("float", 8):
        raise Unreadable("is compressed-tensors, not FP8")
    if scheme.output_activations is not None:
        raise Unreadable("quantises its output")
    strategy, block = _text(weights.strategy), weights.block_structure
    if strategy not in ("tensor", "channel", "block") or not weights.symmetric:
        raise Unreadable(f"has weight scales by {strategy}")
    if strategy == "block" and list(block) != [SCALE_BLOCK, SCALE_BLOCK]:
        raise Unreadable(f"has scale blocks of {tuple(block)}, not {(SCALE_BLOCK, SCALE_BLOCK)}")
    rest: Dict[str, Any] = {}
    if inputs is None:
        rest["scheme"] = "none"
    elif (_text(inputs.type), inputs.num_bits) != ("float", 8):
        raise Unreadable(f"quantises its input to {inputs.num_bits} bits, {_text(inputs.type)}")
    elif not inputs.dynamic:
        rest = _static(module.input_scale)
    elif (_text(inputs.strategy), inputs.group_size) not in _DYNAMIC[strategy == "block"]:
        raise Unreadable(f"takes its input's scale by {_text(inputs.strategy)}")
    return _stored(module.weight, module.weight_scale, strategy == "block", **rest)


# How inputs may be quantised on the fly: without blocks of the weight, and with them.
_DYNAMIC = ((("token", None),), (("group", SCALE_BLOCK),))


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
        raise Unreadable("quantises its input on the fly, as no published Quark checkpoint does")
    return _stored(module.weight, module.weight_quantizer.scale, **rest)


def _torchao(module: nn.Module) -> Stored:
    weight = module.weight
    block, (n, k) = tuple(weight.block_size), tuple(weight.shape)
    blocks = block == (SCALE_BLOCK, SCALE_BLOCK)
    if not blocks and block not in ((1, k), (n, k)):
        raise Unreadable(f"has scale blocks of {block}")
    inputs = weight.act_quant_kwargs
    scheme = "none" if inputs is None else "dynamic"  # one scale a tensor: one a token is finer
    bound = None if inputs is None else inputs.hp_value_ub
    return _stored(weight.qdata, weight.scale, blocks, scheme=scheme, scale_ub=bound)


_READERS: Dict[str, Callable[[nn.Module], Stored]] = {
    "FP8Linear": _finegrained,
    "FbgemmFp8Linear": _fbgemm,
    "CompressedTensorsFP8Linear": _compressed_tensors_kernel,
    "QParamsLinear": _quark,
}
