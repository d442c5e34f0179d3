"""FP8 checkpoints through transformers: kept in FP8 as they are loaded, and saved.

transformers turns an FP8 checkpoint into 16 bits where there is no GPU, and needs a package of each
format's makers to load it at all. :func:`fp8_checkpoints` has it loaded into ``FP8Linear``. Nothing
of transformers is imported before a model of its, or that function, asks for it.
"""

import contextlib
import functools
import importlib
import re
import sys
from typing import Any, Dict, Iterator, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES
from .adopt import weight_scale
from .convert_experts import is_experts
from .experts import Experts
from .formats import FINEGRAINED, Layout, describe, layout_of_linear, layouts_of
from .linear import FP8Linear, FP8LinearPart, computes_linear
from .pickling import reduced
from .stored_experts import (
    layout_of_experts,
    place_experts,
    store_experts,
    stored_names,
    with_conversions,
)

_FORMATS = ("compressed-tensors", "fbgemm_fp8", "mxfp4", "quark")


@contextlib.contextmanager
def fp8_checkpoints() -> Iterator[None]:
    """Within it ``from_pretrained`` keeps FP8 checkpoints in FP8, on any device.

    Finegrained FP8 loads into transformers' own linears and experts, compressed-tensors, FBGEMM and
    AMD Quark into :class:`FP8Linear`, with scales in float32, and without those packages; GPT-OSS's
    experts stay MXFP4. :func:`quantize_model_` adopts all of these. What is not FP8, or FP8 in a
    way that is not known here, is left to transformers. Scales of a KV cache are read over: the
    cache stays in 16 bits. A transformers that is too old for it raises an ImportError.
    """
    _require_conversions()
    auto = importlib.import_module("transformers.quantizers.auto")
    quantizers, configs = auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    before = dict(quantizers), dict(configs)
    try:
        # transformers' own linears do; only its test of the machine stands in the way.
        quantizers["fp8"] = _on_any_machine(quantizers["fp8"])
        for method in _FORMATS:
            configs[method] = _config_class(configs[method])
            quantizers[method] = _chooser(quantizers[method])
        yield
    finally:
        quantizers.update(before[0])
        configs.update(before[1])


def _require_conversions() -> None:
    loading = importlib.import_module("transformers.core_model_loading")
    if not hasattr(loading.WeightTransform, "copy"):
        version = importlib.import_module("transformers").__version__
        raise ImportError(
            f"FP8 models are loaded and saved with transformers 5.21 or later, got {version}: "
            "install a later one; a 16-bit model is quantised and run with this one too"
        )


def names_in_files(model: nn.Module) -> Dict[str, str]:
    """What modules of a transformers model are called in its checkpoints; of others nothing."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    return stored_names(model, [name for name, _ in model.named_modules()])


def describe_checkpoint(model: nn.Module, names: Dict[str, str]) -> None:
    """Has ``save_pretrained`` write a quantised transformers model as an FP8 checkpoint; ``names``
    are its :func:`names_in_files`."""
    if not names or not any(isinstance(m, (FP8Linear, Experts)) for m in model.modules()):
        return
    if not any(hasattr(module, "quantization_scheme") for module in model.modules()):
        hook = getattr(model, "ct_decompress_hook", None)
        if hook is not None:  # compressed-tensors' own, which has nothing left to do
            hook.remove()
    if getattr(model, "hf_quantizer", None) is not None:
        model._weight_conversions = None  # of the checkpoint that it came from
    model.hf_quantizer = _fp8_quantizer()(None, pre_quantized=True)
    model.config.quantization_config = _config_class(None)(**_described(model, names))


def _described(model: Any, names_in_files: Dict[str, str]) -> Dict[str, Any]:
    """The model's ``quantization_config``: with the names that modules have in its files, by which
    servers go, and with its own, by which transformers goes."""
    layouts: Dict[str, Layout] = {}
    ignored = []
    for name, module in model.named_modules():
        names = dict.fromkeys((name, names_in_files.get(name, name)))
        experts = [rf"re:{re.escape(name)}\." for name in names]
        whole = isinstance(module, FP8Linear) and not module.is_joined
        if whole or isinstance(module, FP8LinearPart):
            layouts.update(dict.fromkeys(names, layout_of_linear(module)))
        elif isinstance(module, Experts):
            layouts.update(dict.fromkeys(experts, layout_of_experts(module)))
        elif is_experts(module):
            ignored += experts
        elif _could_be_quantised(module):
            ignored += names
    return describe(layouts, ignored)


def _could_be_quantised(module: nn.Module) -> bool:
    """Also a router, say, which others' code may have as a linear."""
    weight = module._parameters.get("weight")
    matrix = weight is not None and weight.dim() == 2 and weight.dtype not in FP8_DTYPES
    return matrix and not isinstance(module, nn.Embedding)


@functools.cache
def _on_any_machine(quantizer: type) -> type:
    class OnAnyMachine(quantizer):
        def validate_environment(self, *_: Any, **__: Any) -> None:
            pass

        def __reduce__(self) -> Tuple:
            return reduced(self, _on_any_machine, quantizer)

    return OnAnyMachine


@functools.cache
def _config_class(other: Any) -> type:
    base = importlib.import_module("transformers.utils.quantization_config")

    class Fp8CheckpointConfig(base.QuantizationConfigMixin):
        """A ``quantization_config`` as it stands in a checkpoint's config."""

        def __init__(self, **stored: Any) -> None:
            self.stored, self.quant_method = stored, stored["quant_method"]

        @classmethod
        def from_dict(cls, config: Dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if layouts_of(config) is None:
                return other.from_dict(config, *args, **kwargs)
            return cls(**config)

        def to_dict(self) -> Dict[str, Any]:
            return dict(self.stored)

        def __reduce__(self) -> Tuple:
            return reduced(self, _config_class, None)

    return Fp8CheckpointConfig


def _chooser(other: type) -> Any:
    def quantizer(config: Any, **kwargs: Any) -> Any:
        ours = type(config).__name__ == "Fp8CheckpointConfig"
        return (_fp8_quantizer() if ours else other)(config, **kwargs)

    return quantizer


@functools.cache
def _fp8_quantizer() -> type:
    base = importlib.import_module("transformers.quantizers.base")
    loading = importlib.import_module("transformers.core_model_loading")

    class StoredScale(loading.ConversionOps):
        """A scale of any shape, as the linear that it belongs to has it."""

        def convert(self, tensors: Dict, model: Any, full_layer_name: str, **_: Any) -> Dict:
            (scale,) = tensors.values()
            scale = scale[0] if isinstance(scale, list) else scale
            linear = model.get_submodule(full_layer_name.rpartition(".")[0])
            if full_layer_name.endswith("activation_scale"):
                return {full_layer_name: scale.float().reshape(1)}
            n, k = linear.out_features, linear.in_features
            blocks = scale.dim() == 2 and scale.shape[0] != n and scale.numel() > 1
            scale = weight_scale(scale, n, k, blocks)
            if scale.numel() == 1:  # of a weight that is one block, too
                scale = scale.expand(linear.weight_scale_inv.shape).contiguous()
            return {full_layer_name: scale}

        @property
        def reverse_op(self) -> Any:
            return self

    class Fp8Quantizer(base.HfQuantizer):
        """Loads into ``FP8Linear``, and saves a model that has them."""

        def _convert_model_for_quantization(self, model: Any) -> None:
            """transformers has Llama 4's experts as linears then; here they are one module."""

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            layout_of = layouts_of(self.quantization_config.to_dict())
            linears = {n: m for n, m in model.named_modules() if computes_linear(m)}
            for name, stored in stored_names(model, linears).items():
                layout = layout_of(name, stored)
                if layout is None:
                    continue
                if layout.weights == "mxfp4":
                    raise ValueError(
                        f"{name} is MXFP4 in this checkpoint, which experts alone can be here: "
                        "load this model without fp8_checkpoints"
                    )
                model.set_submodule(name, _empty(linears[name], layout))
            place_experts(model, layout_of)
            ignored = set(model._keys_to_ignore_on_load_unexpected or ())
            ignored |= {r"\.(k|v)_scale$", r"\.output_scale$"}  # of a KV cache
            # Static ones of experts' inputs: one a token is finer.
            ignored |= {r"\.\d+\.\w+\.(input|activation)_scale$"}
            model._keys_to_ignore_on_load_unexpected = ignored

        def get_weight_conversions(self) -> Any:
            names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
            return [
                loading.WeightConverter(f"{stored}$", name, operations=[StoredScale()])
                for stored, name in names.items()
            ]

        def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
            return with_conversions(weight_conversions, model) + self.get_weight_conversions()

        def get_state_dict_and_metadata(self, model: Any) -> Any:
            _require_conversions()
            _require_all_ours(model)
            state_dict = model.state_dict()
            finegrained = model.config.quantization_config.quant_method == FINEGRAINED
            names = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
            if finegrained:
                names = {name: name for name in names}
            store_experts(model, state_dict, "scale_inv" if finegrained else "scale")
            for prefix, module in model.named_modules():
                if isinstance(module, (FP8Linear, FP8LinearPart)):
                    for name, stored in names.items():
                        if f"{prefix}.{name}" in state_dict:
                            # A copy: parts may share one value, and a file holds each by itself.
                            scale = state_dict.pop(f"{prefix}.{name}").clone()
                            state_dict[f"{prefix}.{stored}"] = scale
            return state_dict, {}

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

        @property
        def is_compileable(self) -> bool:
            return True

        def __reduce__(self) -> Tuple:
            return reduced(self, _fp8_quantizer)

    return Fp8Quantizer


def _empty(linear: nn.Linear, layout: Any) -> FP8Linear:
    n, k = linear.out_features, linear.in_features
    device, static = linear.weight.device, layout.inputs == "static"
    new = FP8Linear(
        torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(layout.scale_shape(n, k), dtype=torch.float32, device=device),
        linear.bias,
        layout.inputs,
        activation_scale=torch.empty(1, device=device) if static else None,
        scale_ub=layout.scale_ub,
    )
    new.is_loaded = True
    return new


def _require_all_ours(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if parameter.dtype in FP8_DTYPES and not isinstance(owner, (FP8Linear, Experts)):
            raise ValueError(
                f"{name} is FP8 of another format, a {type(owner).__name__}, and one file holds "
                "one format: save the model before quantize_model_"
            )
        if getattr(owner, "scale_ub", None) is not None:
            raise ValueError(
                f"{name} has a bound on its input's scale, as FBGEMM does, and compressed-tensors "
                "cannot say so: save the model before quantize_model_, or quantize it with "
                "activations='none'"
            )
