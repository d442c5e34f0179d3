"""Reads the headers of a checkpoint's files before any tensor is loaded: names, shapes and dtypes.
The config says what was meant to be FP8, the headers say what is."""

import importlib
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import torch

# safetensors' names of what FP8 checkpoints hold, and of what may stand beside it.
_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
    "F4": getattr(torch, "float4_e2m1fn_x2", None),
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class Header(NamedTuple):
    """The header of a tensor in a file; ``dtype`` is None if this torch has no such type."""

    dtype: Optional[torch.dtype]
    shape: Tuple[int, ...]


def header_of(stored: Any) -> Header:
    """Returns the header of a tensor, or of what safetensors gives in place of one that is not read
    yet."""
    if isinstance(stored, torch.Tensor):
        return Header(stored.dtype, (*stored.shape,))
    return Header(_DTYPES.get(stored.get_dtype()), (*stored.get_shape(),))


def read_headers(files: Optional[Sequence[str]]) -> Dict[str, Header]:
    """Reads each tensor's header, by its name in a checkpoint's files; None, as for a model that is
    loaded from a state dict: nothing is known."""
    found: Dict[str, Header] = {}
    for file in files or ():
        if file.endswith(".safetensors"):
            with importlib.import_module("safetensors").safe_open(file, framework="pt") as opened:
                names = opened.keys()  # it is no iterable itself
                found.update({name: header_of(opened.get_slice(name)) for name in names})
        else:
            transformers = importlib.import_module("transformers.modeling_utils")
            tensors = transformers.load_state_dict(file, map_location="meta")
            found.update({name: header_of(tensor) for name, tensor in tensors.items()})
    return found


def by_module(model: Any, headers: Dict[str, Header]) -> Dict[str, Dict[str, Header]]:
    """Sorts headers by module: name of a module of a transformers model, then names in the files of
    all tensors that transformers would load into it. What belongs to no module is under ``""``.

    Call it before modules are replaced. Scales go where their weight goes, and of experts that
    stand one by one in the files all go to the module that holds them joined.
    """
    core = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, core.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, core.WeightConverter)]
    own, base = model.state_dict(), model.base_model_prefix
    modules = {name for name, _ in model.named_modules()}

    def owner(name: str) -> str:
        renamed, _ = core.rename_source_key(name, renamings, converters, base, own)
        # transformers adds or drops the prefix only where that makes a parameter's name.
        for key in (renamed, f"{base}.{renamed}", renamed.removeprefix(f"{base}.")):
            while key not in modules:
                key = key.rpartition(".")[0]
            if key not in ("", base):
                return key
        return ""

    owners: Dict[str, str] = {}  # of the names of linears in files
    found: Dict[str, Dict[str, Header]] = {}
    for name, header in headers.items():
        linear = name.rpartition(".")[0]
        if any(f"{linear}.{weight}" in headers for weight in ("weight", "weight_packed")):
            # Converters know weights alone, by whole names: scales are asked for by their weight's.
            if linear not in owners:
                owners[linear] = owner(f"{linear}.weight")
            place = owners[linear]
        else:
            place = owner(name)
        found.setdefault(place, {})[name] = header
    return found
