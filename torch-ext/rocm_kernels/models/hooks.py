"""Keeps forward hooks, and accelerate's hooks, when ``kernelize`` replaces a forward or a new
linear takes a module's place. accelerate's hooks move a module's inputs and weights to a device."""

import sys
from types import MethodType
from typing import Any, Dict, Optional, Tuple

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Gives the hooks and the training mode of a module to the module that takes its place. Handles
    that callers hold keep working, because the hook tables are shared."""
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    new.train(old.training)
    if "_hf_hook" in vars(old):
        vars(new)["_hf_hook"] = old._hf_hook  # nothing has moved


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks run around a module's forward: then its parent must call the module."""
    every = torch.nn.modules.module
    hooks = module._forward_hooks
    return bool(
        (hooks and not all(map(_is_idle, hooks.values())))
        or module._forward_pre_hooks
        or every._global_forward_hooks
        or every._global_forward_pre_hooks
    )


def _is_idle(hook: Any) -> bool:
    """Whether a hook is one of those by which transformers collects states and attentions, and now
    collects none. A model keeps them from the first call on that asks for such."""
    if getattr(hook, "__module__", "") != _CAPTURING:
        return False
    return hasattr(sys.modules[_CAPTURING], "_active_collector") and not is_capturing()


_CAPTURING = "transformers.utils.output_capturing"


def is_capturing() -> bool:
    """Whether transformers collects states or attentions in this call of a model."""
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return collector is not None and bool(collector.get())


def is_called(module: nn.Module) -> bool:
    """Whether hooks run around a module's forward, accelerate's included, which may load the
    module's weights for the call."""
    return "_hf_hook" in module.__dict__ or is_hooked(module)


def is_unseen(module: nn.Module) -> bool:
    """Whether a call reaches a module's own forward, or a layer's of this package, and nobody sees
    its arguments on the way: then they may be of this package's own types."""
    if is_hooked(module):
        return False
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    function = function_of(forward)
    return function is type(module).forward or is_layer(function)


def runs_unseen(module: nn.Module) -> bool:
    """Whether a call may be replaced by what the module computes: neither hooks nor another's
    forward would miss it."""
    return not is_called(module) and is_unseen(module)


# Not imported: the layers import this package.
_LAYERS = __name__.rpartition(".models.")[0] + ".layers."


def function_of(forward: Any) -> Any:
    """A bound method's function; None of anything else. By no default of getattr's, which
    torch.compile of torch 2.11 takes though the method has one."""
    return forward.__func__ if isinstance(forward, MethodType) else None


def is_layer(function: Any) -> bool:
    """Whether a function is a forward of this package's layers."""
    return getattr(function, "__module__", "").startswith(_LAYERS)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings a module's weights to the device for each call."""
    return any(getattr(hook, "offload", False) for hook in parts_of_hook(module))


def parts_of_hook(module: nn.Module) -> Tuple:
    """accelerate's hooks of a module, of which it makes one if there are several."""
    hook = module.__dict__.get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module's forward was replaced by code of neither torch, accelerate nor this
    package."""
    forward = vars(module).get("forward")
    return not (
        forward is None
        or "_hf_hook" in vars(module)
        or function_of(forward) is type(module).forward
        or is_layer(function_of(forward))
    )


def keep_accelerate_hooks(model: nn.Module) -> None:
    """accelerate's hooks live in a ``forward`` that stands before the module's own, where
    ``kernelize`` puts a kernel's. Those of modules that it may see move into torch's hooks.

    One that brings inputs to where the module around has brought them already does nothing, and is
    dropped: it would keep a decoder layer from being replaced, or its attention from getting what
    is projected already.
    """
    devices: Dict[str, Any] = {}
    for name, module in model.named_modules():
        around = devices.get(name.rpartition(".")[0])
        hook = vars(module).get("_hf_hook")
        devices[name] = getattr(hook, "execution_device", around) if name else None
        if hook is None:
            continue
        does_nothing = (
            type(hook).__name__ == "AlignDevicesHook"
            and not hook.offload
            and not hook.io_same_device
            and None not in (around, hook.execution_device)
            and torch.device(hook.execution_device) == torch.device(around)
        )
        if not does_nothing and not hasattr(type(module), "kernel_layer_name"):
            continue
        if does_nothing:
            if _is_in_forward(module):
                del module.forward, module._old_forward
            del vars(module)["_hf_hook"]
        else:
            move_accelerate_hook(module)


def move_accelerate_hook(module: nn.Module) -> bool:
    """Moves accelerate's hook out of a module's forward, which ``kernelize`` is about to replace:
    every kernel layer's condition ends with it. Always True."""
    if _is_in_forward(module):
        del module.forward, module._old_forward
    elif "_hf_hook" not in vars(module):
        return True
    if _before not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_before, with_kwargs=True, prepend=True)
        module.register_forward_hook(_after)
    return True


def _is_in_forward(module: nn.Module) -> bool:
    """accelerate's hook, which it puts before the module's forward."""
    forward = vars(module).get("forward")
    return "_hf_hook" in vars(module) and getattr(forward, "func", None) is not None


def _before(module: nn.Module, args: Tuple, kwargs: Dict) -> Optional[Tuple[Tuple, Dict]]:
    hook = _moved_hook(module)
    return None if hook is None else hook.pre_forward(module, *args, **kwargs)


def _after(module: nn.Module, args: Tuple, output: Any) -> Any:
    hook = _moved_hook(module)
    return None if hook is None else hook.post_forward(module, output)


def _moved_hook(module: nn.Module) -> Any:
    """The hook that stands on a module and not before its forward; None if it was removed, or put
    before the forward again by a later call of accelerate."""
    return None if _is_in_forward(module) else vars(module).get("_hf_hook")
