"""Finds linears whose weight the model's own code reads without calling the linear: they stay.

T5 casts inputs to its linear's dtype, Mamba multiplies by a linear's weight, and torch's encoder
layer passes weights to a kernel of its own. With an FP8 weight such code would ignore the scales:
it would fail, or compute wrong numbers. The byte code of the classes tells which linears these are.
"""

import dis
import functools
import inspect
import types
from typing import Dict, FrozenSet, Iterator, List

from torch import nn

# Where a model is made, its linears hold 16-bit numbers yet.
_BEFORE = ("__init__", "_init_weights", "_reset_parameters", "reset_parameters", "tie_weights")


def linears_read_without_a_call(model: nn.Module) -> Dict[str, str]:
    """Names of linears that a module around them reads, and the class of that one."""
    found: Dict[str, str] = {}
    for prefix, owner in model.named_modules():
        paths = _weights_read(type(owner))
        names = [name for name, _ in owner.named_modules()] if paths else []
        for path in paths:
            own = path in names
            # Not the owner's: of another module in it. RWKV divides weights of its blocks.
            inside = [path] if own else [name for name in names if name.endswith(f".{path}")]
            for name in inside:
                found.setdefault(f"{prefix}.{name}" if prefix else name, type(owner).__name__)
    return found


@functools.cache
def _weights_read(cls: type) -> FrozenSet[str]:
    """The ``a.b`` in each ``something.a.b.weight`` of a class's methods."""
    paths = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for key, method in vars(base).items():
            method = inspect.unwrap(method) if callable(method) else method
            if key in _BEFORE or not inspect.isfunction(method):
                continue
            path: List[str] = []
            for step in _instructions(method.__code__):
                if step.opname != "LOAD_ATTR":
                    path = []
                elif step.argval == "weight" and path:
                    paths.add(".".join(path))
                else:
                    path.append(step.argval)
    return frozenset(paths)


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yields a code object's instructions, and those of the functions and comprehensions inside."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)
