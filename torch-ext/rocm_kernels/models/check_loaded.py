"""Checks after loading that each FP8 weight and each scale was set from the files.

transformers leaves a tensor that no file has as it was made, casts an FP8 tensor into a 16-bit
parameter without its scale, and drops tensors that no parameter takes. Such a model runs, and its
numbers are wrong.
"""

import functools
import importlib
import inspect
import re
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch import nn

from .experts import Experts
from .stored_tensors import Header, header_of

# Of a cache in FP8. Those of keys and values have a place (cache.py), of one tensor for both, of
# queries and of probabilities nothing here has.
CACHE_SCALES = r"\.(q|k|v|kv|prob)_(scale|zero_point)$|\.(output|kv_cache)_scale$"
# Static ones of experts' inputs: quantize_model_ has one a token in their place.
INPUTS_OF_EXPERTS = r"\.experts\.(\d+\.)?\w+[._](input|activation)_scale$"
_SCALE = re.compile(r"scale(_inv|s)?$|scale_weight$")
_FP8 = tuple(getattr(torch, f"float8_{e}") for e in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
_METHODS = ("fp8", "mxfp8")  # transformers' own modules, whose parameters are named as ours are


def checking(load: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``convert_and_load_state_dict_in_model``, and the check after it."""
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_and_check(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model, config = given["model"], given["load_config"]
        own = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        headers = {name: header_of(stored) for name, stored in given["state_dict"].items()}
        result = load(*args, **kwargs)
        if _is_ours_to_check(model, config.hf_quantizer) and not result[0].conversion_errors:
            problems = list(_problems(model, own, headers, config, result[0].missing_keys))
            if problems:
                source = config.pretrained_model_name_or_path
                raise ValueError(f"{source} cannot be loaded as it is: " + "; ".join(problems))
            if hasattr(config.hf_quantizer, "finish_loading"):
                config.hf_quantizer.finish_loading(model)
        return result

    return load_and_check


def _is_ours_to_check(model: Any, quantizer: Any) -> bool:
    if getattr(model, "_hf_peft_config_loaded", False):  # an adapter's file, beside the model's
        return False
    if quantizer is None:
        return True
    if not quantizer.pre_quantized:  # transformers makes FP8 of 16 bits as it loads them
        return False
    if hasattr(quantizer, "finish_loading"):
        return True
    method = getattr(quantizer.quantization_config, "quant_method", "")
    return getattr(method, "value", method) in _METHODS


class _Landing(NamedTuple):
    """Where transformers takes a tensor of a file: the parameter's name, and whether a conversion
    of a quantizer's makes something else of it on the way."""

    name: str
    is_converted: bool


def _landings(
    model: Any, own: Dict[str, torch.dtype], names: Sequence[str], conversions: List[Any]
) -> Dict[str, _Landing]:
    core = importlib.import_module("transformers.core_model_loading")
    renamings = [c for c in conversions if isinstance(c, core.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, core.WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    base, found = model.base_model_prefix, {}
    for name in names:
        landed, pattern = core.rename_source_key(name, renamings, converters, base, own)
        if landed not in own and name in own:
            landed, pattern = core.rename_source_key(name, [], [], base, own)
        operations = of_pattern[pattern].operations if pattern is not None else ()
        converted = any(getattr(operation, "hf_quantizer", None) for operation in operations)
        found[name] = _Landing(landed, converted)
    return found


def _problems(
    model: Any,
    own: Dict[str, torch.dtype],
    headers: Dict[str, Header],
    config: Any,
    missing: Sequence[str],
) -> Iterator[str]:
    """Sentences; none if all is where it belongs."""
    landings = _landings(model, own, list(headers), config.weight_mapping or [])
    fp8 = {name for name, dtype in own.items() if dtype in _FP8}
    holders = {_owner(name) for name in fp8}
    holders |= {name for name, module in model.named_modules() if isinstance(module, Experts)}
    scales = {name for name in own if _owner(name) in holders and _SCALE.search(name)}
    needed = fp8 | {name for name in scales if not re.search(INPUTS_OF_EXPERTS, name)}
    unset = sorted(needed & set(missing) - set(getattr(model, "all_tied_weights_keys", ())))
    if unset:
        yield (
            f"the files have nothing for {_few(unset)}, and an FP8 weight needs itself and each "
            "scale that its quantization_config speaks of: use the files of which none is left "
            "out, or name these modules in the config's list of what stays in 16 bits"
        )
    wide = [
        f"{landing.name} ({headers[name].dtype})"
        for name, landing in landings.items()
        if landing.name in fp8
        and headers[name].dtype != own[landing.name]
        and not landing.is_converted
    ]
    if wide:
        yield (
            f"quantization_config says {torch.float8_e4m3fn} of {_few(wide)}, and the files do "
            "not: name these modules in the config's list of what stays as it is"
        )
    uncounted = [
        name
        for name, landing in landings.items()
        if headers[name].dtype in _FP8
        and landing.name in own
        and landing.name not in fp8
        and not landing.is_converted
        and (config.hf_quantizer is not None or _scale_of(name, headers) is not None)
    ]
    if uncounted:
        yield (
            f"the files have {_few(uncounted)} in FP8, and quantization_config does not say so, so "
            "its scales would be left out: take these modules off the config's list of what stays "
            "in 16 bits, or, if config.json has no quantization_config, add what made the files"
        )
    left_out = re.compile(f"{CACHE_SCALES}|{INPUTS_OF_EXPERTS}")
    unused = [
        name
        for name, landing in landings.items()
        if _SCALE.search(name)
        and landing.name not in own
        and not left_out.search(name)
        and any(landings[w].name in fp8 for w in _weights_of(name) if w in landings)
    ]
    if unused:
        yield (
            f"nothing takes the scales {_few(unused)}, though it takes their weights: "
            "quantization_config must say how these modules were quantised, inputs too"
        )


def require_set(name: str, module: nn.Module) -> None:
    """Raises a ValueError if a scale of an FP8 linear or of FP8 experts was never set, however they
    were loaded. Memory that nobody has set may look like a scale; that transformers has loaded the
    weight and not the scale tells it, as long as neither was copied."""
    weight = next((p for p in module.parameters() if p.dtype in _FP8), None)
    for key, scale in (*module.named_parameters(), *module.named_buffers()):
        if not _SCALE.search(key) or scale.device.type == "meta":
            continue
        if not hasattr(module, "in_features") and "activation_scale" in key:
            continue  # one a token takes its place
        unloaded = isinstance(scale, nn.Parameter) and not _is_loaded(scale) and _is_loaded(weight)
        values = scale.detach().float()
        if unloaded or not bool(((values >= 0) & values.isfinite()).all()):
            what = "was in no file" if unloaded else "is not finite, or below zero"
            raise ValueError(
                f"{name} is FP8, and its {key} {what}: load the model within fp8_checkpoints(), "
                f"which says what is missing; skip=[{name!r}] leaves it as it is"
            )


def _is_loaded(parameter: Optional[torch.Tensor]) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _weights_of(scale: str) -> Sequence[str]:
    """What a scale's weight may be called."""
    return f"{_owner(scale)}.weight", re.sub(r"_scale(_inv|s)?$", "", scale)


def _scale_of(weight: str, headers: Dict[str, Header]) -> Optional[str]:
    ends = ("_scale", "_scale_inv")
    names = [weight + end for end in ends] + [f"{_owner(weight)}.scale"]
    return next((name for name in names if name in headers), None)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
