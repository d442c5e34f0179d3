"""Model preparation: a loaded 16-bit model's linears to FP8 weights, in place.

    report = rocm_kernels.models.quantize_model_(model)
    kernelize(model, mode=Mode.INFERENCE)

Between the two calls the model works too, through plain torch and without the speed.

Projections that share an input are fused: ``self_attn.qkv_proj`` and ``mlp.gate_up_proj`` hold one
weight each, and ``q_proj``, ``k_proj``, ``v_proj``, ``gate_proj``, ``up_proj`` remain as parts of
it, each usable by itself. The attention's own forward stays the model's: when the decoder layer has
projected already, the parts only cut their columns out of the result.
"""

import copy
import fnmatch
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from . import layers
from .functional import FP8_DTYPES, SCALE_BLOCK, native_fp8_dtype, to_native_fp8
from .reference import dequantize, quantize_fp8, rms_norm

# Classes known to compute down_proj(act_fn(gate_proj(x)) * up_proj(x)).
GATED_MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP", "GemmaMLP")

# Classes known to compute h = x + self_attn(input_layernorm(x)), then
# h + mlp(post_attention_layernorm(h)), with norms that multiply by their weight.
DECODER_LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "SmolLM3DecoderLayer",
)


@dataclass(frozen=True)
class QuantizationReport:
    """What :func:`quantize_model_` did.

    Attributes:
        converted: names of the linears whose weights became FP8.
        fused: name of each fused projection, and the linears that became parts of it.
        adopted: names of the linears that held FP8 already, from an FP8 checkpoint.
        skipped: name of each linear left as it was, and why.
        norms: class of each norm that no kernel layer replaces, and how many there are of it.
        bytes_before, bytes_after: of the model's parameters and buffers, shared ones counted once.
        fp8_dtype: the dialect of the weights.
        activations: how the linears take their inputs, ``"dynamic"`` or ``"none"``.
    """

    converted: Tuple[str, ...]
    fused: Dict[str, Tuple[str, ...]]
    adopted: Tuple[str, ...]
    skipped: Dict[str, str]
    norms: Dict[str, int]
    bytes_before: int
    bytes_after: int
    fp8_dtype: torch.dtype
    activations: str

    def __str__(self) -> str:
        lines = [
            f"{len(self.converted)} linears to {self.fp8_dtype}, activations {self.activations!r}",
            f"{len(self.fused)} fused projections, {len(self.adopted)} linears held FP8 already",
            f"{self.bytes_before / 1e6:.1f} MB before, {self.bytes_after / 1e6:.1f} MB after",
        ]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"not replaced: {count} {name}" for name, count in self.norms.items()]
        return "\n".join(lines)


class FP8Linear(nn.Module):
    """Linear layer with an FP8 weight ``[N, K]`` and one scale for each output channel.

    The attributes are those of transformers' finegrained ``FP8Linear``, with blocks of 1 x K:
    ``weight``, ``weight_scale_inv [N, 1]`` (float32; despite the name it dequantises),
    ``block_size``, ``activation_scheme`` and ``activation_scale`` (None). ``activation_scheme`` is
    ``"dynamic"``: the input is quantised per token; or ``"none"``: it is used as it is.

    This class's forward is the reference: plain torch, with a gradient for the input, no
    quantisation of the input. ``kernelize`` puts the kernels in its place.
    """

    kernel_layer_name = "FP8Linear"

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: Optional[torch.Tensor] = None,
        activation_scheme: str = "dynamic",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.block_size = (1, self.in_features)
        self.activation_scheme = activation_scheme
        self.activation_scale = None
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight_scale_inv, requires_grad=False)
        self.bias = bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _reference_linear(input, self)

    def extra_repr(self) -> str:
        return _extra_repr(self)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Keeps the FP8 bits and float32 scales through ``model.half()`` and the like, and gives
        them the dialect of the device that they move to."""
        weight, scale = self.weight.data, self.weight_scale_inv.data
        super()._apply(fn, recurse)
        if self.weight.device != weight.device:
            weight, scale = weight.to(self.weight.device), scale.to(self.weight.device)
            if weight.device.type != "meta":
                weight, scale = to_native_fp8(weight, scale)
        self.weight.data, self.weight_scale_inv.data = weight, scale
        return self


class FP8LinearPart(nn.Module):
    """Output channels ``start`` to ``stop`` of a fused :class:`FP8Linear`.

    Takes the fused projection's input ``[..., K]``; or, once kernelized, its result ``[..., N]``,
    of which it returns its columns. Quantisation fuses only where N and K differ.
    """

    kernel_layer_name = "FP8LinearPart"

    def __init__(self, fused: FP8Linear, start: int, stop: int) -> None:
        super().__init__()
        # In a tuple: the fused module is registered with the parent, not once more with each part.
        self._fused = (fused,)
        self.start, self.stop = start, stop
        self.in_features, self.out_features = fused.in_features, stop - start

    @property
    def fused(self) -> FP8Linear:
        return self._fused[0]

    @property
    def weight(self) -> torch.Tensor:
        return self.fused.weight[self.start : self.stop]

    @property
    def weight_scale_inv(self) -> torch.Tensor:
        return self.fused.weight_scale_inv[self.start : self.stop]

    @property
    def bias(self) -> Optional[torch.Tensor]:
        bias = self.fused.bias
        return None if bias is None else bias[self.start : self.stop]

    @property
    def activation_scheme(self) -> str:
        return self.fused.activation_scheme

    @property
    def activation_scale(self) -> None:
        return None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _reference_linear(input, self)

    def extra_repr(self) -> str:
        return _extra_repr(self)


def quantize_model_(
    model: nn.Module,
    *,
    activations: str = "dynamic",
    lm_head: bool = False,
    skip: Sequence[str] = (),
    fuse: bool = True,
    fp8_dtype: Optional[torch.dtype] = None,
) -> QuantizationReport:
    """Turns a model's ``nn.Linear`` layers into FP8 ones with per-channel scales, in place.

    Embeddings and norms stay as they are. Linears of FP8 checkpoints (transformers' finegrained
    ``FP8Linear`` and ``FbgemmFp8Linear``) are adopted: they take the device's dialect and are made
    known to ``kernelize``; on an FNUZ device only the kernels can run them from then on.

    Args:
        model: a transformers model, or any module. Quantise where it will run, or move it after:
            the weights follow their device's FP8 dialect.
        activations: ``"dynamic"``: inputs are quantised to FP8 per token; ``"none"``: they stay
            16-bit and only weights are FP8.
        lm_head: also convert the output embedding. If it is tied to the input embedding, that one
            keeps its own weight, and the model grows by the FP8 copy.
        skip: ``fnmatch`` patterns of names to leave as they are, such as ``"*.down_proj"``.
        fuse: join q/k/v and gate/up projections, so that ``kernelize`` replaces whole decoder
            layers.
        fp8_dtype: the weights' dialect; None: that of the device they are on.

    Returns:
        A :class:`QuantizationReport`. Nothing is printed.
    """
    if activations not in ("dynamic", "none"):
        raise ValueError(f"activations must be 'dynamic' or 'none', got {activations!r}")
    if fp8_dtype is not None and fp8_dtype not in FP8_DTYPES:
        raise ValueError(f"fp8_dtype must be one of {FP8_DTYPES}, got {fp8_dtype}")
    bytes_before = _bytes(model)
    head = _output_embedding(model)
    converted: List[str] = []
    adopted: List[str] = []
    skipped: Dict[str, str] = {}
    # By name, not by module: each 16-bit weight is freed before the next one is quantised.
    for name in [name for name, module in model.named_modules() if hasattr(module, "in_features")]:
        module = model.get_submodule(name)
        reason = None
        if isinstance(module, (FP8Linear, FP8LinearPart)):
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            reason = "asked to skip"
        elif module is head and not lm_head:
            reason = "output embedding"
        elif type(module).__name__ in _ADOPTABLE and module.weight.dtype in FP8_DTYPES:
            reason = _adopt(module, fp8_dtype)
            adopted += [name] if reason is None else []
        elif type(module) is not nn.Linear:
            reason = f"is a {type(module).__name__}"
        elif module.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reason = f"weight is {module.weight.dtype}"
        else:
            if module is head and hasattr(model, "config"):
                # Or a later tie_weights() would put the embedding's weight into the FP8 head.
                model.config.tie_word_embeddings = False
            _replace(model, module, _quantized(module, activations, fp8_dtype))
            converted.append(name)
        if reason is not None:
            skipped[name] = reason
    fused = _fuse(model) if fuse else {}
    _make_classes_known(model)
    return QuantizationReport(
        converted=tuple(converted),
        fused=fused,
        adopted=tuple(adopted),
        skipped=skipped,
        norms=_other_norms(model),
        bytes_before=bytes_before,
        bytes_after=_bytes(model),
        fp8_dtype=_native(model, fp8_dtype),
        activations=activations,
    )


def kernelized_layers(model: nn.Module) -> Dict[Tuple[str, str], int]:
    """How many modules run a layer of this package: ``{(module class, layer): count}``."""
    counts: Dict[Tuple[str, str], int] = {}
    for module in model.modules():
        forward = getattr(module.__dict__.get("forward"), "__func__", None)
        if getattr(forward, "__module__", None) == layers.__name__:
            key = (type(module).__name__, forward.__qualname__.split(".")[0])
            counts[key] = counts.get(key, 0) + 1
    return counts


def _reference_linear(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    weight = dequantize(linear.weight, linear.weight_scale_inv, SCALE_BLOCK).to(x.dtype)
    return nn.functional.linear(x, weight, linear.bias)


def _extra_repr(linear: nn.Module) -> str:
    return (
        f"in_features={linear.in_features}, out_features={linear.out_features}, "
        f"bias={linear.bias is not None}, dtype={linear.weight.dtype}, "
        f"activation_scheme={linear.activation_scheme!r}"
    )


def _bytes(model: nn.Module) -> int:
    tensors = list(model.parameters()) + list(model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _output_embedding(model: nn.Module) -> Optional[nn.Module]:
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def _quantized(linear: nn.Linear, activations: str, fp8_dtype: Optional[torch.dtype]) -> FP8Linear:
    weight = linear.weight.detach()
    dialect = native_fp8_dtype(weight.device) if fp8_dtype is None else fp8_dtype
    # Quantising a weight per row of [N, K] is quantising it per output channel. The reference runs
    # on any device, also where this build has no kernel (a CUDA build, a model still on the CPU).
    q, scale = quantize_fp8(weight, fp8_dtype=dialect)
    return FP8Linear(q, scale, linear.bias, activations)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Wherever it is: a module may be shared."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _fuse(model: nn.Module) -> Dict[str, Tuple[str, ...]]:
    """Joins the projections that share an input; returns what became of which."""
    fused: Dict[str, Tuple[str, ...]] = {}
    for name, module in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        if type(module).__name__ in GATED_MLPS:
            fused.update(_join(module, prefix, "gate_up_proj", ("gate_proj", "up_proj")))
        elif type(module).__name__ in DECODER_LAYERS:
            prefix += "self_attn."
            parts = ("q_proj", "k_proj", "v_proj")
            fused.update(_join(module.self_attn, prefix, "qkv_proj", parts))
    return fused


def _join(
    parent: nn.Module, prefix: str, name: str, parts: Tuple[str, ...]
) -> Dict[str, Tuple[str, ...]]:
    """Gives ``parent`` one linear for all ``parts``, unless they do not fit together."""
    linears = {part: getattr(parent, part, None) for part in parts}
    if not all(isinstance(linear, FP8Linear) for linear in linears.values()):
        return {}
    first = linears[parts[0]]
    biases = [linear.bias for linear in linears.values()]
    weight = torch.cat([linear.weight for linear in linears.values()])
    # The parts tell the fused projection's input from its result by the width.
    if weight.shape[0] == weight.shape[1] or len({bias is None for bias in biases}) > 1:
        return {}
    fused = FP8Linear(
        weight,
        torch.cat([linear.weight_scale_inv for linear in linears.values()]),
        None if first.bias is None else nn.Parameter(torch.cat(biases).detach()),
        first.activation_scheme,
    )
    setattr(parent, name, fused)
    start = 0
    for part, linear in linears.items():
        setattr(parent, part, FP8LinearPart(fused, start, start + linear.out_features))
        start += linear.out_features
    return {prefix + name: tuple(prefix + part for part in parts)}


def _make_classes_known(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__ in GATED_MLPS:
            _make_known(type(module), "LlamaMLP", _is_fp8_mlp)
        elif type(module).__name__ in DECODER_LAYERS:
            _make_known(type(module), "LlamaDecoderLayer", _is_fused_decoder_layer)
        elif _is_norm(module) and _computes_rms_norm(module):
            # transformers does so too, but only beside the version of kernels that it was made for.
            _make_known(type(module), "RMSNorm", _computes_rms_norm)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and not module._modules


def _computes_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm's own forward is the formula of the ``RMSNorm`` layer: asked of it, with
    numbers. There are over a hundred such classes, and some add one to their weight."""
    weight = norm._parameters.get("weight")
    if set(norm._parameters) != {"weight"} or weight is None or weight.dim() != 1:
        return False
    if not isinstance(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)), float):
        return False
    exactly = {"dtype": torch.float32, "device": "cpu"}
    probe, size = copy.copy(norm), weight.shape[0]
    probe._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, size, **exactly))}
    x = torch.linspace(-3, 4, 2 * size, **exactly).view(2, size)
    try:
        with torch.no_grad():
            computed = type(norm).forward(probe, x)
    except Exception:  # it takes something else: the report names it
        return False
    return torch.allclose(computed, rms_norm(x, probe.weight, layers._eps(norm)), 1e-4, 1e-5)


def _other_norms(model: nn.Module) -> Dict[str, int]:
    """Norms that ``kernelize`` leaves as they are, by class."""
    counts: Dict[str, int] = {}
    for module in model.modules():
        cls = type(module)
        condition = getattr(cls, "kernel_condition", lambda _: True)
        known = getattr(cls, "kernel_layer_name", None) == "RMSNorm" and condition(module)
        if _is_norm(module) and not known:
            counts[cls.__name__] = counts.get(cls.__name__, 0) + 1
    return counts


def _is_fp8_mlp(module: nn.Module) -> bool:
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    known = type(module.act_fn).__name__ in layers.ACTIVATIONS
    return known and all(hasattr(linear, "weight_scale_inv") for linear in linears)


def _is_fused_decoder_layer(module: nn.Module) -> bool:
    return hasattr(module.self_attn, "qkv_proj") and hasattr(module.mlp, "gate_up_proj")


def _is_fp8_linear(module: nn.Module) -> bool:
    return module.weight.dtype in FP8_DTYPES


def _make_known(cls: type, layer_name: str, condition: Callable[[nn.Module], bool]) -> None:
    """Lets ``kernelize`` see a class, as ``kernels.replace_kernel_forward_from_hub`` does.

    The condition keeps it from instances that are not prepared, and from subclasses, which inherit
    the name.
    """
    if not hasattr(cls, "kernel_layer_name"):
        cls.kernel_layer_name = layer_name
        cls.kernel_condition = staticmethod(
            lambda module: type(module) is cls and condition(module)
        )


# Class of an FP8 linear in transformers -> its kernel layer, its scale's name.
_ADOPTABLE = {
    "FP8Linear": ("FP8Linear", "weight_scale_inv"),
    "FbgemmFp8Linear": ("FbgemmFp8Linear", "weight_scale"),
}


def _adopt(module: nn.Module, fp8_dtype: Optional[torch.dtype]) -> Optional[str]:
    """Readies a checkpoint's FP8 linear for its kernel layer; returns why not, if it cannot."""
    layer_name, scale_name = _ADOPTABLE[type(module).__name__]
    blocks = getattr(module, "block_size", None)
    if blocks is not None and tuple(blocks) != (SCALE_BLOCK, SCALE_BLOCK):
        return f"has scale blocks of {tuple(blocks)}, not {(SCALE_BLOCK, SCALE_BLOCK)}"
    weight, scale = to_native_fp8(
        module.weight.data, getattr(module, scale_name).data.float(), fp8_dtype=fp8_dtype
    )
    static = getattr(module, "activation_scale", None)
    if static is not None and weight.dtype != module.weight.dtype:
        _, static = to_native_fp8(module.weight.data[:0], static.data, fp8_dtype=weight.dtype)
        module.activation_scale = nn.Parameter(static, requires_grad=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    setattr(module, scale_name, nn.Parameter(scale, requires_grad=False))
    _make_known(type(module), layer_name, _is_fp8_linear)
    return None


def _native(model: nn.Module, fp8_dtype: Optional[torch.dtype]) -> torch.dtype:
    if fp8_dtype is not None:
        return fp8_dtype
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return native_fp8_dtype(device)
