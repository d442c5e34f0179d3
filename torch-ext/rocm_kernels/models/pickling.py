"""Pickles instances of classes that functions make.

pickle finds a class by its name alone. Classes whose base is known only at run time have none that
it could find, so each instance names the function that makes its class.
"""

import sys
from typing import Any, Callable, Dict, Tuple

from torch import nn


def reduced(instance: Any, make_class: Callable[..., type], *args: Any) -> Tuple:
    """What ``__reduce__`` returns of an instance of ``make_class(*args)``."""
    return _rebuilt, (make_class, args), vars(instance)


def _rebuilt(make_class: Callable[..., type], args: Tuple) -> Any:
    cls = make_class(*args)
    return cls.__new__(cls)


class KernelFuncs(dict):
    """Functions that ``kernels`` has made modules of, and hung on a module of transformers' for
    ``kernelize`` to find. Pickle cannot look inside them: they go by the names that they have
    beside that module's class."""

    def __init__(self, cls: type, names: Dict[str, str]) -> None:
        beside = vars(sys.modules[cls.__module__])
        super().__init__({key: beside[name] for key, name in names.items()})
        self._arguments = cls, names

    def __reduce__(self) -> Tuple:
        return KernelFuncs, self._arguments


def name_kernel_funcs(model: nn.Module) -> None:
    """Lets modules be pickled to which ``kernels`` has attached functions."""
    for module in model.modules():
        funcs = vars(module).get("_kernel_funcs", {})
        beside = vars(sys.modules[type(module).__module__]).items()
        names = {key: n for key, func in funcs.items() for n, value in beside if value is func}
        if funcs and names.keys() == funcs.keys():
            module._kernel_funcs = KernelFuncs(type(module), names)
