"""Which parts run on which device: where the kernels are the quicker ones, or a user asks for them.

Asked in vLLM's workers alone, which may open the device.
"""

import functools
import importlib
import os
from typing import NamedTuple

import torch

from .parts import VARIABLE_ON, asked_for

# Elsewhere the package has plain kernels of products: correct, and slow.
MATRIX_ARCHS = ("gfx942", "gfx950")
PRODUCTS = ("fp8_linear", "fp8_block_linear", "weight_only", "experts")
FP8_SINCE = (8, 9)  # below, vLLM runs FP8 checkpoints with 16-bit activations
HOPPER = (9, 0)
DEEP_GEMM = ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM")  # vLLM's, on where nobody sets them


class Device(NamedTuple):
    arch: str = ""  # AMD's, such as gfx942
    capability: tuple[int, int] | None = None  # NVIDIA's


@functools.cache
def here() -> Device:
    """What vLLM runs on; a Device of nothing where that is a CPU."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if platform.is_rocm():
        return Device(arch=torch.cuda.get_device_properties().gcnArchName.partition(":")[0])
    if platform.is_cuda():
        return Device(capability=tuple(platform.get_device_capability()))
    return Device()


def is_plain(part: str, device: Device) -> bool:
    """Whether the package has plain kernels alone for a part there."""
    return bool(device.arch) and part in PRODUCTS and device.arch not in MATRIX_ARCHS


def why_off(part: str, device: Device) -> str:
    """Why a part that is hooked in does not run on a device; empty if it does. Experts have
    :func:`why_experts_wait` too, and linears run all the same where vLLM has none of its own."""
    arch, capability = device
    if is_plain(part, device):
        return f"no matrix kernels for {arch}"
    if arch and part == "skinny" and arch != "gfx942":
        return f"for gfx942 alone, got {arch}"
    if capability is None:
        return ""
    if part in ("fp8_linear", "fp8_block_linear") and capability < FP8_SINCE:
        return _needs_fp8(capability)
    if part in ("fp8_block_linear", "weight_only") and capability != HOPPER and not asked_for(part):
        return f"on NVIDIA by themselves on Hopper alone; {VARIABLE_ON}={part} takes them"
    return ""


def why_experts_wait(device: Device, weights: object) -> str:
    """Why a layer's experts wait to be asked for by name; empty if they run by themselves: where
    they were measured inside vLLM, and were not behind. ``weights``: vLLM's key of how they are
    quantised, None for 16 bits."""
    if device.capability is None:
        return ""
    if weights is not None and device.capability < FP8_SINCE:
        return _needs_fp8(device.capability)
    if asked_for("experts"):
        return ""
    deep_gemm = [os.environ[name] for name in DEEP_GEMM if name in os.environ]
    if weights is None:
        reason = "vLLM's own are as quick with 16-bit weights"
    elif device.capability != HOPPER:
        reason = "inside vLLM they were measured on Hopper alone"
    elif deep_gemm and "0" not in deep_gemm:
        reason = "DeepGEMM is asked for"
    else:
        return ""
    return f"{reason}; {VARIABLE_ON}=experts takes them"


def _needs_fp8(capability: tuple[int, int]) -> str:
    return f"FP8 activations need sm_89, got sm_{capability[0]}{capability[1]}"
