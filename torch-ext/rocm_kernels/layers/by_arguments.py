"""Kernel layers for forwards of any number of arguments: ``kernelize`` compares their number and
kinds with those of the forward that is replaced, so there is a class for each."""

import inspect
from typing import Any, Callable, Dict, Tuple, Type

from torch import nn


def layers_by_arguments(
    names: Dict[Tuple[int, int, bool], str],
    run: Callable[[nn.Module, Tuple[Any, ...], Dict[str, Any]], Any],
    module: str,
) -> Dict[str, Type[nn.Module]]:
    """
    Args:
        names: of the classes, by how many arguments a forward takes by position or name, how many
            by name alone, and whether any others.
        run: what a forward does with its module, the arguments by position and those by name.
        module: name of the module that has the classes.
    """
    return {name: _made(name, run, module, *takes) for takes, name in names.items()}


def _made(
    name: str, run: Callable[..., Any], module: str, positional: int, by_name: int, others: bool
) -> Type[nn.Module]:
    """The names of the arguments are those of the forward that is replaced."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    parameter = inspect.Parameter
    taken = [parameter("self", parameter.POSITIONAL_OR_KEYWORD)]
    taken += [parameter(f"a{i}", parameter.POSITIONAL_OR_KEYWORD) for i in range(positional)]
    taken += [parameter(f"k{i}", parameter.KEYWORD_ONLY) for i in range(by_name)]
    taken += [parameter("kwargs", parameter.VAR_KEYWORD)] if others else []
    forward.__signature__ = inspect.Signature(taken)
    forward.__qualname__ = f"{name}.forward"
    members = {"forward": forward, "has_backward": False, "can_torch_compile": True}
    return type(name, (nn.Module,), {**members, "__module__": module})
