"""Converts a model's own experts to ``Experts``, once a run of the module's own code on small
inputs has shown that both compute the same."""

import copy
import inspect
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES, SCALE_BLOCK, native_fp8_dtype, to_native_fp8
from ..functional.moe import MAX_EXPERTS, MAX_TOPK
from ..reference import gated_experts
from .check_loaded import require_set
from .experts import WEIGHTS, Experts, Gate
from .families import ACTIVATIONS
from .hooks import is_offloaded, is_wrapped
from .linear import scale_fmt_of
from .mxfp4 import encode_mxfp4
from .plan import Plan, replace_module
from .quantized_weight import quantize_weight
from .tensor_parallel import (
    are_sharded,
    row_amax_of_all_shards,
    share_of_experts,
    why_experts_stay,
)

Pair = Tuple[torch.Tensor, torch.Tensor]  # a weight and its scales

LOADED = "{} of the checkpoint"
DEQUANTISED = "16 bits, dequantised from the checkpoint's {}: {}"
PER_TOKEN = ", its inputs' static scales replaced by one a token"


class NotConvertible(Exception):
    """Why experts cannot be converted."""


class ExpertsPlan(Plan):
    """What is to become of a model's experts.

    16-bit weights become FP8 with a scale a channel. Those of an FP8 checkpoint are adopted with
    their scales; 16-bit weights that were dequantised from MXFP4, as transformers does where it has
    no kernel for them, become that again, without a change in value. Of 16-bit experts that are
    divided among processes each process converts its share, to the values that the whole would
    have.

    Attributes:
        found: name of each module of experts, and what becomes of it.
    """

    def __init__(
        self,
        model: nn.Module,
        activations: Optional[str],
        scheme: str,
        skip: Sequence[str],
        fp8_dtype: Optional[torch.dtype],
    ) -> None:
        """``activations`` is as ``quantize_model_`` was asked, ``scheme`` what 16-bit weights get
        of it."""
        super().__init__(model, activations, skip, fp8_dtype)
        self.found: Dict[str, str] = {}
        self._own: Dict[str, _Source] = {}
        tried: Dict[Any, Optional[NotConvertible]] = {}
        for name, module in model.named_modules():
            if isinstance(module, Experts):
                if module.loaded_as is not None:
                    self.found[name] = module.loaded_as
                continue
            if not is_experts(module):
                continue
            if hasattr(module, "dequantised_from"):
                self.found[name] = module.dequantised_from
                continue
            if self.is_skipped(name):
                self.found[name] = "stays: asked to skip"
                continue
            try:
                require_limits(model, name, module)
                group = None
                if are_sharded(module):
                    why = why_experts_stay(model, name, module)
                    if why is not None:
                        raise NotConvertible(why)
                    module, group = share_of_experts(module)
                if hasattr(module, f"{WEIGHTS[0]}_scale_inv"):
                    require_set(name, module)
                self._own[name] = _read(module, activations, scheme, is_on_meta(model))
                self._own[name].process_group = group
                if group is not None and not self._own[name].is_16_bit:
                    raise NotConvertible("are divided among processes, in a checkpoint's format")
                _try_once(tried, module, self._own[name])
                self.found[name] = self._own[name].becomes
            except NotConvertible as reason:
                self._own.pop(name, None)
                self.found[name] = f"stays: {reason}"

    def _sources(self) -> Dict[str, "_Source"]:
        return self._own

    def _convert_a_row(self, own: "_Source") -> None:
        for weight in own.weights if own.is_16_bit else ():
            for expert in range(weight.shape[0]):
                _quantized(weight[expert : expert + 1, :1], self.fp8_dtype, None)

    def _convert(self, own: "_Source") -> Tuple[Tuple[Pair, Pair], str]:
        return own.pairs(self.fp8_dtype)

    def _size(self, own: "_Source") -> int:
        return own.weights[0].numel()

    def perform(self) -> None:
        for name, own in self._own.items():
            old = self.model.get_submodule(name)
            pairs, self.found[name] = self._convert(own)
            scheme = own.scheme if pairs[0][0].dtype in FP8_DTYPES else "none"
            scale_fmt = own.scale_fmt if scheme == "dynamic" else None
            new = Experts(
                *pairs,
                own.biases,
                own.gate,
                scheme,
                own.is_transposed,
                scale_fmt,
                own.intermediate_size,
                own.process_group,
            )
            self.found[name] += new.padding_in_words
            replace_module(self.model, old, new)
        for module in self.model.modules():
            if isinstance(module, Experts):
                if module.loaded_as is not None:
                    module.loaded_as = None
                    module.convert_dialect(self.fp8_dtype)
                if self.activations is not None and module.is_fp8:
                    module.activation_scheme = self.activations
                    if self.activations == "none":
                        module.scale_fmt = None


@dataclass
class _Source:
    """A model's experts, as they are.

    Attributes:
        weights: gate's and up's ``[E, 2 * I, H]``, and down's ``[E, H, I]``: views, if the model
            holds them transposed.
        scales: of FP8 weights.
        scale_fmt: of the inputs' computed scales.
        process_group: the processes that have a part of each expert; None: these are whole.
    """

    weights: Tuple[torch.Tensor, torch.Tensor]
    scales: Optional[Tuple[torch.Tensor, torch.Tensor]]
    biases: Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]
    gate: Gate
    scheme: str
    is_transposed: bool
    becomes: str
    scale_fmt: Optional[str]
    process_group: Optional[Any] = None

    @property
    def intermediate_size(self) -> int:
        columns = self.weights[1].shape[2]
        return 2 * columns if self.weights[1].dtype == torch.uint8 else columns

    @property
    def is_16_bit(self) -> bool:
        return self.scales is None

    def pairs(self, fp8_dtype: Optional[torch.dtype]) -> Tuple[Tuple[Pair, Pair], str]:
        """What :class:`Experts` gets, and what that is in words."""
        if self.process_group is not None:
            largest = row_amax_of_all_shards(self.weights[1], self.process_group)
            gate_up, down = self.weights
            both = _quantized(gate_up, fp8_dtype, None), _quantized(down, fp8_dtype, largest)
            return both, self.becomes
        if self.scales is None:
            gate_up = encode_mxfp4(self.weights[0])
            down = None if gate_up is None else encode_mxfp4(self.weights[1])
            if down is not None:
                return (gate_up, down), LOADED.format("MXFP4")
            made = [_quantized(weight, fp8_dtype, None) for weight in self.weights]
            return tuple(made), self.becomes
        both = zip(self.weights, self.scales)
        if self.weights[0].dtype not in FP8_DTYPES:
            return tuple(both), self.becomes
        if self.scales[1].shape[1] != self.weights[1].shape[1]:  # blocks
            both = _padded(self.weights, self.scales)
        made = [to_native_fp8(w, scale, fp8_dtype=fp8_dtype) for w, scale in both]
        return tuple(made), self.becomes


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in two tensors, gated or not, and is none of
    ours."""
    return not isinstance(module, Experts) and weights_of(module) is not None


def are_of_fp8_checkpoint(module: nn.Module) -> bool:
    """Whether experts came in FP8, and :class:`ExpertsPlan` has not seen to them."""
    if isinstance(module, Experts):
        return module.is_fp8 and module.loaded_as is not None
    if DEQUANTISED.format("FP8", "") in getattr(module, "dequantised_from", ""):
        return True
    weights = weights_of(module)
    return weights is not None and weights[0].dtype in FP8_DTYPES


def weights_of(module: nn.Module) -> Optional[Tuple[nn.Parameter, nn.Parameter]]:
    """Finds the two weights of a model's own experts: what multiplies their inputs, and down's."""
    for names in (WEIGHTS, _WITHOUT_GATE):
        first, down = (module._parameters.get(name) for name in names)
        if first is not None and down is not None and first.dim() >= 3 and down.dim() >= 3:
            return first, down
    return None


_WITHOUT_GATE = ("up_proj", "down_proj")


def is_transposed(module: nn.Module) -> bool:
    """Whether a model's experts hold ``[E, K, N]``."""
    return getattr(module, "is_transposed", type(module).__name__ in _TRANSPOSED)


_TRANSPOSED = ("Llama4TextExperts", "FbgemmFp8Llama4TextExperts")


def require_limits(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raises :class:`NotConvertible` for more experts than ``fused_moe`` serves."""
    experts = weights_of(module)[0].shape[0]
    if experts > MAX_EXPERTS:
        raise NotConvertible(f"has {experts} experts, of which fused_moe serves {MAX_EXPERTS}")
    slots = _slots_of(model, name)
    if slots > MAX_TOPK:
        raise NotConvertible(f"takes {slots} experts a token, of which fused_moe serves {MAX_TOPK}")


_SLOTS = ("top_k", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk",
          "moe_top_k", "moe_k")  # fmt: skip


def _slots_of(model: nn.Module, name: str) -> int:
    """Experts of a token, by what is told of it around a module of experts: by the block that holds
    it and its router, else by the model's config; 0 where nobody tells."""
    block = model.get_submodule(name.rpartition(".")[0])
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for places in ((block, *block.children()), (config,)):
        told = [vars(place).get(field) for place in places if place is not None for field in _SLOTS]
        slots = [value for value in told if isinstance(value, int)]
        if slots:
            return max(slots)
    return 0


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has no data anywhere yet: what is made of it is filled by a state dict."""
    return all(parameter.device.type == "meta" for parameter in model.parameters())


def _read(module: nn.Module, activations: Optional[str], scheme: str, on_meta: bool) -> _Source:
    _require_gate(module)
    weights = [module._parameters[name] for name in WEIGHTS]
    if is_offloaded(module):
        raise NotConvertible("their weights are offloaded by accelerate")
    if is_wrapped(module):
        raise NotConvertible("their forward was replaced")
    for name, weight in zip(WEIGHTS, weights):
        if type(weight) is not nn.Parameter:
            raise NotConvertible(f"{name} is a {type(weight).__name__}")
        if weight.device.type == "meta" and not on_meta:
            raise NotConvertible(f"{name} has no data, on the meta device")
    if type(module).__name__ == "Mxfp4GptOssExperts":
        raise NotConvertible(
            "MXFP4 in the layout of another kernel; load the model within fp8_checkpoints(), which "
            "keeps them as its files have them"
        )
    gate, transposed = gate_of(module), is_transposed(module)
    views = tuple(w.data.transpose(1, 2) if transposed else w.data for w in weights)
    scales, becomes, scale_fmt = None, "FP8, a scale a channel", None
    if hasattr(module, "gate_up_proj_scale_inv"):
        scales = tuple(_scales(module, name) for name in WEIGHTS)
        scheme = activations or module.activation_scheme
        if module.activation_scheme == "dynamic":
            scale_fmt = scale_fmt_of(module, "gate_up_proj_scale_inv")
        becomes = LOADED.format("FP8" if views[0].dtype in FP8_DTYPES else "MXFP4")
        if scheme == "static":
            scheme, becomes = "dynamic", becomes + PER_TOKEN
        if views[0].dtype == torch.int8:
            views = tuple(view.view(torch.uint8) for view in views)
            scales = tuple(scale.view(torch.uint8) for scale in scales)
    else:
        for name, weight in zip(WEIGHTS, weights):
            if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise NotConvertible(f"{name} is {weight.dtype}")
        (experts, rows, columns), down = views[0].shape, views[1].shape
        if down != (experts, columns, rows // 2):
            raise NotConvertible(
                f"gate_up_proj and down_proj are {tuple(weights[0].shape)} and "
                f"{tuple(weights[1].shape)}, which are not the same gated experts"
            )
    biases = tuple(module._parameters.get(f"{name}_bias") for name in WEIGHTS)
    return _Source(views, scales, biases, gate, scheme, transposed, becomes, scale_fmt)


def gate_of(module: nn.Module) -> Gate:
    """The gate that a module computes between its products: its own code runs on numbers of which
    some exceed every limit, and is compared with each gate that ``fused_moe`` has."""
    _require_gate(module)
    if getattr(module, "has_post_expert_norm", False):
        raise NotConvertible("computes something else than gated experts")
    act_fn = getattr(module, "act_fn", None)
    interleaved = not getattr(module, "is_concatenated", True)
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:  # the forward has it, as Llama 4's
        activation = ACTIVATIONS.get(type(act_fn).__name__)
        if activation is None:
            raise NotConvertible(f"its activation is {type(act_fn).__name__}")
        return Gate(activation, None, interleaved)  # which _try_once tries
    weight = module.gate_up_proj
    columns = weight.shape[2 if getattr(module, "is_transposed", False) else 1]  # 2 * I
    # Small numbers, and such as a limit would meet.
    sizes = torch.tensor([1.0, 8.0, 100.0, 1e4], dtype=torch.float32, device="cpu")
    both = _random(16, columns) * sizes.repeat(4)[:, None]
    both = both if weight.device.type == "meta" else both.to(weight.device)
    try:
        with torch.no_grad():
            expected = apply_gate(both)
    except Exception as failure:
        raise NotConvertible(f"its gate cannot be asked what it computes: {failure}") from failure
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    for limit in (None, *(limit for limit in limits if limit)):
        for activation in ("silu", "gelu", "gelu_tanh", "swigluoai"):
            gate = Gate(activation, limit, interleaved)
            if torch.allclose(gated_experts(both, *gate), expected, rtol=1e-4, atol=1e-5):
                return gate
    raise NotConvertible("computes its gate in a way of its own")


def _require_gate(module: nn.Module) -> None:
    if WEIGHTS[0] not in module._parameters or not getattr(module, "has_gate", True):
        raise NotConvertible("has no gate, and fused_moe computes gated experts alone")


def _random(*shape: int) -> torch.Tensor:
    """float32 on the CPU, wherever a model that is being loaded makes its tensors."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _try_once(tried: Dict[Any, Optional[NotConvertible]], module: nn.Module, own: _Source) -> None:
    """Raises :class:`NotConvertible` if the module's own forward, of 16-bit experts, computes
    something else than :class:`Experts`; tried with one module of each kind."""
    if not own.is_16_bit:
        return
    kind = (type(module), own.gate)
    if kind not in tried:
        try:
            tried[kind] = _compare(module, own)
        except Exception as failure:
            tried[kind] = NotConvertible(f"its forward cannot be asked what it computes: {failure}")
    if tried[kind] is not None:
        raise tried[kind]


def _compare(module: nn.Module, own: _Source) -> Optional[NotConvertible]:
    """The first expert in the place of each, in float32 on the CPU, where nothing can break."""
    experts, routed = own.weights[0].shape[0], hasattr(module, "_apply_gate")
    # Llama 4's forward takes no routing: some rows of each expert, here of a single one.
    copies = experts if routed else 1
    probe = copy.copy(module)
    probe._parameters = {
        name: None if p is None else nn.Parameter(_like_the_first(p.data, experts, copies))
        for name, p in module._parameters.items()
    }
    x, weights = _random(4, own.weights[0].shape[2]), _random(4, 2)
    # Of sizes that a limit would meet, whatever the weights.
    x = x * torch.tensor([[1.0], [10.0], [100.0], [1e3]], dtype=torch.float32, device="cpu")
    ids = torch.tensor([[0, experts - 1]] * 4, dtype=torch.int64, device="cpu")
    one = [probe._parameters[name].detach()[:1] for name in WEIGHTS]
    one = [weight.transpose(1, 2) if own.is_transposed else weight for weight in one]
    one_bias = [probe._parameters.get(f"{name}_bias") for name in WEIGHTS]
    both = nn.functional.linear(x, one[0][0], None if one_bias[0] is None else one_bias[0][0])
    y = gated_experts(both, *own.gate)
    y = nn.functional.linear(y, one[1][0], None if one_bias[1] is None else one_bias[1][0])
    expected = y * weights.sum(1, keepdim=True) if routed else y
    forward = inspect.unwrap(type(module).forward)  # without a choice of implementations
    with torch.no_grad():
        computed = forward(probe, x, ids, weights) if routed else forward(probe, x)
    size = expected.abs().amax(-1, keepdim=True)
    if ((computed - expected).abs() <= 1e-3 * expected.abs() + 1e-4 * size).all():
        return None
    return NotConvertible("computes something else than gated experts")


def _like_the_first(parameter: torch.Tensor, experts: int, copies: int) -> torch.Tensor:
    if parameter.dim() < 2 or parameter.shape[0] != experts:
        return _numbers(parameter)
    return _numbers(parameter[:1]).expand(copies, *parameter.shape[1:])


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return _random(*tensor.shape) if tensor.device.type == "meta" else tensor.float().cpu()


def _quantized(
    weight: torch.Tensor, fp8_dtype: Optional[torch.dtype], largest: Optional[torch.Tensor]
) -> Pair:
    """``[E, N, K]`` to FP8 with a scale for each of N, an expert at a time.

    Args:
        largest: ``[E, N, 1]``, magnitudes that the scales cover too.
    """
    dialect = native_fp8_dtype(weight.device) if fp8_dtype is None else fp8_dtype
    q = torch.empty(weight.shape, dtype=dialect, device=weight.device)
    scale = weight.new_empty(*weight.shape[:2], 1, dtype=torch.float32)
    for expert in range(weight.shape[0]):
        rows = weight[expert]
        if largest is not None:
            rows = torch.cat([rows, largest[expert]], 1)
        made, scale[expert] = quantize_weight(rows, dialect)
        q[expert] = made[:, : weight.shape[2]]
    return q, scale


def _scales(module: nn.Module, name: str) -> torch.Tensor:
    """Returns the scales of a weight of transformers' ``FP8Experts`` as ``fused_moe`` takes
    them."""
    weight = getattr(module, name).data
    scale = getattr(module, f"{name}_scale_inv").data
    experts, n, columns = weight.shape
    if weight.dtype == torch.int8:
        if scale.element_size() != 1:
            raise NotConvertible(f"its FP4 scales are {scale.dtype}, not float8_e8m0fnu")
        return scale
    if weight.dtype not in FP8_DTYPES:
        raise NotConvertible(f"{name} is {weight.dtype}")
    scale = scale.float()
    rows, blocks = -(-n // SCALE_BLOCK), -(-columns // SCALE_BLOCK)
    apart = 2 * -(-n // 2 // SCALE_BLOCK)  # of gate and up in files, where none is shared
    known = {rows, apart} if name == WEIGHTS[0] else {rows}
    if scale.shape[2] == 1 and n % scale.shape[1] == 0 and module.block_size is None:
        # One for the weight, or for each of gate and up.
        scale = scale.repeat_interleave(n // scale.shape[1], 1)
    elif tuple(module.block_size or ()) != (SCALE_BLOCK, SCALE_BLOCK) or scale.shape not in {
        (experts, count, blocks) for count in known
    }:
        raise NotConvertible(f"has scales of {tuple(scale.shape)}, blocks of {module.block_size}")
    return scale.contiguous()


def _padded(
    weights: Tuple[torch.Tensor, torch.Tensor], scales: Tuple[torch.Tensor, torch.Tensor]
) -> Tuple[Pair, Pair]:
    """Pads gate's and up's rows and down's columns with zeros, if gate and up have scales apart, so
    that no block of scales has rows of both."""
    (gate_up, down), inner = weights, weights[1].shape[2]
    held = -(-inner // SCALE_BLOCK) * SCALE_BLOCK
    if inner == held or scales[0].shape[1] != 2 * held // SCALE_BLOCK:
        return tuple(zip(weights, scales))
    wide = gate_up.new_zeros(gate_up.shape[0], 2 * held, gate_up.shape[2], dtype=torch.uint8)
    halves = gate_up.view(torch.uint8).unflatten(1, (2, inner))
    wide.unflatten(1, (2, held))[:, :, :inner] = halves
    long = down.new_zeros(*down.shape[:2], held, dtype=torch.uint8)
    long[:, :, :inner] = down.view(torch.uint8)
    return (wide.view(gate_up.dtype), scales[0]), (long.view(down.dtype), scales[1])
