"""The parts of the plugin: which are on, and what becomes of those whose hook vLLM has moved.

``ROCM_KERNELS_VLLM_OFF`` names parts to leave to vLLM, separated by commas; ``all`` is every one.
``ROCM_KERNELS_VLLM_ON`` names those to run where they are not on by themselves.
"""

import importlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

VARIABLE = "ROCM_KERNELS_VLLM_OFF"
VARIABLE_ON = "ROCM_KERNELS_VLLM_ON"
# Counts what a graph that vLLM caches may rely on: the ops' schemas and their place in graphs.
CACHED = "1"


class Part(NamedTuple):
    # Of this package. A function there of the part's name hooks it in, and returns whether there
    # is something to hook into on vLLM's platform.
    module: str
    what: str


PARTS: dict[str, Part] = {
    "fp8_linear": Part("linear", "FP8 linears, scales per tensor, per token and per channel"),
    "fp8_block_linear": Part("linear", "FP8 linears, scales per 128 x 128 block"),
    "weight_only": Part("linear", "FP8 weights with 16-bit activations"),
    "experts": Part("experts", "mixtures of experts, FP8 and 16-bit weights"),
    "swiglu": Part("fusion", "SiLU, product and FP8 in one kernel, in models that ask for it"),
    "swiglu_pass": Part("fusion", "SiLU, product and FP8 in one kernel, in compiled graphs"),
    "norm": Part("fusion", "residual, RMSNorm and FP8 in one kernel, in compiled graphs"),
    "skinny": Part("skinny", "16-bit products of few rows, on ROCm"),
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
    names = _named_by(VARIABLE, "all")
    return [part for part in PARTS if part in names or "all" in names]


def asked_for(part: str) -> bool:
    """Whether the environment names it as one to run."""
    return part in _named_by(VARIABLE_ON)


def _named_by(variable: str, *more: str) -> list[str]:
    """An unknown name does nothing, and is said."""
    names = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    for name in names:
        if name not in (*PARTS, *more):
            message = "%s names %r, which is no part: they are %s"
            logger().warning(message, variable, name, ", ".join((*PARTS, *more)))
    return names


def register() -> State:
    """Hooks every part into vLLM that is on. A part that cannot be leaves vLLM as it was."""
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
    _tell_the_compile_cache(hooked_in)
    return hooked_in


def logger() -> logging.Logger:
    """Below vLLM's, so that its level and format hold."""
    return logging.getLogger("vllm.plugins.rocm_kernels")


def version_of_vllm() -> str:
    return getattr(importlib.import_module("vllm"), "__version__", "of unknown version")


def _module(name: str):
    return importlib.import_module(f"{__package__}.{name}")


def _tell_the_compile_cache(state: State) -> None:
    """A graph that vLLM compiled with other parts on would call other ops: what runs joins the
    variables that vLLM hashes into the names of its cached graphs."""
    try:
        variables = importlib.import_module("vllm.envs").environment_variables
        variables["ROCM_KERNELS_VLLM"] = lambda: ",".join([__package__, CACHED, *state.on])
    except (ImportError, AttributeError, TypeError) as error:
        message = "rocm-kernels: clear vLLM's compile cache after changing %s (%s)"
        logger().warning(message, VARIABLE, error)
