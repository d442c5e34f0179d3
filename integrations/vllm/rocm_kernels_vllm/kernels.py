"""The kernels, loaded when first used: loading asks for the device, which only workers may do."""

import functools
import importlib
import inspect
from types import ModuleType

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


@functools.cache
def why_not() -> str:
    """Why the kernels cannot be had here; empty if they can. The log says it, once: vLLM sets its
    log up after its plugins, so not before this is asked."""
    try:
        package()
    except Exception as error:  # whatever the client met: a server must start all the same
        reason = f"{type(error).__name__}: {error}"
        parts.logger().warning("rocm-kernels: vLLM runs its own paths, no kernels here: %s", reason)
        return reason
    parts.logger().info("%s", parts.hooked_in)
    return ""
