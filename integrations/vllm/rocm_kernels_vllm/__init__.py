"""vLLM on the kernels of rocm-kernels: a plugin of the group ``vllm.general_plugins``.

vLLM calls :func:`register` once in each of its processes. Nothing is loaded there: the kernels come
with the first layer that asks for them, in the process that has the device.

ops.py has the ops that vLLM's graphs hold, linear.py the FP8 linears, experts.py mixtures of
experts, activation.py and fusion.py activation and norm with FP8 results, skinny.py the 16-bit
products, attention.py attention; parts.py says which of them are on, devices.py where.
"""

from .parts import register

__all__ = ["register"]
