"""The names under which a ``quantization_config`` may list a module.

A list has the names of the time when the file was written: those of the model's class, those in the
files, or either with or without the prefix of a base model or of a multimodal model.
"""

import importlib
from typing import Any, Dict, Iterable, List, Tuple


def stored_names(model: Any, names: Iterable[str]) -> Dict[str, str]:
    """What a transformers model's modules are called in its checkpoints: as it was loaded, or as
    transformers would write it."""
    core = importlib.import_module("transformers.core_model_loading")
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        # Which file has such a prefix is known after loading alone.
        conversions = [c for c in _conversions(model) if not isinstance(c, core.PrefixChange)]
    renamings = _back(core, conversions)
    return {name: _renamed(name, renamings) for name in names}


def listed_names(
    model: Any, modules: Iterable[str], files: Dict[str, Iterable[str]]
) -> Dict[str, Tuple[str, ...]]:
    """All names of each module that a list may have; ``files`` are the names of the tensors that a
    checkpoint's files have for it, as far as they are known."""
    core = importlib.import_module("transformers.core_model_loading")
    conversions = _conversions(model)
    plain = [c for c in conversions if not isinstance(c, core.PrefixChange)]
    ways = [_back(core, conversions), _back(core, plain)]
    ways.append([r for r in ways[0] if isinstance(r, core.PrefixChange)])
    base, found = model.base_model_prefix, {}
    for name in modules:
        own = {name: None, **{tensor.rpartition(".")[0]: None for tensor in files.get(name, ())}}
        if base and base not in model._modules:  # a base model, whose files may have a head, too
            own[f"{base}.{name}"] = None
        back = {_renamed(known, renamings): None for known in own for renamings in ways}
        found[name] = (*own, *(known for known in back if known not in own))
    return found


def _conversions(model: Any) -> List[Any]:
    mapping = importlib.import_module("transformers.conversion_mapping")
    return mapping.get_model_conversion_mapping(model, add_legacy=False)


def _back(core: Any, conversions: List[Any]) -> List[Any]:
    """Reverses the renamings, from a model's names to those of files."""
    return [c.reverse_transform() for c in conversions[::-1] if isinstance(c, core.WeightRenaming)]


def _renamed(name: str, renamings: List[Any]) -> str:
    weight = f"{name}.weight"
    for renaming in renamings:  # in turn; transformers has a function for it from 5.21 on
        weight, _ = renaming.rename_source_key(weight)
    return weight.rpartition(".")[0]
