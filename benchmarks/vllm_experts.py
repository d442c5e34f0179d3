"""vLLM's experts, from its own files, without vLLM: the Triton kernel, its launcher and tuned
configs, and the modular kernel around them that a server without expert parallelism runs.

vLLM as a whole asks for a torch of its own. Its experts need few of its files, which are run as
they are, from where peers.py found them; their ops are in the library that peers.py has built. What
else these files import is here an object that raises when it is called, so that nothing of vLLM's
is replaced unnoticed; the exceptions are in `provided`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"
QUANTIZATION = f"{LAYERS}.quantization.utils"
# vLLM's own files; everything they run comes from one of these, from a library or from `provided`.
OWN = {
    "vllm._custom_ops", "vllm.envs", "vllm.scalar_type", "vllm.utils.math_utils",
    "vllm.utils.platform_utils", "vllm.utils.torch_utils", "vllm.utils.torch_version",
    "vllm.v1.worker.workspace", f"{MOE}.activation", f"{MOE}.config", f"{MOE}.experts.lora_context",
    f"{MOE}.experts.lora_experts_mixin", f"{MOE}.experts.triton_moe", f"{MOE}.fused_moe",
    f"{MOE}.modular_kernel", f"{MOE}.moe_align_block_size", f"{MOE}.moe_output",
    f"{MOE}.prepare_finalize.no_dp_ep", f"{MOE}.topk_weight_and_reduce", f"{MOE}.utils",
    f"{QUANTIZATION}.fp8_utils", f"{QUANTIZATION}.ocp_mx_utils", f"{QUANTIZATION}.quant_utils",
}  # fmt: skip


class Absent(type):
    """What was not brought: good for annotations, isinstance and bases, not for calls."""

    def __call__(cls, *arguments, **options):
        raise RuntimeError(f"vLLM's {cls.__name__} is not among the files that are run here")

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")


def absent(name: str) -> Absent:
    return Absent(name, (), {})


class Logger(logging.LoggerAdapter):
    """vLLM's loggers also say things once; here they are not asked to."""

    def info_once(self, *arguments, **options) -> None: ...

    debug_once = warning_once = info_once


def platform(device: torch.device) -> SimpleNamespace:
    """What the files ask of vLLM's platform object, for an NVIDIA GPU."""
    no, yes = lambda *_: False, lambda *_: True
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    number = 10 * capability[0] + capability[1]
    return SimpleNamespace(
        is_cuda=yes, is_cuda_alike=yes, is_rocm=no, is_xpu=no, is_cpu=no, is_fp8_fnuz=no,
        is_pin_memory_available=yes, import_kernels=lambda: None,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability=lambda wanted: wanted == number,
        has_device_capability=lambda least: number >= least,
        get_device_name=lambda index=0: torch.cuda.get_device_name(index),
        dispatch_key="CUDA", simple_compile_backend="inductor",
    )  # fmt: skip


def provided(device: torch.device) -> dict[str, dict]:
    """Modules of vLLM's that are replaced, by what the files take from them."""
    import triton
    import triton.language

    return {
        "vllm.logger": {"init_logger": lambda name: Logger(logging.getLogger(name))},
        "vllm.platforms": {"current_platform": platform(device)},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.utils.import_utils": {"get_triton_kernels_version": lambda: None},
        # As where DeepGEMM is not installed: it would replace these experts, not help them.
        "vllm.utils.deep_gemm": {"is_deep_gemm_e8m0_used": lambda: False},
        "vllm.v1.worker.ubatching": {
            "dbo_enabled": lambda: False, "dbo_current_ubatch_id": lambda: 0
        },
        MOE: {"get_config": lambda: None},
    }  # fmt: skip


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's modules: its own files of `root`, what is provided, and nothing else."""

    def __init__(self, root: Path, own: set[str], given: dict[str, dict]) -> None:
        self.root, self.own, self.given = root, own, given

    def find_spec(self, name: str, path=None, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        if name in self.own:
            file = self.root / f"{name.replace('.', '/')}.py"
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self.given.get(module.__name__, {}))

        def __getattr__(name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            full = f"{module.__name__}.{name}"
            if full in self.own or full in self.given:
                return importlib.import_module(full)
            return absent(full)

        module.__getattr__ = __getattr__


def call(w_gate_up, w_down, scales: tuple = (None, None), block: int = 0) -> Callable:
    """call(x, (weights, ids)) of vLLM's experts; in FP8, inputs are quantised for each token, or in
    blocks if the weights are."""
    config = importlib.import_module(f"{MOE}.config")
    if scales[0] is None:
        quantised = config.FUSED_MOE_UNQUANTIZED_CONFIG
    else:
        quantised = config.fp8_w8a8_moe_quant_config(
            *scales, per_act_token_quant=not block, per_out_ch_quant=not block,
            block_shape=[block, block] if block else None,
        )  # fmt: skip
    # One GPU, and an activation without a limit or factors.
    layer = SimpleNamespace(
        moe_parallel_config=None, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None,
        activation_situ_beta=None, activation_situ_linear_beta=None,
    )  # fmt: skip
    no_dp_ep = importlib.import_module(f"{MOE}.prepare_finalize.no_dp_ep")
    experts = importlib.import_module(f"{MOE}.experts.triton_moe").TritonExperts(layer, quantised)
    kernel = importlib.import_module(f"{MOE}.modular_kernel").FusedMoEKernelModularImpl(
        no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular(), experts
    )
    return lambda x, routing: kernel.apply(x, w_gate_up, w_down, routing[1], routing[0])


def is_tuned(experts: int, intermediate: int, fp8: bool, block: int = 0) -> bool:
    """Whether vLLM has a config that was tuned for these experts on this GPU."""
    fused_moe = importlib.import_module(f"{MOE}.fused_moe")
    name = "fp8_w8a8" if fp8 else None
    return fused_moe.get_moe_configs(experts, intermediate, name, block, block) is not None


def load_files(root: Path, device: torch.device) -> None:
    """Makes `import vllm...` mean the files of this folder, which holds `vllm`."""
    if "vllm" in sys.modules:
        raise RuntimeError("a vLLM is imported already")
    sys.meta_path.insert(0, Finder(root, OWN, provided(device)))
    importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(device)


def load(folder: Path, device: torch.device) -> str:
    """folder: where peers.py has built. Returns vLLM's version."""
    versions = json.loads((folder / "versions.json").read_text())
    for torchs in ("libc10.so", "libtorch_cpu.so", "libtorch_cuda.so"):  # loaded, but not for all
        ctypes.CDLL(torchs, ctypes.RTLD_GLOBAL)
    torch.ops.load_library(folder / "libvllm_experts_peer.so")
    load_files(folder / versions["vllm_files"], device)
    return versions["vllm"]
