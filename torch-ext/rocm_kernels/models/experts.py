"""``Experts``: one module that holds all experts of a layer, with FP8 or MXFP4 weights."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES, to_native_fp8
from ..reference import dequantize_expert, gated_experts
from .hooks import move_accelerate_hook
from .linear import checked_scale_fmt, summed
from .offload import Offloadable
from .state import load_experts, require_whole, unset

WEIGHTS = ("gate_up_proj", "down_proj")


class Gate(NamedTuple):
    """What experts compute between their products, in the words of ``fused_moe``."""

    activation: str
    limit: Optional[float]
    interleaved: bool


class Experts(Offloadable):
    """All experts of a layer: ``fused_moe``'s weights, in its layout and under transformers' names.

    ``gate_up_proj [E, 2 * I, H]`` and ``down_proj [E, H, I]`` are FP8 with float32
    ``gate_up_proj_scale_inv`` and ``down_proj_scale_inv`` (despite the name they dequantise), or
    uint8: MXFP4. ``activation_scheme`` is ``"dynamic"``: inputs are quantised, with scales that
    are powers of two if ``scale_fmt`` is ``"ue8m0"``; or ``"none"``.

    I may be more than the model's ``intermediate_size``. What is beyond it are zeros, in gate's
    rows, up's and down's columns, so that no block of gate's scales is one of up's too; they add
    nothing, for ``act(0) * 0`` is 0, and no file has them.

    ``process_group`` is of tensor parallelism, where each process has a part of each expert's I:
    results are summed over it, by ``sums``, a Sums of it, or by torch.distributed.

    This class's forward is the reference: plain torch, with a gradient for the input, no
    quantisation of the input. ``kernelize`` puts the kernels in its place.
    """

    kernel_layer_name = "Experts"
    kernel_condition = staticmethod(move_accelerate_hook)
    # What fp8_checkpoints read, in words, until quantize_model_ has seen it.
    loaded_as: Optional[str] = None
    sums: Optional[Any] = None

    def __init__(
        self,
        gate_up: Tuple[torch.Tensor, torch.Tensor],
        down: Tuple[torch.Tensor, torch.Tensor],
        biases: Tuple[Optional[torch.Tensor], Optional[torch.Tensor]],
        gate: Gate,
        activation_scheme: str,
        is_transposed: bool = False,
        scale_fmt: Optional[str] = None,
        intermediate_size: Optional[int] = None,
        process_group: Optional[Any] = None,
    ) -> None:
        super().__init__()
        self.process_group = process_group
        self.num_experts = gate_up[0].shape[0]
        self.activation, self.limit, self.interleaved = gate
        self.activation_scheme = activation_scheme
        self.scale_fmt = checked_scale_fmt(scale_fmt, activation_scheme)
        self.is_transposed = is_transposed  # in the model's own tensors, and so in its files
        held = gate_up[0].shape[1] // 2
        self.intermediate_size = held if intermediate_size is None else intermediate_size
        for name, (weight, scale), bias in zip(WEIGHTS, (gate_up, down), biases):
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            self.register_parameter(f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
            bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
            self.register_parameter(f"{name}_bias", bias)

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
        return summed(out, self)

    def _product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        scale, bias = getattr(self, f"{name}_scale_inv"), getattr(self, f"{name}_bias")
        weight = dequantize_expert(getattr(self, name)[expert], scale[expert]).to(x.dtype)
        return nn.functional.linear(x, weight, None if bias is None else bias[expert].to(x.dtype))

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, dtype={self.gate_up_proj.dtype}, "
            f"activation={self.activation!r}, activation_scheme={self.activation_scheme!r}"
            + (f", scale_fmt={self.scale_fmt!r}" if self.scale_fmt is not None else "")
        )

    @property
    def padding_in_words(self) -> str:
        held, meant = self.gate_up_proj.shape[1] // 2, self.intermediate_size
        return "" if held == meant else f", {meant} rows of gate and up each held as {held}"

    @property
    def is_fp8(self) -> bool:
        return self.gate_up_proj.dtype in FP8_DTYPES

    def _stored(self, name: str) -> Tuple[torch.Tensor, torch.Tensor]:
        """A weight and its scales as checkpoints hold them: in OCP's dialect."""
        weight, scale = getattr(self, name).data, getattr(self, f"{name}_scale_inv").data
        if not self.is_fp8 or weight.device.type == "meta":
            return weight, scale
        return to_native_fp8(weight, scale, fp8_dtype=torch.float8_e4m3fn)

    def convert_dialect(self, fp8_dtype: Optional[torch.dtype] = None) -> None:
        """Has FP8 weights in a dialect; None: in the device's."""
        for name in WEIGHTS if self.is_fp8 else ():
            weight, scale = getattr(self, name), getattr(self, f"{name}_scale_inv")
            weight.data, scale.data = to_native_fp8(weight.data, scale.data, fp8_dtype=fp8_dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Keeps the weights' bits and scales, and gives FP8 the dialect of the device that they
        move to."""
        fixed = [suffixed for name in WEIGHTS for suffixed in (name, f"{name}_scale_inv")]
        before = {name: getattr(self, name).data for name in fixed}
        super()._apply(fn, recurse)
        device, old = self.gate_up_proj.device, before["gate_up_proj"].device
        for name, was in before.items():
            if device != old and old.type == "meta":  # to_empty: there is nothing to move
                was = unset(was, device) if self.is_fp8 else torch.empty_like(was, device=device)
            getattr(self, name).data = was.to(device)
        if device != old and "meta" not in (device.type, old.type):
            self.convert_dialect()
        return self

    def _save_to_state_dict(self, destination: Dict, prefix: str, keep_vars: bool) -> None:
        require_whole(self.process_group is not None, prefix + WEIGHTS[0])
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in WEIGHTS:
            weight, scale = self._stored(name)
            destination[prefix + name], destination[f"{prefix}{name}_scale_inv"] = weight, scale

    def _load_from_state_dict(
        self,
        state_dict: Dict[str, torch.Tensor],
        prefix: str,
        local_metadata: Dict,
        strict: bool,
        missing: List[str],
        unexpected: List[str],
        errors: List[str],
    ) -> None:
        given = load_experts(self, state_dict, prefix, local_metadata)
        if isinstance(given, str):
            errors.append(given)
            return
        super()._load_from_state_dict(
            given, prefix, local_metadata, strict, missing, unexpected, errors
        )
