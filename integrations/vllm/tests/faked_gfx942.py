"""A platform for vLLM that is a gfx942 as far as its Python goes: what it selects, with tensors on
the CPU. faked_machine.py names it to vLLM."""

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, PlatformEnum


class FakedGfx942(CpuPlatform):
    _enum = PlatformEnum.ROCM
    device_type = "cpu"

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def fp8_dtype(cls) -> torch.dtype:
        return torch.float8_e4m3fnuz

    @classmethod
    def is_fp8_fnuz(cls) -> bool:
        return True

    @classmethod
    def supports_fp8(cls) -> bool:
        return True

    @classmethod
    def get_device_capability(cls, device_id: int = 0):
        return DeviceCapability(9, 4)
