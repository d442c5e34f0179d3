"""What the code of a transformers model says of its attention: whether masks are handed on as they
were made, or worked on, which attention.py's spans are not for."""

import ast
import functools
import inspect
import sys
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch import nn


class Traits(NamedTuple):
    """What a model's code says of its attention.

    reads_masks: it does more with masks than to hand them on to its attention function: it adds
        them up, joins or cuts them, and wants those that it knows.
    eager: it has no other attention than its own.
    flash: it may run on flash attention.
    chooses_keys: it has chosen which keys each query sees, which it tells a function that it does
        not know by an argument of its own, ``indices``, in place of a mask.
    """

    reads_masks: bool
    eager: bool
    flash: bool
    chooses_keys: bool


@torch.compiler.assume_constant_result
def traits_of(config: type) -> Traits:
    return _find_traits(config)


@functools.cache
def _find_traits(config: type) -> Traits:
    """Of all models with configurations of a class. Those that transformers takes for fit for flash
    attention, which has no such masks, hand them on; the others' source is read."""
    modeling = sys.modules["transformers.modeling_utils"]
    models = [modeling.PreTrainedModel]
    for model in models:
        models += [each for each in model.__subclasses__() if each not in models]
    for base in config.__mro__:
        of_base = [model for model in models if getattr(model, "config_class", None) is base]
        if of_base:
            break
    else:  # a part's, which no model names as its own: those that are written beside it
        beside = config.__module__.replace("configuration_", "modeling_")
        of_base = [model for model in models if model.__module__ == beside]
        if not of_base:
            return Traits(False, False, True, False)
    flash = any(getattr(model, "_supports_flash_attn", False) for model in of_base)
    sdpa = any(getattr(model, "_supports_sdpa", False) for model in of_base)
    sources = {sys.modules.get(model.__module__) for model in of_base}
    trees = [*map(_classes_of, sources)]
    return Traits(
        not flash and any(map(_reads_masks, trees)), not sdpa, flash, any(map(_tells_keys, trees))
    )


def theirs_for(model: nn.Module) -> Optional[str]:
    """The name of transformers' attention that a model needs, since layers of it choose keys; None:
    none does."""
    for config in (getattr(module, "config", None) for module in model.modules()):
        if traits_of(type(config)).chooses_keys and not PLAIN.issuperset(
            getattr(config, "layer_types", None) or ()
        ):
            return "eager" if traits_of(type(config)).eager else "sdpa"
    return None


PLAIN = {"full_attention", "sliding_attention", "chunked_attention"}  # see what their mask says


def require_no_chosen_keys(module: nn.Module, arguments: Dict[str, Any]) -> None:
    told = [name for name in arguments if name.endswith("indices") and arguments[name] is not None]
    if told:
        raise ValueError(
            f"an attention that sees all that its mask says is required, got "
            f"{type(module).__name__}, which chooses keys by {told[0]}: call use_attention with "
            f"the model, which gives it transformers' own"
        )


def _classes_of(module: Any) -> Optional[List[ast.ClassDef]]:
    """The classes of a module as they are written; None: nobody knows."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return None
    return [each for each in tree.body if isinstance(each, ast.ClassDef)]


def _tells_keys(classes: Optional[List[ast.ClassDef]]) -> bool:
    """Whether they give an attention function indices."""
    calls = (n for cls in classes or () for n in ast.walk(cls) if isinstance(n, ast.Call))
    return any(
        (keyword.arg or "").endswith("indices") and ast.unparse(call.func) == "attention_interface"
        for call in calls
        for keyword in call.keywords
    )


def _reads_masks(classes: Optional[List[ast.ClassDef]]) -> bool:
    """Whether they compute with what they call a mask."""
    if classes is None:
        return True

    def is_mask(node: ast.AST) -> bool:
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        return any("mask" in name and "special" not in name for name in names)

    for node in (n for cls in classes for n in ast.walk(cls)):
        if isinstance(node, ast.BinOp):
            parts: List[ast.AST] = [node.left, node.right]
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            # A mapping of kinds of masks is none.
            parts = [node.value] if "mapping" not in ast.dump(node.value) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("torch.", "F.")):
            parts = [*node.args]
        else:
            continue
        if any(map(is_mask, parts)):
            return True
    return False
