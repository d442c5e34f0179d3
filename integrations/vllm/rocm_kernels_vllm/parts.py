"""Turns parts of the plugin on and off, and leaves out a part whose hook vLLM has moved.

``ROCM_KERNELS_VLLM_OFF`` names parts to leave to vLLM, separated by commas; ``all`` is every one.
``ROCM_KERNELS_VLLM_ON`` names those to run where they are not on by themselves.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

VARIABLE = "ROCM_KERNELS_VLLM_OFF"
VARIABLE_ON = "ROCM_KERNELS_VLLM_ON"
LOCAL_KERNELS = "LOCAL_KERNELS"  # of the kernels client: a folder in the place of a repository
# Counts what a graph that vLLM caches may rely on: the ops' schemas and their place in graphs.
CACHED = "1"


def _pass_flag(flag: str) -> Callable[[object], str]:
    """What a pass over compiled graphs waits for."""

    def missing(config) -> str:
        compilation = config.compilation_config
        if compilation.mode.name != "VLLM_COMPILE":
            return "vLLM compiles no graphs here"
        return "" if getattr(compilation.pass_config, flag) else f"pass_config.{flag}"

    return missing


def _attention_backend(config) -> str:
    chosen = (config.attention_config.backend, *config.attention_config.backend_per_kind.values())
    return "" if any(b and b.name == "CUSTOM" for b in chosen) else "--attention-backend CUSTOM"


class Part(NamedTuple):
    # Of this package. A function there of the part's name hooks it in, and returns whether there
    # is something to hook into on vLLM's platform. The module imports what its parts need and
    # nothing else: what one vLLM has not got must not cost another part.
    module: str
    what: str
    # Of vLLM's settings: what must be set for it to run, and is not; empty if it runs.
    waits_for: Callable[[object], str] = lambda config: ""


PARTS: dict[str, Part] = {
    "fp8_linear": Part("linear", "FP8 linears, scales per tensor, per token and per channel"),
    "fp8_block_linear": Part("linear", "FP8 linears, scales per 128 x 128 block"),
    "weight_only": Part("linear", "FP8 weights with 16-bit activations"),
    "experts": Part("experts", "mixtures of experts, FP8 and 16-bit weights"),
    "swiglu": Part("activation", "SiLU, product and FP8 in one kernel, in models that ask for it"),
    "swiglu_pass": Part(
        "fusion",
        "SiLU, product and FP8 in one kernel, in compiled graphs",
        _pass_flag("fuse_act_quant"),
    ),
    "norm": Part(
        "fusion",
        "residual, RMSNorm and FP8 in one kernel, in compiled graphs",
        _pass_flag("fuse_norm_quant"),
    ),
    "all_reduce_norm": Part(
        "all_reduce",
        "sum over GPUs, residual, RMSNorm and FP8 in one kernel, in compiled graphs on NVIDIA",
        _pass_flag("fuse_allreduce_rms"),
    ),
    "skinny": Part("skinny", "16-bit products of few rows, on ROCm"),
    "attention": Part("attention", "attention, from pages in 16 bits or FP8", _attention_backend),
}


class HookMoved(Exception):
    """vLLM has not got what a part hooks into; the text says what."""


class State(NamedTuple):
    """What :func:`register` did: parts that run on this platform, those turned off, and why others
    do not run."""

    on: tuple[str, ...]
    off: tuple[str, ...]
    failed: dict[str, str]

    def __str__(self) -> str:
        text = f"rocm-kernels: on {', '.join(self.on) or 'nothing'}"
        return text + (f"; off {', '.join(self.off)}" if self.off else "")


hooked_in = State((), (), {})  # what register() did in this process


def turned_off() -> list[str]:
    """The parts that the environment turns off."""
    names = _named_by(VARIABLE)
    return [part for part in PARTS if part in names or "all" in names]


def asked_for(part: str) -> bool:
    """Whether the environment names it as one to run."""
    return part in _named_by(VARIABLE_ON)


def _named_by(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def _say_unknown_names() -> None:
    """An unknown name does nothing."""
    for variable, known in ((VARIABLE, (*PARTS, "all")), (VARIABLE_ON, (*PARTS,))):
        for name in _named_by(variable):
            if name not in known:
                message = "%s names %r, which is no part: they are %s"
                logger().warning(message, variable, name, ", ".join(known))


def register() -> State:
    """Hooks every part into vLLM that is on. A part that cannot be leaves vLLM as it was."""
    _say_unknown_names()
    off = turned_off()
    on, failed = [], {}
    for name, part in PARTS.items():
        if name in off:
            continue
        try:
            hook: Callable[[], bool] = getattr(_module(part.module), name)
            if hook():
                on.append(name)
        except Exception as error:  # whatever a vLLM of other shape raises: a server must start
            failed[name] = f"{type(error).__name__}: {error}"
            message = "rocm-kernels: vLLM %s runs its own path for %s, as its hook has moved (%s)"
            logger().warning(message, version_of_vllm(), part.what, failed[name])
    global hooked_in
    hooked_in = State(tuple(on), tuple(off), failed)
    _tell_vllms_variables(hooked_in)
    return hooked_in


def what_runs() -> str:
    """A line for the log. Which of the parts that are hooked in run, the device and vLLM's settings
    say; where they are not known, all of them."""
    waiting = {name: _waits_for(name) for name in hooked_in.on}
    waiting = {name: reason for name, reason in waiting.items() if reason}
    text = str(hooked_in._replace(on=tuple(n for n in hooked_in.on if n not in waiting)))
    reasons = ", ".join(f"{name} ({reason})" for name, reason in waiting.items())
    return text + (f"; hooked in, and off here: {reasons}" if reasons else "")


def _waits_for(name: str) -> str:
    try:
        devices = _module("devices")
        if reason := devices.why_off(name, devices.here()):
            return reason
        config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
        return PARTS[name].waits_for(config) if config is not None else ""
    except (ImportError, AttributeError):  # a vLLM whose settings have other names
        return ""


def logger() -> logging.Logger:
    """Below vLLM's, so that its level and format hold."""
    return logging.getLogger("vllm.plugins.rocm_kernels")


def version_of_vllm() -> str:
    return getattr(importlib.import_module("vllm"), "__version__", "of unknown version")


def _module(name: str):
    return importlib.import_module(f"{__package__}.{name}")


def _tell_vllms_variables(state: State) -> None:
    """vLLM hashes the variables that it knows into the names of its cached graphs, where those with
    other parts would call other ops: what runs joins them. And it copies them to Ray's workers:
    so those that this plugin reads do, too."""
    try:
        variables = importlib.import_module("vllm.envs").environment_variables
        variables["ROCM_KERNELS_VLLM"] = lambda: ",".join([__package__, CACHED, *state.on])
        for name in (VARIABLE, VARIABLE_ON, LOCAL_KERNELS):
            variables[name] = functools.partial(os.environ.get, name)
    except (ImportError, AttributeError, TypeError) as error:
        message = "rocm-kernels: clear vLLM's compile cache after changing %s, %s (%s)"
        logger().warning(message, VARIABLE, VARIABLE_ON, error)
