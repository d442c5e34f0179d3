"""The halves of a decoder layer as their ops alone, for a prompt's rows.

    x ─▶ norm, FP8 ─▶ qkv ─▶ rotation, cache ─▶ attention ─▶ FP8 ─▶ o
      ─▶ + x, norm, FP8 ─▶ gate and up ─▶ SwiGLU, FP8 ─▶ down

decoder.py asks modules and tensors at each of these ops what it must do. A prompt of some hundred
tokens waits for that: on a host of an H200 a layer took 0.9 ms to ask, and 0.3 to compute. Where
``use_decode_step`` has looked at the model, the modules are asked once (models/asked_once.py): a
half of the most usual kind, of which nobody sees anything, becomes a list of ops. Only what a call
may change is looked at again: tensors, their types, and the arguments.

The ops and their operands are those of decoder.py: tests/test_plain_layer.py compares them.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .._ops import ops
from ..functional import SCALE_BLOCK
from ..functional.attention_arguments import descale
from ..functional.fp8 import is_ue8m0
from ..functional.gradients import mark_written, needs_gradient
from ..functional.product import in_float32, rows_of_gemm, usable_bias
from ..models import attention as model_attention
from ..models.asked_once import made_once
from ..models.families import ACTIVATIONS
from ..models.fuse import has_fused
from ..models.hooks import function_of, is_called, is_layer, is_unseen
from ..models.linear import FP8Linear
from ..models.norms import eps_of, weight_offset_of
from ..models.registration import skipped_by
from .attention import attention_function
from .linear import is_weight_only, quantization

_gemm, _norm = ops.gemm.default, ops.rmsnorm_fp8.default
_swiglu, _rotate, _attend = (
    ops.swiglu_fp8.default, ops.rope_and_cache.default, ops.attention.default,
)  # fmt: skip
# What an attention function may be given that changes what it computes.
_CHANGING = {
    "dropout", "scaling", "softcap", "is_causal", "s_aux", "position_bias", "output_attentions",
}  # fmt: skip


class PlainLayer(NamedTuple):
    """A decoder layer whose own forward nobody wants to run; its halves, None where one is of
    another kind."""

    attention: Optional["PlainAttention"]
    mlp: Optional["PlainMLP"]

    @classmethod
    def of(cls, layer: nn.Module) -> Optional["PlainLayer"]:
        """None: the layer is asked at each call."""
        if layer.training or any(map(is_called, skipped_by(layer))):
            return None
        return cls(PlainAttention.of(layer), PlainMLP.of(layer))


class _Norm:
    """A norm of rows, and what it is asked for."""

    def __init__(self, norm: nn.Module) -> None:
        self.parameters = norm._parameters  # its weight may be replaced
        self.eps, self.offset = eps_of(norm), weight_offset_of(norm)

    def weight_for(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """As the op takes it; None: it would have to be converted."""
        weight = self.parameters["weight"]
        fits = weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
        return weight if fits else None


class _Linear:
    """An FP8 linear of ours that nobody sees run."""

    def __init__(self, fp8: FP8Linear) -> None:
        self.parameters = fp8._parameters  # its tensors may be replaced
        self.weight_only = is_weight_only(fp8)
        weight, options = fp8.weight, quantization(fp8)
        self.out_features, self.in_features = weight.shape
        self.fp8_dtype = options["fp8_dtype"]
        self.group_size = options["group_size"] or 0
        self.groups = -(-self.in_features // SCALE_BLOCK) if self.group_size else 1
        scale_fmt, static = options["scale_fmt"], options["scale"]
        ue8m0 = scale_fmt is not None and is_ue8m0(scale_fmt, static)
        self.rounding = (self.group_size, options["scale_ub"] or 0.0, ue8m0)
        self.rows = rows_of_gemm(weight, fp8.weight_scale_inv, static, weight_only=self.weight_only)

    @classmethod
    def of(cls, fp8: Any) -> Optional["_Linear"]:
        plain = (
            type(fp8) is FP8Linear
            and fp8.process_group is None
            and fp8.sums is None
            and is_unseen(fp8)
            and runs_ours(fp8)
        )
        return cls(fp8) if plain else None

    def empty_input(self, rows: int, x: torch.Tensor) -> Tuple[torch.Tensor, Any, Any]:
        """Places for the quantised input and its scales, which are None where there are none to
        write, and its static scale. x: of the dtype that a linear of weights alone takes."""
        if self.weight_only:
            return x.new_empty(rows, self.in_features), None, None
        static = self.parameters["activation_scale"]
        q = x.new_empty(rows, self.in_features, dtype=self.fp8_dtype)
        if static is not None:
            return q, None, static
        return q, x.new_empty(rows, self.groups, dtype=torch.float32), None

    def normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm: _Norm,
        h: Optional[torch.Tensor] = None,
        addend: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Of the norm of x; with an addend, of the norm of their sum, which h gets."""
        q, scales, static = self.empty_input(x.shape[0], x)
        rounding = (0, 0.0, False) if self.weight_only else self.rounding
        _norm(q, scales, x, h, weight, static, norm.eps, *rounding, norm.offset, addend)
        return self.product(q, static if scales is None else scales, x.dtype)

    def activated(
        self, gate: torch.Tensor, up: Optional[torch.Tensor], activation: str
    ) -> torch.Tensor:
        """Of ``activation(gate) * up``, or of the rows of gate alone."""
        if self.weight_only and up is None:
            return self.product(gate, None, gate.dtype)
        q, scales, static = self.empty_input(gate.shape[0], gate)
        rounding = (0, 0.0, False) if self.weight_only else self.rounding
        _swiglu(q, scales, gate, up, static, activation, *rounding)
        return self.product(q, static if scales is None else scales, gate.dtype)

    def product(
        self, a: torch.Tensor, scale: Optional[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        mine = self.parameters
        out = a.new_empty(a.shape[0], self.out_features, dtype=dtype)
        scale_w, bias = in_float32(mine["weight_scale_inv"]), usable_bias(mine["bias"], dtype)
        _gemm(out, a, mine["weight"], scale, scale_w, bias)
        return out


class _Half:
    """What both halves ask of rows."""

    def _limit(self, *linears: _Linear) -> None:
        self.least = max(linear.rows[0] for linear in linears)
        self.most = min(linear.rows[1] for linear in linears)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether rows are of a number and a type that all products take as they are, and nobody
        differentiates, which decoder.py refuses."""
        return (
            self.least <= x.shape[0] <= self.most
            and x.dtype in (torch.bfloat16, torch.float16)
            and x.is_contiguous()
            and not needs_gradient(x)
        )


class PlainMLP(_Half):
    """The norm behind the attention, and a gated MLP."""

    def __init__(self, norm: nn.Module, gate_up: _Linear, down: _Linear, activation: str) -> None:
        self.norm, self.gate_up, self.down = _Norm(norm), gate_up, down
        self.activation = activation
        self._limit(gate_up, down)

    @classmethod
    def of(cls, layer: nn.Module) -> Optional["PlainMLP"]:
        family = layer.kernel_family
        mlp = getattr(layer, family.mlp)
        norm = None if family.mlp_norm is None else getattr(layer, family.mlp_norm)
        if norm is None or not hasattr(mlp, "kernel_family") or not runs_ours(mlp):
            return None
        if not has_fused(mlp, family.gate_up) or not all(map(is_unseen, (mlp, *mlp.children()))):
            return None
        activation = ACTIVATIONS.get(type(getattr(mlp, family.activation)).__name__)
        linears = [_Linear.of(getattr(mlp, name)) for name in (family.gate_up.name, family.down)]
        return None if None in (activation, *linears) else cls(norm, *linears, activation)

    def __call__(
        self, x: torch.Tensor, attended: torch.Tensor
    ) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        """``h = x + attended``, and the MLP of its norm; None: it is none of these rows'."""
        weight = self.norm.weight_for(x)
        if weight is None or not self.takes(x) or not attended.is_contiguous():
            return None
        h = torch.empty_like(x)
        gate, up = self.gate_up.normed(x, weight, self.norm, h, attended).chunk(2, -1)
        return h, self.down.activated(gate, up, self.activation)


class _Masked(NamedTuple):
    """What an attention is given of a mask."""

    ends: torch.Tensor
    begins: Optional[torch.Tensor]
    window: Tuple[int, int]


def _masked(mask: Any) -> Optional[_Masked]:
    """None: the mask says more than where keys begin and end."""
    pattern = model_attention.pattern_of(mask)
    if pattern is None or mask.shape[-1] != 2:
        return None
    spans = mask[:, 0, 0]
    begins = spans[:, 0] if pattern.padded else None
    return _Masked(spans[:, 1], begins, (pattern.left, pattern.right))


def _shape_of(tables: Any) -> Optional[torch.Size]:
    """Of cosines and sines ``[batch or 1, rows, columns]``, side by side; None: they are others."""
    if not isinstance(tables, tuple) or len(tables) != 2:
        return None
    fit = all(isinstance(t, torch.Tensor) and t.dim() == 3 and t.is_contiguous() for t in tables)
    return tables[0].shape if fit and tables[0].shape == tables[1].shape else None


class PlainAttention(_Half):
    """The norm before the attention, and all of the attention."""

    def __init__(self, norm: nn.Module, attention: nn.Module, qkv: _Linear, out: _Linear) -> None:
        self.norm, self.attention, self.qkv, self.out = _Norm(norm), attention, qkv, out
        self.call, self.layer_idx = attention.kernel_attention, attention.layer_idx
        self.sizes = (self.call.heads, self.call.kv_heads, self.call.kv_heads)
        constants = dict(self.call.constants)
        self.softcap, scaling = constants.get("softcap") or 0.0, constants.get("scaling")
        self.scale = self.call.head_dim**-0.5 if scaling is None else scaling
        self.head_norms = None
        if self.call.norms is not None:
            self.head_norms = tuple(_Norm(getattr(attention, name)) for name in self.call.norms)
        self.changing: Dict[Tuple[str, ...], Optional[List[str]]] = {}
        self._limit(qkv, out)

    @classmethod
    def of(cls, layer: nn.Module) -> Optional["PlainAttention"]:
        family = layer.kernel_family
        attention = getattr(layer, family.attention)
        call = getattr(attention, "kernel_attention", None)
        norm = None if family.attention_norm is None else getattr(layer, family.attention_norm)
        if call is None or norm is None or not is_unseen(attention):
            return None
        constants = dict(call.constants)
        if constants.get("dropout") or {name for name, _ in call.attributes} - {"s_aux"}:
            return None
        if not has_fused(attention, family.qkv):
            return None
        norms = [getattr(attention, name) for name in call.norms or ()]
        kinds = {(eps_of(each), weight_offset_of(each)) for each in norms}
        if any(map(is_called, norms)) or len(kinds) > 1:
            return None
        linears = [_Linear.of(getattr(attention, name)) for name in (family.qkv.name, call.out)]
        return None if None in linears else cls(norm, attention, *linears)

    def __call__(
        self, x: torch.Tensor, shape: torch.Size, keywords: Dict[str, Any]
    ) -> Optional[Tuple[Any, ...]]:
        """What the attention returns, of rows x of hidden states of a shape; None: it is none of
        these rows', or of these arguments'."""
        call = self.call
        tables, cache = keywords.get(call.positions), keywords.get(call.cache)
        weight = self.norm.weight_for(x)
        if weight is None or len(shape) != 3 or shape[1] == 1 or not self.takes(x):
            return None
        masked = made_once(keywords.get(call.mask), _masked)
        if (
            masked is None
            or not hasattr(cache, "place")
            or not cache.takes(self.layer_idx, x.dtype)
            or (call.rotates and not self._are_mine(made_once(tables, _shape_of), shape))
            or made_once(self.attention.config, attention_function) is not model_attention.attend
            or not self._takes_arguments(keywords)
        ):
            return None
        batch, rows = shape[:2]
        qkv = self.qkv.normed(x, weight, self.norm)
        heads = qkv.view(batch, rows, sum(self.sizes), call.head_dim)
        q, k, v = heads.split_with_sizes(self.sizes, 2)
        place = cache.place(self.layer_idx, k, v)
        keys, values = place.keys.transpose(1, 2), place.values.transpose(1, 2)
        cos, sin = tables if call.rotates else (None, None)
        q_weight = k_weight = None
        eps, offset = 1e-6, 0.0
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            q_weight, k_weight = q_norm.parameters["weight"], k_norm.parameters["weight"]
            eps, offset = q_norm.eps, q_norm.offset
        k_scale, v_scale = place.scales
        _rotate(
            q, None, keys, values, q, k, v, cos, sin, None, q_weight, k_weight,
            place.positions[None], None, k_scale, v_scale, "cache_positions",
            call.rotary_dim if call.rotates else 0, call.interleaved, eps, offset,
        )  # fmt: skip
        mark_written(keys, values)
        sinks = next((getattr(self.attention, name) for _, name in call.attributes), None)
        scales = vars(self.attention).get("cache_scales", (None, None))
        if keys.dtype == x.dtype:
            scales = (None, None)
        k_scale, v_scale = (descale(s, "descale", batch, call.kv_heads, q) for s in scales)
        out = x.new_empty(batch, rows, call.heads, values.shape[-1])
        _attend(
            out, None, q, keys, values, None, None, masked.ends, masked.begins, None, k_scale,
            v_scale, sinks, rows, keys.shape[1], self.scale, *masked.window, self.softcap, "",
        )  # fmt: skip
        result = self.out.activated(out.view(batch * rows, -1), None, "identity")
        return (result, *[None] * (call.results - 1))

    def _are_mine(self, tables: Optional[torch.Size], shape: torch.Size) -> bool:
        """Whether tables of a shape have a row a token."""
        return tables is not None and (
            tables[0] in (1, shape[0]) and tables[1:] == (shape[1], self.call.columns)
        )

    def _takes_arguments(self, keywords: Dict[str, Any]) -> bool:
        """Whether an attention with these arguments computes what it does without them."""
        names = tuple(keywords)
        if names not in self.changing:
            others = set(names) - {self.call.positions, self.call.mask, self.call.cache}
            unknown = others & {"append", *self.call.names} or (
                others and not self.call.hands_others
            )
            self.changing[names] = None if unknown else sorted(others & _CHANGING)
        changing = self.changing[names]
        return changing is not None and all(
            keywords[name] is None or keywords[name] is False for name in changing
        )


def runs_ours(module: nn.Module) -> bool:
    """Whether a module's forward is a layer's of this package."""
    forward = module.__dict__.get("forward")
    return forward is not None and is_layer(function_of(forward))
