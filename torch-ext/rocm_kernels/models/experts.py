"""Experts: one module for all experts of a layer, with FP8 or MXFP4 weights, and how a model's own
become it."""

import fnmatch
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES, SCALE_BLOCK, native_fp8_dtype, to_native_fp8
from ..reference import dequantize_expert, gated_experts, quantize_fp8
from .families import ACTIVATIONS
from .hooks import hand_over, is_offloaded, is_wrapped
from .known import make_known
from .mxfp4 import encode_mxfp4

# FP8 bits and scales, which keep their dtype through ``model.half()`` and the like.
_FIXED = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")


class Gate(NamedTuple):
    """What experts compute between their products, in the words of ``fused_moe``."""

    activation: str
    limit: Optional[float]
    interleaved: bool


class Experts(nn.Module):
    """All experts of a layer: ``fused_moe``'s weights, in its layout and under transformers' names.

    ``gate_up_proj [E, 2 * I, H]`` and ``down_proj [E, H, I]`` are FP8 with float32
    ``gate_up_proj_scale_inv`` and ``down_proj_scale_inv`` (despite the name they dequantise), or
    uint8: MXFP4. ``activation_scheme`` is ``"dynamic"``: inputs are quantised; or ``"none"``.

    This class's forward is the reference: plain torch, with a gradient for the input, no
    quantisation of the input. ``kernelize`` puts the kernels in its place.
    """

    kernel_layer_name = "Experts"

    def __init__(
        self,
        gate_up: Tuple[torch.Tensor, torch.Tensor],
        down: Tuple[torch.Tensor, torch.Tensor],
        biases: Tuple[Optional[torch.Tensor], Optional[torch.Tensor]],
        gate: Gate,
        activation_scheme: str,
    ) -> None:
        super().__init__()
        self.num_experts = gate_up[0].shape[0]
        self.activation, self.limit, self.interleaved = gate
        self.activation_scheme = activation_scheme
        for name, tensor in zip(_FIXED, (*gate_up, *down)):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        for name, bias in zip(("gate_up_proj_bias", "down_proj_bias"), biases):
            bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
            self.register_parameter(name, bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: Optional[torch.Tensor] = None,
        top_k_weights: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """``hidden_states [T, H]`` to the weighted sums of its experts ``[T, H]``; without a
        routing, as Llama 4 calls it, T / E rows of each expert in turn."""
        if top_k_index is None:
            rows = hidden_states.shape[0] // self.num_experts
            top_k_index = torch.arange(self.num_experts, device=hidden_states.device)
            top_k_index = top_k_index.repeat_interleave(rows)[:, None]
            top_k_weights = hidden_states.new_ones(hidden_states.shape[0], 1)
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, slots = (top_k_index == expert).nonzero(as_tuple=True)
            if len(tokens) == 0:
                continue
            both = self._product("gate_up_proj", expert, hidden_states[tokens])
            h = gated_experts(both.float(), self.activation, self.limit, self.interleaved)
            y = self._product("down_proj", expert, h.to(both.dtype))
            weighted = y * top_k_weights[tokens, slots, None]
            out = out.index_add(0, tokens, weighted.to(out.dtype))
        return out

    def _product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        scale, bias = getattr(self, f"{name}_scale_inv"), getattr(self, f"{name}_bias")
        weight = dequantize_expert(getattr(self, name)[expert], scale[expert]).to(x.dtype)
        return nn.functional.linear(x, weight, None if bias is None else bias[expert].to(x.dtype))

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, dtype={self.gate_up_proj.dtype}, "
            f"activation={self.activation!r}, activation_scheme={self.activation_scheme!r}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Keeps the weights' bits and scales, and gives FP8 the dialect of the device that they
        move to."""
        before = {name: getattr(self, name).data for name in _FIXED}
        super()._apply(fn, recurse)
        device = self.gate_up_proj.device
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = before[name], before[f"{name}_scale_inv"]
            if weight.device != device:
                moved_from = weight.device.type
                weight, scale = weight.to(device), scale.to(device)
                if weight.dtype in FP8_DTYPES and moved_from != "meta":
                    weight, scale = to_native_fp8(weight, scale)
            getattr(self, name).data, getattr(self, f"{name}_scale_inv").data = weight, scale
        return self


def convert_experts_(
    model: nn.Module,
    activations: Optional[str],
    scheme: str,
    skip: Sequence[str],
    fp8_dtype: Optional[torch.dtype],
) -> Dict[str, str]:
    """Puts :class:`Experts` in the place of a model's own experts; returns the name of each such
    module, and what became of it.

    16-bit weights become FP8 with a scale a channel. Those of an FP8 checkpoint are adopted with
    their scales; 16-bit weights that were dequantised from MXFP4, as transformers does where it has
    no kernel for them, become that again, without a change in value.

    ``activations`` is as ``quantize_model_`` was asked, ``scheme`` what 16-bit weights get of it.
    """
    found: Dict[str, str] = {}
    for name, module in [pair for pair in model.named_modules() if _is_experts(pair[1])]:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            found[name] = "stays: asked to skip"
            continue
        try:
            new, found[name] = _converted(module, activations, scheme, fp8_dtype)
        except _Stays as reason:
            found[name] = f"stays: {reason}"
            continue
        hand_over(module, new)
        for parent in list(model.modules()):
            for child_name, child in list(parent._modules.items()):
                if child is module:
                    setattr(parent, child_name, new)
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            make_known(type(module), "Llama4TextMoe", lambda moe: isinstance(moe.experts, Experts))
    return found


class _Stays(Exception):
    """Why experts cannot be converted."""


def _is_experts(module: nn.Module) -> bool:
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return not isinstance(module, Experts) and all(w is not None and w.dim() >= 3 for w in weights)


def _converted(
    module: nn.Module, activations: Optional[str], scheme: str, fp8_dtype: Optional[torch.dtype]
) -> Tuple[Experts, str]:
    weights = {name: module._parameters[name] for name in ("gate_up_proj", "down_proj")}
    if is_offloaded(module):
        raise _Stays("their weights are offloaded by accelerate")
    if is_wrapped(module):
        raise _Stays("their forward was replaced")
    for name, weight in weights.items():
        if type(weight) is not nn.Parameter:
            raise _Stays(f"{name} is a {type(weight).__name__}")
        if weight.device.type == "meta":
            raise _Stays(f"{name} has no data, on the meta device")
    if type(module).__name__ == "Mxfp4GptOssExperts":
        raise _Stays(
            "MXFP4 in the layout of another kernel; load the model with "
            "Mxfp4Config(dequantize=True), which keeps every value"
        )
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        raise _Stays("computes something else than gated experts")
    gate = _gate_of(module)
    biases = tuple(module._parameters.get(f"{name}_bias") for name in weights)
    if hasattr(module, "gate_up_proj_scale_inv"):
        pairs = [_adopted(module, name, fp8_dtype) for name in weights]
        scheme = activations or module.activation_scheme
        kind = "FP8" if pairs[0][0].dtype in FP8_DTYPES else "MXFP4"
        what = f"{kind} of the checkpoint"
    else:
        for name, weight in weights.items():
            if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise _Stays(f"{name} is {weight.dtype}")
        transposed = getattr(module, "is_transposed", type(module).__name__ == "Llama4TextExperts")
        views = [w.data.transpose(1, 2) if transposed else w.data for w in weights.values()]
        encoded = [encode_mxfp4(view) for view in views]
        if all(pair is not None for pair in encoded):
            pairs, what = encoded, "MXFP4 of the checkpoint"
        else:
            pairs = [_quantized(view, fp8_dtype) for view in views]
            what = "FP8, a scale a channel"
    scheme = scheme if pairs[0][0].dtype in FP8_DTYPES else "none"
    return Experts(*pairs, biases, gate, scheme), what


def _gate_of(module: nn.Module) -> Gate:
    """What a module computes between its products: asked of its own code, with numbers that meet
    every limit, against all that ``fused_moe`` can do."""
    act_fn = getattr(module, "act_fn", None)
    interleaved = not getattr(module, "is_concatenated", True)
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:  # the forward has it, as Llama 4's
        activation = ACTIVATIONS.get(type(act_fn).__name__)
        if activation is None:
            raise _Stays(f"its activation is {type(act_fn).__name__}")
        return Gate(activation, None, interleaved)
    columns = module.gate_up_proj_bias.shape[1] if _has_bias(module) else _columns(module)
    generator = torch.Generator().manual_seed(0)
    both = (8 * torch.randn(16, columns, generator=generator)).to(module.gate_up_proj.device)
    with torch.no_grad():
        expected = apply_gate(both)
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    for limit in (None, *(limit for limit in limits if limit)):
        for activation in ("silu", "gelu", "gelu_tanh", "swigluoai"):
            gate = Gate(activation, limit, interleaved)
            if torch.allclose(gated_experts(both, *gate), expected, rtol=1e-4, atol=1e-5):
                return gate
    raise _Stays("computes its gate in a way of its own")


def _has_bias(module: nn.Module) -> bool:
    return module._parameters.get("gate_up_proj_bias") is not None


def _columns(module: nn.Module) -> int:
    """2 * I."""
    return module.gate_up_proj.shape[2 if getattr(module, "is_transposed", False) else 1]


def _quantized(
    weight: torch.Tensor, fp8_dtype: Optional[torch.dtype]
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``[E, N, K]`` to FP8 with a scale for each of N, an expert at a time."""
    dialect = native_fp8_dtype(weight.device) if fp8_dtype is None else fp8_dtype
    q = torch.empty(weight.shape, dtype=dialect, device=weight.device)
    scale = weight.new_empty(*weight.shape[:2], 1, dtype=torch.float32)
    for expert in range(weight.shape[0]):
        q[expert], scale[expert] = quantize_fp8(weight[expert], fp8_dtype=dialect)
    return q, scale


def _adopted(
    module: nn.Module, name: str, fp8_dtype: Optional[torch.dtype]
) -> Tuple[torch.Tensor, torch.Tensor]:
    """A weight and its scales of transformers' ``FP8Experts``."""
    weight = getattr(module, name).data
    scale = getattr(module, f"{name}_scale_inv").data
    experts, n, columns = weight.shape
    if module.activation_scheme == "static":
        raise _Stays("has static scales of its inputs")
    if weight.dtype == torch.int8:
        if scale.element_size() != 1:
            raise _Stays(f"its FP4 scales are {scale.dtype}, not float8_e8m0fnu")
        return weight.view(torch.uint8), scale.view(torch.uint8)
    if weight.dtype not in FP8_DTYPES:
        raise _Stays(f"{name} is {weight.dtype}")
    scale = scale.float()
    blocks = (experts, -(-n // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
    if scale.shape[2] == 1 and n % scale.shape[1] == 0 and module.block_size is None:
        # One for the weight, or for each of gate and up.
        scale = scale.repeat_interleave(n // scale.shape[1], 1)
    elif tuple(module.block_size or ()) != (SCALE_BLOCK, SCALE_BLOCK) or scale.shape != blocks:
        raise _Stays(f"has scales of {tuple(scale.shape)}, blocks of {module.block_size}")
    return to_native_fp8(weight, scale.contiguous(), fp8_dtype=fp8_dtype)
