"""Runs transformers' own modules of finegrained FP8 checkpoints (DeepSeek-V3, Qwen3-FP8) on these
kernels."""

import functools
import importlib
import sys
from typing import Any, Tuple

import torch

from .pickling import reduced


def serve_finegrained_fp8() -> None:
    """Has transformers run finegrained FP8 checkpoints on this package from now on.

    It does what naming the package's repository in transformers' table of Hub kernels does, with
    the package that is loaded already, so a machine without a GPU gets the CPU variant. There
    transformers would turn FP8 weights into bfloat16 as it loads them; now they stay FP8, as they
    do on GPUs. Call it before ``from_pretrained``.

    Raises:
        ImportError: transformers is not installed, or has moved what this names (5.22 has it).
    """
    package = sys.modules[__name__.rsplit(".", 2)[0]]
    finegrained = importlib.import_module("transformers.integrations.finegrained_fp8")
    hub_kernels = importlib.import_module("transformers.integrations.hub_kernels")
    auto = importlib.import_module("transformers.quantizers.auto")
    mapping = getattr(hub_kernels, "_KERNEL_MODULE_MAPPING", None)
    base = auto.AUTO_QUANTIZER_MAPPING.get("fp8")
    if mapping is None or base is None or not hasattr(finegrained, "_FINEGRAINED_FP8"):
        raise ImportError(
            "transformers must look up the kernel finegrained-fp8 in hub_kernels and quantise by "
            "'fp8', as 5.22 does; this version does not: dequantise the checkpoint, or use 5.22"
        )
    mapping["finegrained-fp8"] = package
    finegrained._FINEGRAINED_FP8 = None  # another kernel may have been looked up before
    if not getattr(base, "keeps_fp8_on_the_cpu", False):
        auto.AUTO_QUANTIZER_MAPPING["fp8"] = _on_the_cpu_too(base)


@functools.cache
def _on_the_cpu_too(base: type) -> type:
    class OnTheCpuToo(base):
        keeps_fp8_on_the_cpu = True

        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            """transformers' own checks where there is a GPU; the CPU has kernels too."""
            if torch.cuda.is_available():
                super().validate_environment(*args, **kwargs)

        def __reduce__(self) -> Tuple:
            return reduced(self, _on_the_cpu_too, base)

    return OnTheCpuToo
