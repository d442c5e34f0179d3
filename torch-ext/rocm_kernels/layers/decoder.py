"""Kernel layers of whole decoder layers, for models that ``quantize_model_`` has prepared."""

from typing import Any, Dict, Optional, Tuple

import torch
from torch import nn

from ..functional.norm import add_residual, multiply
from ..models.asked_once import asked_once
from ..models.families import Family
from ..models.fuse import has_fused
from ..models.hooks import is_unseen, runs_unseen
from ..models.linear import FP8Linear, Projected
from ..models.registration import DECODER_LAYERS, skipped_by
from .attention import attend
from .by_arguments import layers_by_arguments
from .linear import linear
from .mlp import gated_product
from .norm import norm_linear, norm_rows, norm_sum, norm_sum_linear, quantizes_apart
from .plain_layer import PlainLayer


def decoder_layer(layer: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Runs a decoder layer as its ``layer.kernel_family`` says, with the arguments of the layer's
    own forward.

    In training, and where somebody wants to see a norm of it run, or gives other arguments than
    its own forward takes, that one runs. An attention or MLP whose input somebody sees gets a plain
    tensor.
    """
    family, call = layer.kernel_family, layer.kernel_call
    plain = asked_once(layer, PlainLayer.of)
    plain_arguments = None if plain is None else plain.arguments(args, kwargs)
    if plain_arguments is not None:
        result = plain(args[0] if args else kwargs[call.hidden], plain_arguments)
        if result is not None:
            return result
    if not call.fits(args, kwargs) or (plain is None and _runs_itself(layer)):
        return type(layer).forward(layer, *args, **kwargs)
    given = {**dict(zip(call.parameters, args)), **kwargs}
    hidden_states = given[call.hidden]
    mlp = getattr(layer, family.mlp)
    multiplier = _named(layer, family.residual_multiplier)
    # Rows are folded once: at batch 1 each view costs a tenth of an op.
    x = hidden_states.flatten(0, -2)
    results = summing = None
    if plain_arguments is not None and plain.attention.takes(x, plain_arguments):
        attended = plain.attention(x, plain_arguments)
        results = (attended, *[None] * (plain.attention.call.results - 1))
    if results is None:
        summing = _summed_by_the_norm(layer, x)
    if results is None and summing is None:
        results = _attention(layer, x, call, given)
    elif results is None:
        summing.leaves_sum = True
        try:
            results = _attention(layer, x, call, given)
        finally:
            summing.leaves_sum = False
    results = results if isinstance(results, tuple) else (results,)
    # Whoever has seen the attention's result, or the layer's input, may still hold it: what is
    # written here is this function's own. autocast may have made the result 16 bits.
    attended = results[0].reshape(x.shape).to(x.dtype)
    attended = norm_rows(attended, _named(layer, family.attention_out_norm))
    if multiplier is not None:
        attended = multiply(attended, multiplier)
    norm = _named(layer, family.mlp_norm)
    if plain is not None and plain.mlp is not None and plain.mlp.takes(x, attended):
        residual, out = plain.mlp(x, attended)
    elif _takes_projected(mlp, family):
        sums = None if summing is None else summing.sums
        gate_up = getattr(mlp, family.gate_up.name)
        gated = None if quantizes_apart(norm, gate_up) else gated_product(mlp, family, x)
        residual, projected = norm_sum_linear(x, attended, norm, gate_up, sums, gated)
        if gated is None:
            out = mlp(Projected(projected))
        else:
            out = linear(projected, getattr(mlp, family.down), x.dtype)
    else:  # experts, an MLP that was left in 16 bits, or one with a hook
        residual, normed = norm_sum(x, attended, norm)
        out = mlp(normed.view(hidden_states.shape))
        out = (out[0] if isinstance(out, tuple) else out).reshape(x.shape)  # a router's too
    out = norm_rows(out.to(x.dtype), _named(layer, family.mlp_out_norm))
    out = add_residual(residual, out, multiplier).view(hidden_states.shape)
    if call.returns is None:
        return out
    return (out, *(results[place] for place in call.returns[1:]))


def _runs_itself(layer: nn.Module) -> bool:
    return layer.training or not all(map(runs_unseen, skipped_by(layer)))


def _attention(layer: nn.Module, x: torch.Tensor, call: Any, given: Dict[str, Any]) -> Any:
    """What the attention returns for the norm of ``x``, the hidden states' rows."""
    family, shape = layer.kernel_family, given[call.hidden].shape
    attention = getattr(layer, family.attention)
    norm = _named(layer, family.attention_norm)
    if not has_fused(attention, family.qkv) or not is_unseen(attention):
        return _attend(attention, norm_rows(x, norm).view(shape), call, given)
    projection = getattr(attention, family.qkv.name)
    qkv = norm_linear(x, norm, projection)
    qkv = qkv.view(*shape[:-1], qkv.shape[-1])
    # It writes into the projections' result, which a hook may have kept.
    if getattr(attention, "kernel_attention", None) is not None and is_unseen(projection):
        results = attend(attention, qkv, call.keywords(given))
        if results is not None:
            return results
    return _attend(attention, Projected(qkv), call, given)


def _summed_by_the_norm(layer: nn.Module, x: torch.Tensor) -> Optional[nn.Module]:
    """The attention's output projection, if K is divided among processes, and the sum of its
    results, which are as x, belongs into one op with the norm behind it: nobody sees it, and
    nothing is done to it before. None: it sums itself."""
    family = layer.kernel_family
    attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
    form = getattr(attention, "kernel_attention", None)  # asked: it returns what that projects
    if form is None or torch.compiler.is_compiling():
        return None
    out = getattr(attention, form.out)
    if type(out) is not FP8Linear or out.sums is None or out.bias is not None:
        return None
    between = _named(layer, family.attention_out_norm), _named(layer, family.residual_multiplier)
    if between != (None, None) or not _takes_projected(mlp, family):
        return None
    norm, gate_up = _named(layer, family.mlp_norm), getattr(mlp, family.gate_up.name)
    seen = not is_unseen(attention) or not is_unseen(out)
    if seen or quantizes_apart(norm, gate_up) or not out.sums.takes(x):
        return None
    return out


def _takes_projected(mlp: nn.Module, family: Family) -> bool:
    return hasattr(mlp, "kernel_family") and has_fused(mlp, family.gate_up) and _are_unseen(mlp)


def _attend(attention: nn.Module, x: Any, call: Any, given: Dict[str, Any]) -> Any:
    keywords = call.keywords(given)
    if call.attention_hidden is None:
        return attention(x, **keywords)
    return attention(**{call.attention_hidden: x}, **keywords)


def _are_unseen(mlp: nn.Module) -> bool:
    return is_unseen(mlp) and all(is_unseen(child) for child in mlp.children())


def _named(layer: nn.Module, name: Optional[str]) -> Any:
    return None if name is None else getattr(layer, name)


LAYERS = layers_by_arguments(DECODER_LAYERS, decoder_layer, __name__)
LlamaDecoderLayer = LAYERS["LlamaDecoderLayer"]
GemmaDecoderLayer = LAYERS["GemmaDecoderLayer"]
