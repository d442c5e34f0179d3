"""Loads the kernels when they are first used: loading needs the device, which only vLLM's workers
may open."""

import functools
import importlib
import inspect
from types import ModuleType

import torch

from . import parts

REPOSITORY, VERSION = "org/rocm-kernels", 1


@functools.cache
def package() -> ModuleType:
    """The package, for the backend that vLLM runs on.

    Raises:
        what ``kernels.get_kernel`` raises where there is no build for this torch and device, or
        none in the cache of a machine without a network.
    """
    client = importlib.import_module("kernels")
    platform = importlib.import_module("vllm.platforms").current_platform
    # pip's torch is built for CUDA on any machine, and says nothing of what vLLM runs on.
    backend = "cpu" if platform.device_type == "cpu" else None
    arguments = {"version": VERSION, "backend": backend, "trust_remote_code": True}
    known = inspect.signature(client.get_kernel).parameters
    return client.get_kernel(REPOSITORY, **{n: v for n, v in arguments.items() if n in known})


@torch.compiler.assume_constant_result
def why_not() -> str:
    """Why the kernels cannot be had here; empty if they can. Asked while a model is traced, too."""
    return _why_not()


@functools.cache
def _why_not() -> str:
    """And says it in the log, once: vLLM sets its log up after its plugins, so not before this is
    asked."""
    try:
        package()
    except Exception as error:  # whatever the client met: a server must start all the same
        reason = f"{type(error).__name__}: {error}"
        parts.logger().warning("rocm-kernels: vLLM runs its own paths, no kernels here: %s", reason)
        return reason
    parts.logger().info("%s", parts.what_runs())
    return ""
