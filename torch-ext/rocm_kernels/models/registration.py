"""Registers modules for ``kernelize``: each class gets the name of the kernel layer that may
replace its forward, and a condition. Also says which modules keep their own forward, and why."""

import inspect
from dataclasses import replace
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from .experts import Experts
from .families import (
    BY_DECODER,
    BY_MLP,
    Family,
    families_of_attention,
    families_of_decoder,
    families_of_mlp,
)
from .fuse import is_gated_mlp, why_not_fused
from .hooks import function_of, is_called, is_layer, is_wrapped, move_accelerate_hook
from .linear import FP8Linear, FP8LinearPart
from .norms import computes_rmsnorm, formula_of
from .probe import Differs, probe_decoder_layer, probe_llama4_moe, probe_mlp
from .probe_attention import probe_attention
from .probe_router import arguments_of, probe_routed_block, probe_router


class _Condition(NamedTuple):
    """Keeps ``kernelize`` from instances that are not prepared, and from subclasses, which inherit
    a class's name."""

    cls: type
    condition: Callable[[nn.Module], bool]
    of_rocm_kernels = True  # of two copies of the package in a process the last call counts

    def __call__(self, module: nn.Module) -> bool:
        return type(module) is self.cls and self.condition(module) and move_accelerate_hook(module)


class _TheirCondition(NamedTuple):
    """What somebody else gave a class."""

    condition: Optional[Callable[[nn.Module], bool]]

    def __call__(self, module: nn.Module) -> bool:
        return (self.condition is None or self.condition(module)) and move_accelerate_hook(module)


def register_layer(
    cls: type,
    layer_name: str,
    condition: Callable[[nn.Module], bool],
    alike: Sequence[str] = (),
) -> None:
    """Names the kernel layer of a class, as ``kernels.replace_kernel_forward_from_hub`` does.

    A name that somebody else gave the class stays if it is this one, or one of those that mean the
    same here. Any other would keep the class from the layers, and gives way.
    """
    own = vars(cls)  # not what it inherits
    ours = getattr(own.get("kernel_condition"), "of_rocm_kernels", False)
    if ours or own.get("kernel_layer_name") not in (layer_name, *alike):
        cls.kernel_layer_name = layer_name
        cls.kernel_condition = _Condition(cls, condition)
    elif not isinstance(own.get("kernel_condition"), _TheirCondition):
        cls.kernel_condition = _TheirCondition(getattr(cls, "kernel_condition", None))


class Registration:
    """Calls :func:`register_layer` for a prepared module's class, also in a process that unpickles
    the module: the record is kept on the module, and pickle finds the condition by its name."""

    def __init__(
        self,
        cls: type,
        layer_name: str,
        condition: Callable[[nn.Module], bool],
        alike: Sequence[str] = (),
    ) -> None:
        self._arguments = cls, layer_name, condition, tuple(alike)
        register_layer(*self._arguments)

    def __reduce__(self) -> Tuple:
        return Registration, self._arguments


def register_layers(model: nn.Module) -> None:
    """Registers a model's MLPs, attentions, decoder layers, norms and routers for ``kernelize``.

    Each module also gets what its kernel layer needs to know: an MLP its family, as
    ``kernel_family``; a decoder layer that, and how it calls its attention, as ``kernel_call``; an
    attention what it computes, as ``kernel_attention``, and one in another decoder layer its family
    too; a norm its formula, as ``kernel_norm``; a router what it computes, as ``kernel_router``,
    and the experts that get it, alone in ``kernel_routed``; a block that is these two and nothing
    else has them, as ``kernel_experts``.
    """
    for module in model.modules():
        for fact in _FACTS:
            module.__dict__.pop(fact, None)  # what an earlier call has found out
    for module in model.modules():
        if type(module).__name__ == _LLAMA4_MOE:
            try:
                probe_llama4_moe(module)
            except Differs:
                continue  # layers_left_alone tells why
            module.layer_registration = Registration(type(module), _LLAMA4_MOE, _has_our_experts)
            continue
        if _is_one_of(families_of_mlp(module), _register_mlp, module):
            continue
        if _is_one_of(families_of_decoder(module), _register_decoder_layer, module):
            continue
        formula = formula_of(module)
        if formula is not None:
            module.kernel_norm = formula
            # transformers does so too, but only beside the kernels that it was made for, and by
            # names of which the next may be new.
            module.layer_registration = Registration(
                type(module), "RMSNorm", computes_rmsnorm, alike=["RMSNormZeroCentered"]
            )
    for module in model.modules():  # now that their norms are known
        if hasattr(module, "kernel_call"):
            _ask_attention_of(module)
        if any(isinstance(child, Experts) for child in module.children()):
            try:
                router, experts, call, alone = probe_routed_block(module)
            except Differs:
                continue  # it routes as it did
            if alone:
                module.kernel_experts = router, experts
            router.kernel_router, router.kernel_routed = call, (experts,)
            layer = "TopKRouter" if len(arguments_of(router)) == 1 else "TopKRouterGivenBias"
            router.layer_registration = Registration(type(router), layer, _routes_as_seen)
    for module in model.modules():  # now that those of decoder layers are known
        if not hasattr(module, "kernel_attention"):
            _is_one_of(families_of_attention(module), _register_attention, module)


def _is_one_of(
    families: List[Family], register: Callable[[nn.Module, Family], None], module: nn.Module
) -> bool:
    """Whether a module computes what one of the families' do, as which it is registered then.
    layers_left_alone tells why not."""
    for family in families:
        try:
            register(module, family)
        except Differs:
            continue
        return True
    return False


def _register_mlp(module: nn.Module, family: Family) -> None:
    probe_mlp(module, family)
    module.kernel_family = family
    module.layer_registration = Registration(
        type(module), "LlamaMLP", _is_fp8_mlp, alike=["SwiGLUMLP"]
    )


def _register_decoder_layer(module: nn.Module, family: Family) -> None:
    call = probe_decoder_layer(module, family)
    layer = _layer_name(type(module), DECODER_LAYERS)
    is_named = type(module).__name__ in BY_DECODER
    if not is_named and None in (formula_of(getattr(module, name)) for name in family.norms):
        raise Differs("has other norms than RMSNorm")
    module.kernel_family, module.kernel_call = family, call
    module.layer_registration = Registration(type(module), layer, _is_fused_decoder_layer)


def _register_attention(module: nn.Module, family: Family) -> None:
    """One in a decoder layer that keeps its own forward: with other norms than RMSNorm, or halves
    that run side by side."""
    call = probe_attention(module, family)
    layer = _layer_name(type(module), ATTENTIONS)
    module.kernel_family, module.kernel_attention = family, call
    module.layer_registration = Registration(type(module), layer, _is_fused_attention)


def _ask_attention_of(layer: nn.Module) -> None:
    """Of a decoder layer that is registered."""
    family = layer.kernel_family
    attention = getattr(layer, family.attention)
    try:
        if family.qkv is not None:
            attention.kernel_attention = probe_attention(attention, family)
    except Differs:  # it runs between its projections as it did
        if type(layer).__name__ not in BY_DECODER:
            layer.kernel_family = replace(family, qkv=None)


_FACTS = (
    "kernel_family", "kernel_call", "kernel_norm", "kernel_attention", "kernel_router",
    "kernel_routed", "kernel_experts",
)  # fmt: skip


def layers_left_alone(model: nn.Module) -> Dict[str, str]:
    """Names of MLPs, attentions and decoder layers that keep their own forward, and why: those that
    compute what a known family's do, or have a name of one."""
    found: Dict[str, str] = {}
    for name, module in model.named_modules():
        cls = type(module).__name__
        try:
            family = vars(module).get("kernel_family")
            if cls in BY_MLP or is_gated_mlp(module):
                _require_fp8_mlp(module, BY_MLP.get(cls, family))
            elif family is not None and hasattr(module, "kernel_attention"):
                _require_fused_attention(module, family)
            elif cls == _LLAMA4_MOE:
                _require_our_experts(module)
            elif cls in BY_DECODER or family is not None:
                _require_fused_decoder_layer(module, BY_DECODER.get(cls, family))
                hooked = [child for child in skipped_by(module) if is_called(child)]
                if hooked:
                    raise Differs(f"a hook on {_name_in(module, hooked[0])} wants to see it run")
        except Differs as reason:
            found[name] = str(reason)
    return found


def unkernelized_layers(model: nn.Module) -> Dict[str, str]:
    """Names of modules that a layer of this package could run, and does not, after ``kernelize``;
    and why. Empty: nothing is missing.

    They are MLPs, attentions and decoder layers that compute what a known family's do
    (docs/models.md), FP8 linears, experts, their routers and RMSNorms.
    """
    found = layers_left_alone(model)
    for name, module in model.named_modules():
        cls = type(module)
        if name in found or not (
            cls.__name__ in (*BY_MLP, *BY_DECODER, _LLAMA4_MOE)
            or "kernel_family" in vars(module)
            or hasattr(module, "kernel_norm")
            or hasattr(module, "kernel_router")
            or ("kernel_layer_name" in vars(cls) and _is_of_this_package(cls))
        ):
            continue
        forward = module.__dict__.get("forward")
        if forward is None:
            found[name] = "kernelize has not seen it"
        elif not is_layer(function_of(forward)):
            found[name] = (
                f"kernelize has no layer of this package for {cls.kernel_layer_name}, on this "
                "device and in this mode"
            )
    return found


def _is_of_this_package(cls: type) -> bool:
    return cls.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def skipped_by(layer: nn.Module) -> List[nn.Module]:
    """Modules of a decoder layer that its kernel layer does not call, but does the work of."""
    called = (layer.kernel_family.attention, layer.kernel_family.mlp)
    return [m for name, m in layer._modules.items() if m is not None and name not in called]


def _name_in(parent: nn.Module, child: nn.Module) -> str:
    return next(name for name, module in parent._modules.items() if module is child)


def _layer_name(cls: type, layers: Dict[Tuple[int, int, bool], str]) -> str:
    """The kernel layer with as many parameters as a class's forward, which is what ``kernelize``
    looks at."""
    signature = inspect.signature(cls.forward)
    kinds = [parameter.kind for parameter in signature.parameters.values()][1:]
    takes = (
        kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD),
        kinds.count(inspect.Parameter.KEYWORD_ONLY),
        inspect.Parameter.VAR_KEYWORD in kinds,
    )
    if takes not in layers:
        raise Differs(f"no layer takes as many arguments as its forward{signature}")
    return layers[takes]


def _layers(kind: str, most: int, most_by_name: int) -> Dict[Tuple[int, int, bool], str]:
    names = {}
    for positional in range(1, most + 1):
        for by_name in range(most_by_name + 1):
            for others in (False, True):
                name = f"{kind}{positional}"
                name += f"And{by_name}ByName" if by_name else ""
                names[positional, by_name, others] = name + ("AndOthers" if others else "")
    return names


# Kernel layers by what the forwards that they replace take besides the module: how many arguments
# by position or name, how many by name alone, and whether any others.
DECODER_LAYERS = {
    **_layers("DecoderLayer", 12, 8),
    (6, 0, True): "LlamaDecoderLayer",
    (5, 0, True): "GemmaDecoderLayer",
}
ATTENTIONS = _layers("Attention", 8, 2)


def _require_fp8_mlp(module: nn.Module, family: Family) -> None:
    if is_wrapped(module):
        raise Differs("its forward was replaced")
    probe_mlp(module, family)
    for name in (*family.gate_up.of(module), family.down):
        linear = getattr(module, name)
        if not isinstance(linear, (FP8Linear, FP8LinearPart)):
            raise Differs(f"its {name} is a {type(linear).__name__}")


def _is_fp8_mlp(module: nn.Module) -> bool:
    return _is_prepared(module, _require_fp8_mlp)


def _require_fused_decoder_layer(module: nn.Module, family: Family) -> None:
    if is_wrapped(module):
        raise Differs("its forward was replaced")
    call = probe_decoder_layer(module, family)
    _layer_name(type(module), DECODER_LAYERS)
    if call != getattr(module, "kernel_call", None):
        raise Differs("is not what quantize_model_ has seen")
    for name in family.norms:
        norm = getattr(module, name)
        if not computes_rmsnorm(norm):
            raise Differs(f"its {name} is a {type(norm).__name__}, which computes no RMSNorm")
    if family.qkv is not None:
        why = why_not_fused(getattr(module, family.attention), family.qkv)
        if why is not None:
            raise Differs(f"its {family.attention}'s {why}")


def _require_fused_attention(module: nn.Module, family: Family) -> None:
    if is_wrapped(module):
        raise Differs("its forward was replaced")
    if probe_attention(module, family) != module.kernel_attention:
        raise Differs("is not what quantize_model_ has seen")
    why = why_not_fused(module, family.qkv)
    if why is not None:
        raise Differs(f"its {why}")


def _is_fused_attention(module: nn.Module) -> bool:
    return _is_prepared(module, _require_fused_attention)


def _is_fused_decoder_layer(module: nn.Module) -> bool:
    return _is_prepared(module, _require_fused_decoder_layer)


_LLAMA4_MOE = "Llama4TextMoe"


def _require_our_experts(module: nn.Module) -> None:
    probe_llama4_moe(module)
    if not isinstance(module.experts, Experts):
        raise Differs(f"its experts are a {type(module.experts).__name__}")


def _has_our_experts(module: nn.Module) -> bool:
    try:
        _require_our_experts(module)
    except Differs:
        return False
    return True


def _routes_as_seen(module: nn.Module) -> bool:
    call = getattr(module, "kernel_router", None)  # None: another model's, or with other experts
    if call is None or is_wrapped(module):
        return False
    try:
        return probe_router(module) == call
    except Differs:
        return False


def _is_prepared(module: nn.Module, require: Callable[[nn.Module, Family], None]) -> bool:
    family = getattr(module, "kernel_family", None)  # None: another model's
    if family is None:
        return False
    try:
        require(module, family)
    except Differs:
        return False
    return True
