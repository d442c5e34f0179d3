"""HipKittens' bfloat16 product on an MI325X and an MI355X, launched as its benchmark does.

C [N, N] = A B^T with a and b [N, N] in bfloat16. All workgroups are played with two short K, and
what a step of K adds between them is carried on to the published one. Rows in memory keep the
published length: with multiples of 8192 the kernel asks for no swizzled buffers.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import rocm

import simulator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "calibration"
# The headers of ROCm are newer than the distribution's: what they need of its other headers.
FLAGS = ("-std=c++20", "-w", "-Wno-invalid-constexpr", "-DHIP_DEPRECATED(text)=",
         "-DHIP_INCLUDE_HIP_HIP_RUNTIME_PT_API_H")  # fmt: skip
TILE, THREADS = 256, 512  # rows and columns of a workgroup, its threads
STEPS = (1024, 2048)  # K in the two launches


@dataclasses.dataclass(frozen=True)
class Case:
    gpu: str
    target: str
    file: str  # below the checkout, whose folders are branches
    flags: tuple[str, ...]
    lds: int
    size: int
    teraflops: float  # its file of results, beside the kernel
    changes: dict  # of the target's machine, all published

    @property
    def machine(self) -> simulator.cycles.Machine:
        return simulator.machine_for(self.target, **self.changes)


CASES = [
    # Against an MI300X: 6.0 TB/s for 5.3, of which the same part is taken to be sustained; bfloat16
    # products reach 843 TFLOP/s.
    Case("MI325X", "gfx942", "cdna3/analysis/bf16_gemm/mi325x/kernel_8192.cpp",
         ("-DKITTENS_CDNA3",), 65536, 8192, 749.4,
         {"memory_bytes_per_s": 4.2e12 * 6.0 / 5.3, "matrix_share": 843 / 1307}),
    Case("MI355X", "gfx950", "main/analysis/bf16_gemm/mi350x/kernel_8192.cpp",
         ("-DKITTENS_CDNA4", "-DHIP_ENABLE_WARP_SYNC_BUILTINS", "-ffast-math"),
         160000, 8192, 1610.5, {}),
]  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_size_t * 4), ("tag", ctypes.c_size_t)]


class _Arguments(ctypes.Structure):
    _fields_ = [*((name, _Tensor) for name in "abc"), ("stream", ctypes.c_void_p)]


def checkout() -> Path:
    return Path(os.environ.get("HIPKITTENS", FOLDER / "hipkittens"))


def headers() -> Path:
    return Path(os.environ.get("ROCM_CLR", FOLDER / "clr")) / "hipamd" / "include"


def _compiled(case: Case, m: int, n: int, k: int, include: Path) -> simulator.CodeObject:
    """The published file up to its Python binding, with another size of the product."""
    kernel, _, _ = (checkout() / case.file).read_text().partition("void dispatch_micro")
    kernel = kernel.replace('#include "pyutils/pyutils.cuh"', "")
    for name, size in (("M", m), ("N", n), ("K", k)):
        kernel, found = re.subn(rf"#define {name} \d+", f"#define {name} {size}", kernel)
        if found != 1:
            raise RuntimeError(f"{case.file}: required one definition of {name}, got {found}")
    source = FOLDER / f"hipkittens_{case.target}.hip"
    source.write_text("#include <hip/hip_runtime.h>\n"
                      f"#include <hip/amd_detail/amd_hip_fp8.h>\n{kernel}")  # fmt: skip
    paths = (checkout() / case.file.partition("/")[0] / "include", include / "hip", headers())
    extra = (*FLAGS, *case.flags, *(f"-I{path}" for path in (*paths, include)))
    output = source.with_suffix(".co")
    command = rocm.find_toolchain().device_command(source, output, case.target, extra=extra)
    subprocess.run(command, check=True)
    return simulator.load(output, case.target)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _float(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _tensor(array: np.ndarray) -> _Tensor:
    return _Tensor(array.ctypes.data, (1, 1, *array.shape), 0)


def _launched(case: Case, size: int, k: int, array, include: Path, **options) -> simulator.Result:
    """A product of `size` rows and columns over the first k of the rows of a and b."""
    code = _compiled(case, size, size, k, include)
    random = np.random.default_rng(0)
    a, b, c = (array(shape, np.uint16) for shape in [(size, case.size)] * 2 + [(size, size)])
    for values in (a, b):
        values[:, :k] = _bfloat16(random.standard_normal((size, k), np.float32) / 10)
    (kernel,) = code.kernels
    arguments = _Arguments(_tensor(a), _tensor(b), _tensor(c), None)
    got = code.launch(kernel, (size // TILE) ** 2, THREADS, [arguments], case.lds,
                      buffers=[a, b, c], caches=False, **options)  # fmt: skip
    if not options.get("checks", True):
        rows = [0, size // 2 + 3, size - 1]
        want = _float(a[rows, :k]) @ _float(b[:, :k]).T
        if not np.allclose(_float(c[rows]), want, rtol=1e-2, atol=1e-3 * np.abs(want).max()):
            raise RuntimeError(f"{case.gpu}: required the product of a and b, got another")
    return got


def findings(case: Case, array, include: Path) -> dict[str, int]:
    """Instructions that the checks object to in a small product, by kind."""
    found = _launched(case, 2 * TILE, 256, array, include).findings
    return dict(collections.Counter(finding.kind for finding in found))


def teraflops(case: Case, array, include: Path) -> float:
    """Modelled. `include` has empty headers hip/hip_{bf16,fp16,fp8}.h."""
    few, many = (
        _launched(case, case.size, k, array, include, checks=False, cycles=case.machine)
        for k in STEPS
    )
    step = (many.cycles.seconds - few.cycles.seconds) / (STEPS[1] - STEPS[0])
    return 2e-12 * case.size**3 / (many.cycles.seconds + step * (case.size - STEPS[1]))
