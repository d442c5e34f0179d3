"""What the code of a transformers model says of its attention: whether masks are handed on as they
were made, or worked on, which attention.py's spans are not for."""

import ast
import functools
import inspect
import sys
from typing import Any, List, NamedTuple

import torch


class Traits(NamedTuple):
    """What a model's code says of its attention.

    reads_masks: it does more with masks than to hand them on to its attention function: it adds
        them up, joins or cuts them, and wants those that it knows.
    eager: it has no other attention than its own.
    flash: it may run on flash attention.
    """

    reads_masks: bool
    eager: bool
    flash: bool


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
    else:
        return Traits(False, False, True)
    flash = any(getattr(model, "_supports_flash_attn", False) for model in of_base)
    sdpa = any(getattr(model, "_supports_sdpa", False) for model in of_base)
    sources = {sys.modules.get(model.__module__) for model in of_base}
    return Traits(not flash and any(map(_reads_masks, sources)), not sdpa, flash)


def _reads_masks(module: Any) -> bool:
    """Whether the classes of a module compute with what they call a mask."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return True

    def is_mask(node: ast.AST) -> bool:
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        return any("mask" in name and "special" not in name for name in names)

    for node in (n for cls in tree.body if isinstance(cls, ast.ClassDef) for n in ast.walk(cls)):
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
