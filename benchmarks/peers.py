"""Builds public kernels that do the same work as ours, so that benchmarks time both in one run.

    python benchmarks/peers.py --out FOLDER --vllm FOLDER --vllm-version VERSION \
        [--flashinfer FOLDER --flashinfer-version VERSION]

builds libraries of FlashInfer's and vLLM's kernels from their sources, repositories or unpacked
packages; ``gpu.py --peers OUT`` and ``moe.py --peers OUT`` load them. vLLM's experts are in Python
files too, which stay where they are (vllm_experts.py). Liger and quack are taken when they are
importable. Nothing of theirs is part of this repository.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

EPS = 1e-6
OPS = ("rmsnorm_fp8", "swiglu_fp8", "rmsnorm", "swiglu")

# Of vLLM's csrc, what is in which library.
VLLM_KERNELS = {
    "vllm": ("layernorm_quant_kernels.cu", "quantization/activation_kernels.cu"),
    "vllm_experts": (
        "activation_kernels.cu",
        "moe/moe_align_sum_kernels.cu",
        "quantization/fused_kernels/fused_silu_mul_block_quant.cu",
        "quantization/w8a8/fp8/common.cu",
        "quantization/w8a8/fp8/per_token_group_quant.cu",
    ),
}

# Of the four ops; x, residual [rows, hidden] and scale as in gpu.py's row-wise cases.
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Peers:
    """What was found: for each op the peers' calls, the versions that ran, and who is missing.

    ``rmsnorm*`` are called with (x, residual, weight, scale), ``swiglu*`` with (x, scale); they
    return the result and may write the residual sum wherever they like.
    """

    calls: dict[str, dict[str, Norm | Activation]]
    versions: dict[str, str]
    missing: dict[str, str]


def find(folder: Path | None) -> Peers:
    """All peers of this machine; `folder` holds the libraries that this script has built."""
    peers = Peers({op: {} for op in OPS}, {}, {})
    for name, load in (
        ("FlashInfer", lambda: load_flashinfer(folder)),
        ("vLLM", lambda: load_vllm(folder)),
        ("Liger", load_liger),
        ("quack", load_quack),
    ):
        try:
            version, calls = load()
        except Exception as error:  # whatever a foreign package may raise: it is then not measured
            peers.missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        peers.versions[name] = version
        for op, call in calls.items():
            peers.calls[op][name] = call
    return peers


def _built(folder: Path | None, name: str) -> tuple[Path, str]:
    if folder is None:
        raise FileNotFoundError("no folder of built peers was given (--peers)")
    return folder / f"lib{name}_peer.so", json.loads((folder / "versions.json").read_text())[name]


def load_flashinfer(folder: Path | None):
    path, version = _built(folder, "flashinfer")
    library = ctypes.CDLL(str(path))
    pointer, unsigned, real = ctypes.c_void_p, ctypes.c_uint, ctypes.c_float
    library.flashinfer_add_norm_fp8.argtypes = [*[pointer] * 5, real, unsigned, unsigned, pointer]
    library.flashinfer_add_norm.argtypes = [*[pointer] * 3, real, unsigned, unsigned, pointer]
    library.flashinfer_swiglu.argtypes = [*[pointer] * 2, unsigned, ctypes.c_int, pointer]

    def stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    def checked(status: int) -> None:
        if status:
            raise RuntimeError(f"FlashInfer's launcher returned CUDA error {status}")

    def norm_fp8(x, residual, weight, scale):
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        pointers = (t.data_ptr() for t in (x, residual, weight, out, scale))
        checked(library.flashinfer_add_norm_fp8(*pointers, EPS, *x.shape, stream()))
        return out

    def norm(x, residual, weight, scale):
        pointers = (t.data_ptr() for t in (x, residual, weight))
        checked(library.flashinfer_add_norm(*pointers, EPS, *x.shape, stream()))
        return x

    def swiglu(x, scale):
        rows, d = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, d)
        checked(library.flashinfer_swiglu(out.data_ptr(), x.data_ptr(), rows, d, stream()))
        return out

    return version, {"rmsnorm_fp8": norm_fp8, "rmsnorm": norm, "swiglu": swiglu}


def load_vllm(folder: Path | None):
    path, version = _built(folder, "vllm")
    for torchs in ("libc10.so", "libtorch_cpu.so", "libtorch_cuda.so"):  # loaded, but not for all
        ctypes.CDLL(torchs, ctypes.RTLD_GLOBAL)
    torch.ops.load_library(path)
    ops = torch.ops.vllm_peer

    def norm_fp8(x, residual, weight, scale):
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        ops.add_norm_fp8(out, x, residual, weight, scale, EPS)
        return out

    def swiglu_fp8(x, scale):
        out = x.new_empty((x.shape[0], x.shape[1] // 2), dtype=torch.float8_e4m3fn)
        ops.swiglu_fp8(out, x, scale)
        return out

    return version, {"rmsnorm_fp8": norm_fp8, "swiglu_fp8": swiglu_fp8}


def load_liger():
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    calls = {
        "rmsnorm": lambda x, residual, weight, scale: fused_add_rms_norm_forward(
            x, residual, weight, EPS, 0.0, "llama"
        )[0],
        "swiglu": lambda x, scale: swiglu_fused_gate_up_forward(x)[1],
    }
    return importlib.metadata.version("liger-kernel"), calls


def load_quack():
    from quack.rmsnorm import rmsnorm_fwd

    calls = {
        "rmsnorm": lambda x, residual, weight, scale: rmsnorm_fwd(
            x, weight, residual=residual, eps=EPS
        )[0]
    }
    return importlib.metadata.version("quack-kernels"), calls


def build(name: str, sources: list[Path], includes: list[Path], out: Path) -> None:
    command = ["nvcc", "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC"]
    command += ["--expt-relaxed-constexpr", "--expt-extended-lambda", "--threads", "0"]
    command += ["-gencode=arch=compute_90,code=sm_90", "-diag-suppress", "20012,550,177,1835,3288"]
    command += ["-DUSE_CUDA", "-DENABLE_FP8", "-DENABLE_BF16"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += [argument for path in includes for argument in ("-isystem", str(path))]
    command += [*map(str, sources), "-o", str(out / f"lib{name}_peer.so")]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds FlashInfer's and vLLM's kernels.")
    parser.add_argument("--vllm", type=Path, required=True, help="its sources")
    parser.add_argument("--vllm-version", required=True, help="what is said of it in tables")
    parser.add_argument("--flashinfer", type=Path, help="its sources or wheel")
    parser.add_argument("--flashinfer-version")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--include", type=Path, action="append", default=[], help="more headers")
    arguments = parser.parse_args()
    from torch.utils import cpp_extension

    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    versions = {
        "vllm": arguments.vllm_version,
        "vllm_files": os.path.relpath(arguments.vllm, out),  # the two may move together
    }
    if arguments.flashinfer:
        header = next(arguments.flashinfer.rglob("include/flashinfer/norm.cuh"))
        includes = [header.parent.parent, *arguments.include]
        build("flashinfer", [here / "peers_flashinfer.cu"], includes, out)
        versions["flashinfer"] = arguments.flashinfer_version
    csrc = arguments.vllm / "csrc"
    includes = [csrc, *map(Path, cpp_extension.include_paths()), *arguments.include]
    for name, kernels in VLLM_KERNELS.items():
        sources = [here / f"peers_{name}.cpp", *(csrc / kernel for kernel in kernels)]
        build(name, sources, includes, out)
    (out / "versions.json").write_text(json.dumps(versions) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
