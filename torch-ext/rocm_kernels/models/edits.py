"""Lets peft merge adapters into FP8 weights, and transformers resize FP8 heads.

Both add to a weight, or copy it, as if it were 16 bits. They get a float32 linear to work on; the
FP8 linear then takes its result, with new scales of the same form.
"""

import functools
import inspect
import sys
from typing import Any, Callable, Iterator, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES, SCALE_BLOCK
from ..reference import dequantize
from .quantized_weight import quantize_weight


class Edited(nn.Module):
    """An FP8 linear that may be changed so."""

    @property
    def base_layer(self) -> Any:
        """There is none. peft asks each layer for it that it wraps, before it does anything."""
        serve_merging()
        raise AttributeError("base_layer")


def serve_merging() -> None:
    """Has peft's layers merge and unmerge through float32, if peft is there."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return
    for cls in _subclasses(peft.BaseTunerLayer):
        for name in ("merge", "unmerge"):
            method = vars(cls).get(name)
            if inspect.isfunction(method) and not hasattr(method, "is_through_float32"):
                setattr(cls, name, _through_float32(method))
        package = cls.__module__.rpartition(".")[0].rpartition(".")[2]
        init = vars(cls).get("__init__")
        if package in _READ_WEIGHTS and init and not hasattr(init, "refuses_fp8"):
            cls.__init__ = _refusing_fp8(init, package)
    dora = sys.modules.get("peft.tuners.lora.dora")
    for name in ("update_layer", "forward"):
        method = dora and vars(dora.DoraLinearLayer)[name]
        if method and not hasattr(method, "reads_float32"):
            setattr(dora.DoraLinearLayer, name, _reading_float32(method))


# Methods of peft whose layers read the weight itself and do not only add to what the linear gives:
# FP8 codes without their scales would be other weights. DoRA, of lora, is served.
_READ_WEIGHTS = {
    "delora", "frod", "hira", "hra", "ln_tuning", "osf", "peanut", "psoft", "randlora", "shadow",
    "shira", "supertuning", "tinylora", "trainable_tokens",
}  # fmt: skip


def _refusing_fp8(init: Callable[..., Any], package: str) -> Callable[..., Any]:
    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(value, Edited) for value in (*args, *kwargs.values())):
            raise TypeError(
                f"peft's {package} reads the weights of what it adapts, which must be in 16 or 32 "
                "bits, got a linear in FP8: use LoRA, DoRA, IA3 or OFT, or leave these linears out "
                "of quantize_model_ (skip=)"
            )
        init(self, *args, **kwargs)

    checked.refuses_fp8 = True
    return checked


def _reading_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(self: Any, *args: Any, base_layer: Any, **kwargs: Any) -> Any:
        if isinstance(base_layer, Edited):
            base_layer = in_float32(base_layer)
            for name in ("lora_A", "lora_B"):  # peft makes new adapters in the weight's dtype
                if getattr(kwargs[name], "dtype", None) in FP8_DTYPES:
                    kwargs[name] = kwargs[name].float()
        return method(self, *args, base_layer=base_layer, **kwargs)

    read.reads_float32 = True
    return read


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _through_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        base = self.get_base_layer()
        if not isinstance(base, Edited):
            return method(self, *args, **kwargs)
        holder = self
        while holder.base_layer is not base:
            holder = holder.base_layer
        linear = in_float32(base)
        holder.base_layer = linear
        try:
            result = method(self, *args, **kwargs)
        finally:
            holder.base_layer = base
        take(base, linear)
        return result

    change.is_through_float32 = True
    return change


def in_float32(linear: Any) -> nn.Linear:
    """What an FP8 linear computes, as 16-bit linears hold it."""
    if linear.weight.device.type == "meta":
        raise RuntimeError(
            "an FP8 weight must be on a device to be read or changed, got one that accelerate has "
            "put away: do so before it is offloaded"
        )
    if linear.is_shard:
        raise RuntimeError(
            "an FP8 weight must be whole to be read or changed, got one process's share of a "
            "tensor-parallel model: do so on one process, before it is divided"
        )
    found = nn.Linear(linear.in_features, linear.out_features, device="meta")
    weight = dequantize(linear.weight.detach(), linear.weight_scale_inv.detach(), SCALE_BLOCK)
    found.weight = nn.Parameter(weight.float(), requires_grad=False)
    bias = None if linear.bias is None else linear.bias.detach().clone()
    found.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return found


def take(linear: Any, changed: nn.Linear) -> None:
    """Gives an FP8 linear the values of one in float32, if they are others than it has."""
    weight, before = changed.weight.detach(), in_float32(linear).weight
    with torch.no_grad():
        if linear.bias is not None:
            linear.bias.copy_(changed.bias)
        if torch.equal(weight, before):
            return
        scale, owner = linear.weight_scale_inv, linear
        if scale.numel() == 1 and hasattr(linear, "fused"):  # which others have too
            owner, rows = linear.fused, slice(linear.start, linear.stop)
            whole = in_float32(owner).weight.detach()
            whole[rows] = weight
            weight = whole
        q, scale = quantized_like(weight, owner)
        owner.weight.copy_(q)
        owner.weight_scale_inv.copy_(scale)


def quantized_like(weight: torch.Tensor, linear: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """``weight [N, K]`` in FP8, with scales in the form of those that an FP8 linear has."""
    scale, fp8_dtype = linear.weight_scale_inv, linear.weight.dtype
    n, k = weight.shape
    if scale.numel() == 1:  # the greatest of the rows'; one row of all would keep one core busy
        _, scales = quantize_weight(weight, fp8_dtype)
        return quantize_weight(weight, fp8_dtype, scale=scales.amax().view(1))
    if scale.shape[1] == 1:
        return quantize_weight(weight, fp8_dtype)
    rows, columns = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    blocks = weight.new_zeros(rows * SCALE_BLOCK, columns * SCALE_BLOCK)
    blocks[:n, :k] = weight
    blocks = blocks.view(rows, SCALE_BLOCK, columns, SCALE_BLOCK).transpose(1, 2)
    q, scale = quantize_weight(blocks.reshape(rows * columns, -1), fp8_dtype)
    q = (
        q.view(rows, columns, SCALE_BLOCK, SCALE_BLOCK)
        .transpose(1, 2)
        .reshape(rows * SCALE_BLOCK, -1)
    )
    return q[:n, :k].contiguous(), scale.view(rows, columns)


class KnownHead:
    """Lets a model's class resize a head in FP8. Kept on the model and pickled with it, it does so
    in the process that unpickles it too."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        if not hasattr(cls._get_resized_lm_head, "takes_fp8"):
            cls._get_resized_lm_head = _taking_fp8(cls._get_resized_lm_head)

    def __reduce__(self) -> Tuple:
        return KnownHead, (self._cls,)


def serve_resizing(model: Any) -> None:
    """Lets transformers resize the embeddings of a model whose head is in FP8."""
    get = getattr(model, "get_output_embeddings", None)
    if hasattr(model, "_get_resized_lm_head") and get is not None and isinstance(get(), Edited):
        model.known_head = KnownHead(type(model))


def _taking_fp8(resize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resize)
    def resized(self: Any, head: Any, tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(head, Edited) or tokens in (None, head.out_features):
            return resize(self, head, tokens, *args, **kwargs)
        linear = resize(self, in_float32(head), tokens, *args, **kwargs)
        q, scale = quantized_like(linear.weight.detach(), head)
        if scale.shape == (tokens, 1):  # what was there is as it was
            kept = min(tokens, head.out_features)
            q[:kept], scale[:kept] = head.weight[:kept], head.weight_scale_inv[:kept]
        # The head itself, with its kernel and whatever is hooked to it.
        head.out_features = tokens
        head.weight = nn.Parameter(q, requires_grad=False)
        head.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        if head.bias is not None:
            head.bias = nn.Parameter(linear.bias.detach(), requires_grad=head.bias.requires_grad)
        return head

    resized.takes_fp8 = True
    return resized
