"""The halves of a decoder layer as one op each, for a prompt's rows.

    x ─▶ norm, FP8 ─▶ qkv ─▶ rotation, cache ─▶ attention ─▶ FP8 ─▶ o          layer_attention
      ─▶ + x, norm, FP8 ─▶ gate and up ─▶ SwiGLU, FP8 ─▶ down                  layer_mlp
   or ─▶ + x, norm ─▶ router ─▶ choice ─▶ experts                              an op each

decoder.py asks modules and tensors at each of these steps what it must do, and calls an op for it.
A prompt of some hundred tokens waits for that: on a host of an H200 a layer took 0.9 ms to ask, and
0.3 to compute. Where ``use_decode_step`` has looked at the model, the modules are asked once
(models/asked_once.py): a half of the most usual kind, of which nobody sees anything, becomes a call
of an op that runs the others. Only what a call may change is looked at again: tensors, their types,
and the arguments, these once for all layers that take them alike.

The ops and their operands are those of decoder.py: tests/test_plain_layer.py compares what comes
out.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from .._ops import ops
from ..functional import moe
from ..functional.attention_arguments import descale
from ..functional.fp8 import is_ue8m0
from ..functional.gradients import mark_written, needs_gradient
from ..functional.moe import run_experts
from ..functional.product import in_float32, linear_of_router, rows_of_gemm, usable_bias
from ..functional.shapes import register_shapes
from ..models import attention as model_attention
from ..models.asked_once import made_once
from ..models.experts import WEIGHTS, Experts
from ..models.families import ACTIVATIONS
from ..models.fuse import has_fused
from ..models.hooks import function_of, is_called, is_layer, is_unseen, is_wrapped, runs_unseen
from ..models.linear import FP8Linear
from ..models.norms import eps_of, weight_offset_of
from ..models.probe import DecoderCall
from ..models.probe_attention import AttentionCall
from ..models.probe_router import arguments_of
from ..models.registration import skipped_by
from .attention import attention_function
from .linear import is_weight_only, quantization

_attention, _mlp = ops.layer_attention.default, ops.layer_mlp.default
_norm = ops.rmsnorm_fp8.default
_16_BITS = (torch.bfloat16, torch.float16)
# What an attention function may be given that changes what it computes.
_CHANGING = {
    "dropout", "scaling", "softcap", "is_causal", "s_aux", "position_bias", "output_attentions",
}  # fmt: skip

register_shapes("layer_attention")
register_shapes("layer_mlp", False)


class Arguments(NamedTuple):
    """What the arguments of a layer come to, but for its hidden states' values."""

    shape: torch.Size  # of the hidden states
    cache: Any
    cos: Optional[torch.Tensor]
    sin: Optional[torch.Tensor]
    ends: torch.Tensor  # of the keys that a sequence's last query sees
    begins: Optional[torch.Tensor]
    window: Tuple[int, int]

    @classmethod
    def of(
        cls, form: "_Form", config: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Optional["Arguments"]:
        """None: they ask for more than where keys, tables and a cache are."""
        if not form.layer.fits(args, kwargs):
            return None
        given = {**dict(zip(form.layer.parameters, args)), **kwargs}
        keywords, call = form.layer.keywords(given), form.attention
        shape = given[form.layer.hidden].shape
        masked = _masked(keywords.get(call.mask))
        cache, tables = keywords.get(call.cache), keywords.get(call.positions)
        if (
            len(shape) != 3
            or shape[1] == 1
            or masked is None
            or not hasattr(cache, "place")
            or attention_function(config) is not model_attention.attend
            or not _computes_the_same(call, keywords)
        ):
            return None
        if not call.rotates:
            tables = None, None
        elif not _are_tables(tables, shape, call.columns):
            return None
        return cls(shape, cache, *tables, *masked)


class _Form(NamedTuple):
    """What layers have in common that make the same of their arguments."""

    layer: DecoderCall
    attention: AttentionCall


_forms: List[_Form] = []


def _form_of(layer: nn.Module, attention: "PlainAttention") -> _Form:
    """Equal ones are one object."""
    form = _Form(layer.kernel_call, attention.call)
    if form not in _forms:
        _forms.append(form)
    return _forms[_forms.index(form)]


class PlainLayer:
    """A decoder layer whose own forward nobody wants to run.

    Attributes:
        attention, mlp: its halves; None where one is of another kind.
        is_whole: both are there, and nothing but sums between them.
    """

    def __init__(self, layer: nn.Module) -> None:
        family = layer.kernel_family
        self.attention = PlainAttention.of(layer)
        self.mlp = PlainMLP.of(layer) or PlainExperts.of(layer)
        self.hidden, self.returns = layer.kernel_call.hidden, layer.kernel_call.returns
        between = family.attention_out_norm, family.mlp_out_norm, family.residual_multiplier
        self.is_whole = not any(between) and None not in (self.attention, self.mlp)
        if self.attention is not None:
            self.form = _form_of(layer, self.attention)
            self.config = self.attention.attention.config

    @classmethod
    def of(cls, layer: nn.Module) -> Optional["PlainLayer"]:
        """None: the layer is asked at each call."""
        if layer.training or not all(map(runs_unseen, skipped_by(layer))):
            return None
        return cls(layer)

    def arguments(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[Arguments]:
        """Of a call of the layer; None: its attention must be asked."""
        if self.attention is None:
            return None
        others = [value for name, value in kwargs.items() if name != self.hidden]
        things = (self.form, self.config, *args[1:], *kwargs, *others)
        return made_once(things, lambda: Arguments.of(self.form, self.config, args, kwargs))

    def __call__(self, x: torch.Tensor, given: Optional[Arguments]) -> Any:
        """What the layer returns for hidden states x; None: it must be asked."""
        if not self.is_whole or given is None or x.shape != given.shape or not x.is_contiguous():
            return None
        batch, count, columns = given.shape
        rows = x.view(batch * count, columns)
        if not self.attention.takes(rows, given) or not self.mlp.takes(rows):
            return None
        residual, out = self.mlp(rows, self.attention(rows, given), True)
        if out is not None:
            residual.add_(out)
        result = residual.view(batch, count, columns)
        if self.returns is None:
            return result
        return (result, *[None] * (len(self.returns) - 1))


class _Norm:
    """A norm of rows, and what it is asked for."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm  # its weight may be replaced
        self.eps, self.offset = eps_of(norm), weight_offset_of(norm)

    def weight(self) -> torch.Tensor:
        return self.norm._parameters["weight"]

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the op takes its weight as it is."""
        weight = self.weight()
        return weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()


class _Linear:
    """An FP8 linear of ours that nobody sees run."""

    def __init__(self, fp8: FP8Linear) -> None:
        self.fp8 = fp8  # its tensors may be replaced
        quantizes, options = not is_weight_only(fp8), quantization(fp8)
        self.out_features = fp8.weight.shape[0]
        static, scale_fmt = options["scale"], options["scale_fmt"]
        ue8m0 = scale_fmt is not None and is_ue8m0(scale_fmt, static)
        # How the ops quantise the rows that it takes.
        self.rounding = (quantizes, options["group_size"] or 0, options["scale_ub"] or 0.0, ue8m0)
        if not quantizes:
            self.rounding = False, 0, 0.0, False
        self.rows = rows_of_gemm(
            fp8.weight, fp8.weight_scale_inv, static, weight_only=not quantizes
        )

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

    def operands(self, dtype: torch.dtype) -> Tuple[Optional[torch.Tensor], ...]:
        """The weight, its scale, the bias, and a static scale of the rows that it takes."""
        mine = self.fp8._parameters
        scale, bias = mine["weight_scale_inv"], mine["bias"]
        if scale.dtype is not torch.float32:
            scale = in_float32(scale)
        if bias is not None:
            bias = usable_bias(bias, dtype)
        return mine["weight"], scale, bias, mine["activation_scale"]


class _Half:
    """What both halves have: a norm, and two linears that quantise alike."""

    def __init__(self, norm: nn.Module, first: _Linear, second: _Linear) -> None:
        self.norm, self.first, self.second = _Norm(norm), first, second
        self.last = (self.norm.eps, self.norm.offset, *first.rounding)  # arguments of the op
        self.least = max(first.rows[0], second.rows[0])
        self.most = min(first.rows[1], second.rows[1])

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether rows are of a number and a type that all products take as they are, and nobody
        differentiates, which decoder.py refuses."""
        return (
            self.least <= x.shape[0] <= self.most
            and x.dtype in _16_BITS
            and x.is_contiguous()
            and self.norm.takes(x)
            and not needs_gradient(x)
        )


def _linears_of(*linears: Any) -> Optional[List[_Linear]]:
    """None: one is of another kind, or they quantise otherwise than each other."""
    found = [_Linear.of(each) for each in linears]
    if None in found or len({each.rounding for each in found}) > 1:
        return None
    return found


class PlainMLP(_Half):
    """The norm behind the attention, and a gated MLP."""

    activation: str

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
        linears = _linears_of(getattr(mlp, family.gate_up.name), getattr(mlp, family.down))
        if activation is None or linears is None:
            return None
        half = cls(norm, *linears)
        half.activation = activation
        return half

    def takes(self, x: torch.Tensor, attended: Optional[torch.Tensor] = None) -> bool:
        """attended: of the layer's attention; None: it will come side by side."""
        return self._takes(x) and (attended is None or attended.is_contiguous())

    def __call__(
        self, x: torch.Tensor, attended: torch.Tensor, adds: bool = False
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """``h = x + attended``, and the MLP of its norm, of rows that it takes. With ``adds`` h may
        have got that as well; then it is None."""
        h, out = torch.empty_like(x), x.new_empty(x.shape[0], self.second.out_features)
        added = _mlp(
            out, h, x, attended, self.norm.weight(), *self.first.operands(x.dtype),
            *self.second.operands(x.dtype), self.activation, *self.last, adds,
        )  # fmt: skip
        return h, None if added else out


class PlainExperts:
    """The norm behind the attention, and a block that is a router and experts."""

    def __init__(self, norm: nn.Module, router: nn.Module, experts: Experts) -> None:
        self.norm, self.router, self.experts = _Norm(norm), router, experts
        self.call = router.kernel_router
        self.gate = experts.activation, experts.limit, experts.interleaved
        self.quantizing = experts.activation_scheme == "dynamic", experts.scale_fmt

    @classmethod
    def of(cls, layer: nn.Module) -> Optional["PlainExperts"]:
        family = layer.kernel_family
        block = getattr(layer, family.mlp)
        norm = None if family.mlp_norm is None else getattr(layer, family.mlp_norm)
        parts = vars(block).get("kernel_experts")
        if norm is None or parts is None or not is_unseen(block) or is_wrapped(block):
            return None
        router, experts = parts
        theirs = all(part in block._modules.values() and runs_ours(part) for part in parts)
        if not theirs or any(map(is_called, parts)) or len(arguments_of(router)) > 1:
            return None
        divided = experts.process_group is not None or experts.sums is not None
        return None if divided else cls(norm, router, experts)

    def takes(self, x: torch.Tensor, attended: Optional[torch.Tensor] = None) -> bool:
        """As PlainMLP's."""
        return (
            x.dtype in _16_BITS
            and x.is_contiguous()
            and self.norm.takes(x)
            and not needs_gradient(x, *self.router._parameters.values())
            and (attended is None or attended.is_contiguous())
        )

    def __call__(
        self, x: torch.Tensor, attended: torch.Tensor, adds: bool = False
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """As PlainMLP's."""
        h, normed, out = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        norm, router, call = self.norm, self.router, self.call
        _norm(
            normed, None, x, h, norm.weight(), None, norm.eps, 0, 0.0, False, norm.offset, attended
        )
        names = call.bias, call.choice_bias
        bias, choice_bias = [None if name is None else getattr(router, name) for name in names]
        weight = router._parameters["weight"]
        logits = linear_of_router(normed, weight, bias, in_float32=call.logits == "float32")
        choice_bias = None if choice_bias is None else choice_bias.float()
        mine = self.experts._parameters
        gate_up, down = [
            (mine[name], mine[f"{name}_scale_inv"], mine[f"{name}_bias"]) for name in WEIGHTS
        ]
        routing = call.choose(logits, choice_bias, moe)
        run_experts(out, normed, *routing, gate_up, down, self.gate, *self.quantizing)
        return h, out


def _masked(mask: Any) -> Optional[Tuple[torch.Tensor, Optional[torch.Tensor], Tuple[int, int]]]:
    """Where keys end and begin, and the window; None: the mask says more than that."""
    pattern = model_attention.pattern_of(mask)
    if pattern is None or mask.shape[-1] != 2:
        return None
    spans = mask[:, 0, 0]
    begins = spans[:, 0] if pattern.padded else None
    return spans[:, 1], begins, (pattern.left, pattern.right)


def _are_tables(tables: Any, shape: torch.Size, columns: int) -> bool:
    """Whether they are cosines and sines, ``[batch or 1, rows, columns]``, for hidden states."""
    if not isinstance(tables, tuple) or len(tables) != 2:
        return False
    return all(
        isinstance(table, torch.Tensor)
        and table.is_contiguous()
        and table.shape in ((1, shape[1], columns), (shape[0], shape[1], columns))
        for table in tables
    )


def _computes_the_same(call: AttentionCall, keywords: Dict[str, Any]) -> bool:
    """Whether an attention with these arguments computes what it does without them."""
    others = set(keywords) - {call.positions, call.mask, call.cache}
    if others & {"append", *call.names} or (others and not call.hands_others):
        return False
    return all(keywords[name] is None or keywords[name] is False for name in others & _CHANGING)


class PlainAttention(_Half):
    """The norm before the attention, and all of the attention."""

    def __init__(self, norm: nn.Module, attention: nn.Module, qkv: _Linear, out: _Linear) -> None:
        super().__init__(norm, qkv, out)
        self.attention, self.layer_idx = attention, attention.layer_idx
        self.call = call = attention.kernel_attention
        constants = dict(call.constants)
        scaling = constants.get("scaling")
        self.scale = call.head_dim**-0.5 if scaling is None else scaling
        self.softcap = constants.get("softcap") or 0.0
        self.head_norms = [_Norm(getattr(attention, name)) for name in call.norms or ()]
        head_norm = self.head_norms[0] if self.head_norms else None
        self.turning = (
            call.rotary_dim if call.rotates else 0,
            call.interleaved,
            1e-6 if head_norm is None else head_norm.eps,
            0.0 if head_norm is None else head_norm.offset,
        )

    @classmethod
    def of(cls, layer: nn.Module) -> Optional["PlainAttention"]:
        family = layer.kernel_family
        attention = getattr(layer, family.attention)
        call = getattr(attention, "kernel_attention", None)
        norm = None if family.attention_norm is None else getattr(layer, family.attention_norm)
        if call is None or norm is None or not is_unseen(attention) or not call.holds(attention):
            return None
        if call.spread or call.norms_whole:
            return None
        constants = dict(call.constants)
        if constants.get("dropout") or {name for name, _ in call.attributes} - {"s_aux"}:
            return None
        if not has_fused(attention, family.qkv):
            return None
        norms = [getattr(attention, name) for name in call.norms or ()]
        kinds = {(eps_of(each), weight_offset_of(each)) for each in norms}
        if not all(map(runs_unseen, norms)) or len(kinds) > 1:
            return None
        linears = _linears_of(getattr(attention, family.qkv.name), getattr(attention, call.out))
        return None if linears is None else cls(norm, attention, *linears)

    def takes(self, x: torch.Tensor, given: Arguments) -> bool:
        return self._takes(x) and given.cache.takes(self.layer_idx, x.dtype)

    def __call__(self, x: torch.Tensor, given: Arguments) -> torch.Tensor:
        """The attention of the norm of rows x, which it takes, of a call's arguments."""
        call = self.call
        batch, count, _ = given.shape
        heads = made_once(  # of new keys and values, which are in no tensor yet
            (given, x.dtype, call.kv_heads, call.head_dim),
            lambda: x.new_empty(()).expand(batch, count, call.kv_heads, call.head_dim),
        )
        place = given.cache.place(self.layer_idx, heads, heads)
        keys, values = place.keys.transpose(1, 2), place.values.transpose(1, 2)
        positions = place.positions
        descales = vars(self.attention).get("cache_scales")
        if descales is None or keys.dtype == x.dtype:
            descales = None, None
        else:
            descales = [descale(s, "descale", batch, call.kv_heads, x) for s in descales]
        sinks = getattr(self.attention, call.attributes[0][1]) if call.attributes else None
        q_weight, k_weight = [norm.weight() for norm in self.head_norms] or (None, None)
        out = x.new_empty(x.shape[0], self.second.out_features)
        _attention(
            out, keys, values, x, self.norm.weight(), *self.first.operands(x.dtype),
            *self.second.operands(x.dtype), given.cos, given.sin, q_weight, k_weight,
            made_once((positions,), lambda: positions[None]), *place.scales, given.ends,
            given.begins, *descales, sinks, *self.turning, self.scale, *given.window, self.softcap,
            *self.last,
        )  # fmt: skip
        mark_written(keys, values)
        return out


def runs_ours(module: nn.Module) -> bool:
    """Whether a module's forward is a layer's of this package."""
    forward = module.__dict__.get("forward")
    return forward is not None and is_layer(function_of(forward))
