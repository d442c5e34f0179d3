"""Loads FP8 checkpoints through transformers without leaving FP8, and saves them.

transformers turns an FP8 checkpoint into 16 bits where there is no GPU, and loads most formats only
with a package of their makers. :func:`fp8_checkpoints` has it load them into ``FP8Linear``.
transformers is imported when a model of it, or that function, needs it, not before.
"""

import contextlib
import functools
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import nn

from ..functional import FP8_DTYPES
from .cache import place_cache_scales, renamings_of_cache_scales
from .check_loaded import CACHE_SCALES, INPUTS_OF_EXPERTS, checking
from .compute_dtype import keep_dtype
from .convert_experts import is_experts
from .experts import Experts
from .formats import BY_METHOD, FINEGRAINED, FORMATS, Layout, describe, layout_of_linear, layouts_of
from .hooks import is_offloaded
from .join_experts import add_expert_conversions, restore_conversions
from .linear import FP8Linear, FP8LinearPart
from .names import stored_names
from .pickling import reduced
from .store_experts import store_experts
from .stored_experts import (
    is_taken,
    layout_of_experts,
    place_experts,
    place_finegrained_experts,
)
from .stored_linears import (
    conversions_of_embeddings,
    conversions_of_linears,
    left_in_16_bits,
    place_linears,
    regroup_linears,
)
from .stored_tensors import by_module, read_headers


@contextlib.contextmanager
def fp8_checkpoints() -> Iterator[None]:
    """Within it ``from_pretrained`` keeps FP8 checkpoints in FP8, on any device.

    Finegrained FP8 loads into transformers' own linears and experts; compressed-tensors, AMD Quark,
    NVIDIA ModelOpt, AutoFP8, FBGEMM and MXFP8 into :class:`FP8Linear`, with scales in float32, and
    without those packages; GPT-OSS's experts stay MXFP4. :func:`quantize_model_` adopts all of
    these. What is not FP8, or FP8 in a way that is not known here, is left to transformers. Scales
    of a KV cache become buffers of the attention, for :func:`fp8_static_cache`.

    Raises:
        ImportError: transformers is too old for it.
        ValueError: by ``from_pretrained``: an FP8 weight or a scale is missing, would be cast
            without its scale, or is not what the checkpoint's ``quantization_config`` says; or
            that says what nothing here computes.
    """
    _require_conversions()
    auto = importlib.import_module("transformers.quantizers.auto")
    modeling = importlib.import_module("transformers.modeling_utils")
    tables = auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    quantizers, configs = tables
    before = [dict(table) for table in tables]
    load, choose = modeling.convert_and_load_state_dict_in_model, modeling.get_hf_quantizer
    try:
        modeling.convert_and_load_state_dict_in_model = checking(load)
        modeling.get_hf_quantizer = _reading_hf_quant_config(choose)
        for method in (format.method for format in FORMATS if format.read_config is not None):
            quantizers[method] = _chooser(quantizers.get(method))
            configs[method] = _config_class(configs.get(method))
        yield
    finally:
        for table, old in zip(tables, before):
            table.clear()
            table.update(old)
        modeling.convert_and_load_state_dict_in_model = load
        modeling.get_hf_quantizer = choose


def _reading_hf_quant_config(choose: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``get_hf_quantizer``, which knows of ModelOpt's file beside config.json."""

    @functools.wraps(choose)
    def read_and_choose(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        text = config.get_text_config(decoder=True)
        said = [getattr(c, "quantization_config", None) for c in (config, text)]
        if quantization_config is None and said == [None, None]:
            found = _hf_quant_config(getattr(config, "name_or_path", ""))
            if found is not None:
                config.quantization_config = found
        return choose(config, quantization_config, *args, **kwargs)

    return read_and_choose


def _hf_quant_config(checkpoint: str) -> Optional[Dict[str, Any]]:
    hub = importlib.import_module("transformers.utils.hub")
    file = Path(checkpoint, "hf_quant_config.json")
    if not Path(checkpoint).is_dir():  # of the Hub, so it is beside a config that is in the cache
        file = hub.cached_file(
            checkpoint,
            file.name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if file is None or not Path(file).is_file():
        return None
    said = json.loads(Path(file).read_text())
    has_weights = (said.get("quantization") or {}).get("quant_algo") is not None
    return {"quant_method": "modelopt", **said} if has_weights else None


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
    if not names:
        return
    if not any(isinstance(m, (FP8Linear, Experts)) for m in model.modules()):
        if type(getattr(model, "hf_quantizer", None)) is _fp8_quantizer():
            # All that was FP8 has been dequantised.
            model.hf_quantizer.remove_quantization_config(model)
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
        whole = isinstance(module, FP8Linear) and not module.joins
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
    """Whether a module has a weight that others' code may hold in FP8, as a linear or a router
    does."""
    weight = module._parameters.get("weight")
    matrix = weight is not None and weight.dim() == 2 and weight.dtype not in FP8_DTYPES
    return matrix and not isinstance(module, nn.Embedding)


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


def _chooser(other: Optional[type]) -> Any:
    def quantizer(config: Any, **kwargs: Any) -> Any:
        if type(config).__name__ == "Fp8CheckpointConfig":
            return _fp8_quantizer()(config, **kwargs)
        method = getattr(config, "quant_method", "")  # a text of a file, or transformers' enum
        format = BY_METHOD[getattr(method, "value", method)]
        return (_finegrained_quantizer(other) if format.has_modules else other)(config, **kwargs)

    return quantizer


@functools.cache
def _finegrained_quantizer(base: type) -> type:
    """transformers' own, on any machine: its linears do that, and only its test of the machine
    stands in the way. Scales may have the names that others' files give them. Of experts, those
    that its own module cannot hold are ours."""
    core = importlib.import_module("transformers.core_model_loading")

    class FinegrainedQuantizer(base):
        def validate_environment(self, *_: Any, **__: Any) -> None:
            pass

        def _process_model_before_weight_loading(self, model: Any, **given: Any) -> Any:
            said = self.quantization_config
            files = by_module(model, read_headers(given.get("checkpoint_files")))
            taken = place_finegrained_experts(model, said, files)
            if said.modules_to_not_convert is not None:
                taken += left_in_16_bits(model, said.modules_to_not_convert, files)
            if taken:
                _ignore_unexpected(model, INPUTS_OF_EXPERTS)
                said.modules_to_not_convert = [
                    *(said.modules_to_not_convert or self.get_modules_to_not_convert(model)),
                    *taken,
                ]
            return super()._process_model_before_weight_loading(model, **given)

        def update_weight_conversions(self, conversions: Any, model: Any) -> Any:
            names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
            if any(map(is_taken, model.modules())):
                conversions = add_expert_conversions(conversions, model)
            return [
                *(core.WeightRenaming(rf"\.{old}$", f".{new}") for old, new in names.items()),
                *super().update_weight_conversions(conversions, model),
            ]

        def finish_loading(self, model: Any) -> None:
            model._weight_conversions = restore_conversions(model._weight_conversions)
            keep_dtype(model)

        def get_state_dict_and_metadata(self, model: Any) -> Any:
            _require_all_here(model)
            if not any(isinstance(module, Experts) for module in model.modules()):
                return super().get_state_dict_and_metadata(model)
            state_dict = model.state_dict()
            store_experts(model, state_dict, "scale_inv")
            return state_dict, {}

        def __reduce__(self) -> Tuple:
            return reduced(self, _finegrained_quantizer, base)

    return FinegrainedQuantizer


@functools.cache
def _fp8_quantizer() -> type:
    base = importlib.import_module("transformers.quantizers.base")

    class Fp8Quantizer(base.HfQuantizer):
        """Loads into ``FP8Linear``, and saves a model that has them."""

        embeddings = ()  # names of those that the files have in FP8

        def _convert_model_for_quantization(self, model: Any) -> None:
            """transformers has Llama 4's experts as linears then; here they are one module."""

        def _process_model_before_weight_loading(
            self, model: Any, checkpoint_files: Any = None, **_: Any
        ) -> None:
            layout_of = layouts_of(self.quantization_config.to_dict())
            files = by_module(model, read_headers(checkpoint_files))
            self.embeddings = place_linears(model, layout_of, files)
            place_experts(model, layout_of, files)
            place_cache_scales(model, files)
            _ignore_unexpected(model, CACHE_SCALES, INPUTS_OF_EXPERTS)

        def finish_loading(self, model: Any) -> None:
            """Once all tensors are there, and nothing has been moved away from its device."""
            regroup_linears(model)
            model._weight_conversions = restore_conversions(model._weight_conversions)
            keep_dtype(model)

        def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
            return [
                *conversions_of_embeddings(self, self.embeddings),
                *add_expert_conversions(weight_conversions, model),
                *renamings_of_cache_scales(),
                *conversions_of_linears(),
            ]

        def get_state_dict_and_metadata(self, model: Any) -> Any:
            _require_conversions()
            _require_all_ours(model)
            _require_all_here(model)
            state_dict = model.state_dict()
            format = BY_METHOD[model.config.quantization_config.quant_method]
            names = {
                "weight_scale_inv": format.weight_scale,
                "activation_scale": format.input_scale,
            }
            store_experts(model, state_dict, format.weight_scale.partition("_")[2])
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


def _require_all_here(model: Any) -> None:
    """Refuses to save a model with offloaded FP8 weights: transformers looks for these by the names
    of a state dict, of which the parts of a joined linear have none of their own."""
    for name, module in model.named_modules():
        if isinstance(module, (FP8Linear, Experts)) and is_offloaded(module):
            raise ValueError(
                "a model with FP8 weights must be on a device to be saved, got offloaded weights "
                f"of {name}: save it before accelerate offloads it, or call "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
            )


def _ignore_unexpected(model: Any, *names: str) -> None:
    """Has transformers say nothing of tensors, by patterns of their names, that nothing takes."""
    known = set(model._keys_to_ignore_on_load_unexpected or ())
    model._keys_to_ignore_on_load_unexpected = known | {*names}


def _require_all_ours(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if parameter.dtype in FP8_DTYPES and not isinstance(owner, (FP8Linear, Experts)):
            raise ValueError(
                f"{name} is FP8 of another format, a {type(owner).__name__}, and one file holds "
                "one format: save the model before quantize_model_"
            )
        if getattr(owner, "scale_fmt", None) is not None:
            _require_powers_of_two(model, name, parameter)
        if getattr(owner, "scale_ub", None) is not None:
            raise ValueError(
                f"{name} has a bound on its input's scale, as FBGEMM does, and compressed-tensors "
                "cannot say so: save the model before quantize_model_, or quantize it with "
                "activations='none'"
            )


def _require_powers_of_two(model: Any, name: str, parameter: torch.Tensor) -> None:
    """Refuses to save scales of inputs that are powers of two to a file that cannot say so: only
    finegrained files have a ``scale_fmt``, for inputs and weights."""
    if model.config.quantization_config.quant_method != FINEGRAINED.method:
        raise ValueError(
            f"{name} has inputs with scales that are powers of two, and compressed-tensors cannot "
            "say so: save the model before quantize_model_, or quantize it with activations='none'"
        )
    if name.endswith("scale_inv") and not bool((parameter.frexp().mantissa == 0.5).all()):
        raise ValueError(
            f"{name} must be powers of two, as its input's scales are: a checkpoint with "
            "scale_fmt='ue8m0' holds no others"
        )
