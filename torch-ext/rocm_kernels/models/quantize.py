"""``quantize_model_`` replaces the linears and experts of a loaded model by FP8 ones, in place."""

from typing import Dict, List, Optional, Sequence, Set, Union

import torch
from torch import nn

from ..functional import FP8_DTYPES, native_fp8_dtype
from .check_loaded import require_set
from .checkpoints import describe_checkpoint, names_in_files
from .compute_dtype import keep_dtype
from .convert_experts import ExpertsPlan, are_of_fp8_checkpoint, is_experts, is_on_meta
from .edits import serve_merging, serve_resizing
from .experts import Experts
from .formats import Stored, read_stored
from .fuse import fuse_projections
from .hooks import is_offloaded, is_wrapped, keep_accelerate_hooks
from .linear import FP8Linear, FP8LinearPart, computes_linear
from .norms import other_norms
from .pickling import name_kernel_funcs
from .plan import Plan, replace_module
from .quantized_weight import quantize_weight
from .registration import layers_left_alone, register_layers
from .report import QuantizationReport, bytes_of, kept_bytes
from .state import in_dialect
from .stored_linears import IN_FP8
from .tensor_parallel import (
    Shard,
    is_sharded,
    local_shard,
    row_amax_of_all_shards,
    share_with_scales,
    whole_of,
    why_shard_stays,
)
from .weight_access import linears_read_without_a_call


def quantize_model_(
    model: nn.Module,
    *,
    activations: Optional[str] = None,
    lm_head: bool = False,
    skip: Union[str, Sequence[str]] = (),
    fuse: bool = True,
    fp8_dtype: Optional[torch.dtype] = None,
) -> QuantizationReport:
    """Turns a model's ``nn.Linear`` layers into FP8 ones with per-channel scales, in place.

    So do experts, whose weights no ``nn.Linear`` holds: each layer's become one ``Experts``.
    Embeddings, norms and heads stay as they are. Linears of FP8 checkpoints are adopted: they keep
    their values and scales, and take the device's dialect (docs/checkpoints.md has the formats). If
    something fails, the model is as it was before.

    Args:
        model: a transformers model, or any module that has linears in it. Quantise where it will
            run, or move it after: the weights follow their device's FP8 dialect. One that is whole
            on the meta device becomes a form, which ``load_state_dict(..., assign=True)`` fills.
        activations: ``"dynamic"``: inputs are quantised to FP8 per token; ``"none"``: they stay
            16-bit and only weights are FP8. None: an FP8 checkpoint's linears take them as it says,
            other linears as is quicker, ``"none"`` on the CPU and ``"dynamic"`` elsewhere.
        lm_head: also convert heads: the output embedding, and what a model has outside its base
            model, such as a classifier. If an output embedding is tied to the input embedding, that
            one keeps its own weight, and the model grows by the FP8 copy.
        skip: ``fnmatch`` patterns of names to leave as they are, such as ``["*.down_proj"]``; a
            string is one pattern.
        fuse: join q/k/v and gate/up projections, so that ``kernelize`` replaces whole decoder
            layers.
        fp8_dtype: the weights' dialect; None: that of the device they are on.

    Returns:
        A :class:`QuantizationReport`. Nothing is printed.
    """
    if activations not in ("dynamic", "none", None):
        raise ValueError(f"activations must be 'dynamic', 'none' or None, got {activations!r}")
    if fp8_dtype is not None and fp8_dtype not in FP8_DTYPES:
        raise ValueError(f"fp8_dtype must be one of {FP8_DTYPES}, got {fp8_dtype}")
    if isinstance(model, nn.Linear):
        raise ValueError(
            f"model must have linears in it, got a bare {type(model).__name__}, which cannot be "
            "replaced in place: put it into an nn.Sequential"
        )
    skip = [skip] if isinstance(skip, str) else list(skip)
    bytes_before = bytes_of(model)
    plan = _LinearsPlan(model, activations, lm_head, skip, fp8_dtype)
    experts = ExpertsPlan(model, activations, plan.scheme, skip, fp8_dtype)
    names = names_in_files(model)
    plan.rehearse()
    experts.rehearse()
    plan.perform()
    experts.perform()
    register_layers(model)
    name_kernel_funcs(model)
    keep_dtype(model)
    serve_merging()
    serve_resizing(model)
    keep_accelerate_hooks(model)
    fused = fuse_projections(model) if fuse else {}
    describe_checkpoint(model, names)
    bytes_after = bytes_of(model)
    return QuantizationReport(
        converted=tuple(plan.converted),
        fused=fused,
        adopted=tuple(plan.adopted),
        instead=plan.instead,
        skipped=plan.skipped,
        experts=experts.found,
        kept={name: count / bytes_after for name, count in kept_bytes(model).items()},
        norms=other_norms(model),
        layers=layers_left_alone(model),
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        fp8_dtype=_native(model, fp8_dtype),
        activations=plan.scheme,
    )


class _LinearsPlan(Plan):
    """What is to become of each linear of a model; nothing has been changed yet.

    Attributes:
        scheme: of the activations of converted linears.
        converted, adopted: names of linears.
        skipped: name of each linear that stays, and why.
        instead: name of each module that a checkpoint wants otherwise, and what is done instead.
    """

    def __init__(
        self,
        model: nn.Module,
        activations: Optional[str],
        lm_head: bool,
        skip: Sequence[str],
        fp8_dtype: Optional[torch.dtype],
    ) -> None:
        super().__init__(model, activations, skip, fp8_dtype)
        devices = {parameter.device.type for parameter in model.parameters()}
        on_cpu = devices <= {"cpu", "meta"}  # meta: offloaded, or without data yet
        self.scheme = activations or ("none" if on_cpu else "dynamic")
        self.converted: List[str] = []
        self.adopted: List[str] = []
        self.skipped: Dict[str, str] = {}
        self.instead: Dict[str, str] = {}
        heads = {} if lm_head else _heads(model)
        read, adapters, routers = (
            linears_read_without_a_call(model),
            _adapters(model),
            _routers(model),
        )
        self.skipped.update(_other_matrices(model))
        self.instead.update(
            {n: IN_FP8 for n, m in model.named_modules() if vars(m).get("stored_as") == IN_FP8}
        )
        for name, module in model.named_modules():
            if not hasattr(module, "in_features") or isinstance(module, FP8LinearPart):
                continue
            if isinstance(module, FP8Linear):
                if module.stored_as is not None:
                    self._adopt(name, module.stored_as.instead)
                continue
            stored = read_stored(module)
            if self.is_skipped(name):
                reason = "asked to skip"
            elif name in heads:
                reason = heads[name]
            elif name in adapters:
                reason = "adapter"
            elif name in read:
                reason = f"{read[name]} reads its weight itself"
            elif stored is not None:
                reason = stored if isinstance(stored, str) else None
                if reason is None and is_sharded(module):
                    reason = why_shard_stays(model, name, module)
                if reason is None:
                    self._adopt(name, stored.instead)
            elif name in routers:
                reason = "chooses experts"
            else:
                reason = _why_not(model, name, module)
                self.converted += [name] if reason is None else []
            if reason is not None:
                self.skipped[name] = reason
        from_fp8 = self.adopted or any(map(are_of_fp8_checkpoint, model.modules()))
        if from_fp8 and hasattr(getattr(model, "config", None), "quantization_config"):
            left = [name for name in self.converted if name not in _heads(model)]
            self.converted = [name for name in self.converted if name not in left]
            self.skipped.update(dict.fromkeys(left, "its checkpoint has it in 16 bits"))

    def _adopt(self, name: str, instead: Optional[str]) -> None:
        require_set(name, self.model.get_submodule(name))
        self.adopted.append(name)
        if instead is not None and self.activations is None:
            self.instead[name] = instead

    def _sources(self) -> Dict[str, nn.Module]:
        return {name: self.model.get_submodule(name) for name in self.converted}

    def _convert_a_row(self, linear: nn.Linear) -> None:
        self._convert(linear, rows=1)

    def _size(self, linear: nn.Linear) -> int:
        return linear.weight.numel()

    def perform(self) -> None:
        # By name, not by module: each 16-bit weight is freed before the next one is quantised.
        for name in self.converted:
            linear = self.model.get_submodule(name)
            if _is_tied_head(self.model, linear):
                # Or a later tie_weights() would put the embedding's weight into the FP8 head.
                self.model.config.tie_word_embeddings = False
            replace_module(self.model, linear, self._convert(linear))
        for name in self.adopted:
            linear = self.model.get_submodule(name)
            if isinstance(linear, FP8Linear) and is_sharded(linear):
                replace_module(self.model, linear, self._adopted(linear, _as_stored(linear)))
            elif isinstance(linear, FP8Linear):
                linear.stored_as = None
                linear.convert_dialect(self.fp8_dtype)
            else:
                replace_module(self.model, linear, self._adopted(linear, read_stored(linear)))
        for module in self.model.modules():
            if isinstance(module, FP8Linear) and self.activations is not None:
                _take_inputs(module, self.activations)

    def _convert(self, linear: nn.Linear, rows: Optional[int] = None) -> FP8Linear:
        divided = is_sharded(linear)
        shard = local_shard(linear) if divided else Shard(linear.weight.detach(), linear.bias, None)
        largest = row_amax_of_all_shards(shard.weight, shard.process_group)
        weight = shard.weight[:rows]
        if largest is not None:
            weight = torch.cat([weight, largest[:rows]], 1)
        dialect = native_fp8_dtype(weight.device) if self.fp8_dtype is None else self.fp8_dtype
        # Quantising a weight per row of [N, K] is quantising it per output channel.
        q, scale = quantize_weight(weight, dialect)
        if largest is not None:
            q = q[:, :-1].contiguous()
        new = FP8Linear(q, scale, shard.bias, self.scheme, process_group=shard.process_group)
        new.is_shard = divided
        return new

    def _adopted(self, linear: nn.Module, stored: Stored) -> FP8Linear:
        weight, scale, shard = stored.weight, stored.scale, Shard(stored.weight, linear.bias, None)
        if is_sharded(linear):
            weight, scale = share_with_scales(weight, scale)
            shard = local_shard(linear)
        tensors = {"weight": weight, "weight_scale_inv": scale}
        if stored.static is not None:
            tensors["activation_scale"] = stored.static
        tensors = in_dialect(tensors, self.fp8_dtype)
        new = FP8Linear(
            tensors["weight"],
            tensors["weight_scale_inv"],
            shard.bias,
            stored.scheme,
            activation_scale=tensors.get("activation_scale"),
            scale_ub=stored.scale_ub,
            scale_fmt=stored.scale_fmt,
            process_group=shard.process_group,
        )
        new.is_shard = is_sharded(linear)
        return new


def _as_stored(linear: FP8Linear) -> Stored:
    return Stored(
        linear.weight.detach(),
        whole_of(linear.weight_scale_inv).detach(),
        linear.activation_scheme,
        None if linear.activation_scale is None else whole_of(linear.activation_scale).detach(),
        linear.scale_ub,
        linear.scale_fmt,
    )


def _take_inputs(linear: FP8Linear, activations: str) -> None:
    linear.activation_scheme, linear.activation_scale = activations, None
    if activations == "none":
        linear.scale_ub = linear.scale_fmt = None


def _why_not(model: nn.Module, name: str, module: nn.Module) -> Optional[str]:
    """Why a linear of no FP8 checkpoint stays as it is; None: it does not."""
    if not computes_linear(module):
        return f"is a {type(module).__name__}"
    if module.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"weight is {module.weight.dtype}"
    if is_offloaded(module):
        return "its weight is offloaded by accelerate"
    if is_sharded(module):
        return why_shard_stays(model, name, module)
    if module.weight.device.type == "meta" and not is_on_meta(model):
        return "its weight has no data, on the meta device"
    if type(module.weight) is not nn.Parameter:
        return f"its weight is a {type(module.weight).__name__}"
    if is_wrapped(module):
        return "its forward was replaced"
    if set(module._parameters) != {"weight", "bias"}:
        return f"has parameters {sorted(module._parameters)}"
    return None


def _output_embedding(model: nn.Module) -> Optional[nn.Module]:
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def _is_tied_head(model: nn.Module, linear: nn.Module) -> bool:
    return linear is _output_embedding(model) and hasattr(model, "config")


def _heads(model: nn.Module) -> Dict[str, str]:
    """Names of the output embedding, and of what a transformers model has outside its base model,
    and which of the two it is."""
    heads: Dict[str, str] = {}
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and prefix in model._modules:
        others = [name for name, child in model.named_children() if name != prefix]
        for name in others:
            inside = model.get_submodule(name).named_modules(prefix=name)
            heads.update({inner: "output head" for inner, _ in inside})
    embedding = _output_embedding(model)
    heads.update({n: "output embedding" for n, m in model.named_modules() if m is embedding})
    return heads


def _routers(model: nn.Module) -> Set[str]:
    """Names of all modules inside of routers: with rounded weights they would choose other
    experts."""
    found: Set[str] = set()
    for prefix, layer in model.named_modules():
        if not {"experts", "router"} & set(layer._modules):
            continue
        for name, child in layer.named_children():
            if name in ("gate", "router") or name.endswith("expert_gate"):
                inside = child.named_modules(prefix=f"{prefix}.{name}" if prefix else name)
                found |= {inner for inner, _ in inside}
    return found


def _other_matrices(model: nn.Module) -> Dict[str, str]:
    """Names and classes of modules that hold matrices and are no linears, nor part of one."""
    found: Dict[str, str] = {}
    linears: Set[str] = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[0] in linears or hasattr(module, "in_features"):
            linears.add(name)
        elif not isinstance(module, (Experts, nn.Embedding)) and not is_experts(module):
            own = [p for p in module._parameters.values() if p is not None]
            if any(p.numel() > max(p.shape, default=1) for p in own):
                found[name] = f"is a {type(module).__name__}"
    return found


def _adapters(model: nn.Module) -> Set[str]:
    """Names inside of modules that wrap a ``base_layer``, as peft's do, bar that layer itself."""
    found: Set[str] = set()
    for prefix, module in model.named_modules():
        if "base_layer" in module._modules:
            inside = {f"{prefix}.{name}" for name, _ in module.named_modules() if name}
            base = f"{prefix}.base_layer"
            found |= {n for n in inside if n != base and not n.startswith(f"{base}.")}
    return found


def _native(model: nn.Module, fp8_dtype: Optional[torch.dtype]) -> torch.dtype:
    if fp8_dtype is not None:
        return fp8_dtype
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return native_fp8_dtype(device)
