"""AMD's own Laplacian kernels, compiled by the generation of compiler that was published with them.

ROCm 5.3 was LLVM 15: clang 15 gives their sources the registers and scratch of the published table,
row by row. Kernels of examples/laplacian stand in where the sources or that compiler are missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import rocm

import simulator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "calibration"
COMPILER = "clang++-15"
# Its own device libraries: those that the project completes are newer than this compiler.
LIBRARIES = "--rocm-device-lib-path=/usr/lib/x86_64-linux-gnu/amdgcn/bitcode"
# As ROCm 5.3 made code objects: the workgroup's size is a scalar load from the dispatch packet.
FLAGS = ("-w", "-mcode-object-version=4")
# Scratch through scratch instructions is what the simulator knows of gfx90a.
SPILLS, FLAT_SCRATCH = "tiled_16", ("-Xclang", "-target-feature", "-Xclang", "+enable-flat-scratch")
SOURCES = {"baseline": 1, "tiled": 3, "bounded": 4, "streaming": 5}  # kernel<n>.hpp
STREAMED = "baseline_streaming"  # the first one, with the store of the fifth


def checkout() -> Path:
    return Path(os.environ.get("AMD_LAB_NOTES", FOLDER / "amd-lab-notes"))


def available() -> bool:
    return (checkout() / "finite-difference").exists() and bool(shutil.which(COMPILER))


def _text(name: str) -> str:
    """The published source of one kernel, in a namespace of its name."""
    step, _, rows = name.removesuffix("_streaming").partition("_")
    path = checkout() / "finite-difference" / "examples" / f"kernel{SOURCES[step]}.hpp"
    text = path.read_text().partition("template <typename T>\nvoid laplacian(")[0]
    if rows:
        text = re.sub(r"#define m \d+", f"#define m {rows}", text)
    if name == STREAMED:
        text = re.sub(
            r"f\[pos\] = (.*?);",
            r"__builtin_nontemporal_store(\1, &f[pos]);",
            text,
            flags=re.DOTALL,
        )
    return (
        f"#include <hip/hip_runtime.h>\nnamespace {name} {{\n{text}\n"
        "template __global__ void laplacian_kernel<double>(double*, const double*, int, int, int, "
        "double, double, double, double);\n}\n"
    )


class Kernels:
    """Launches the published kernels by the names and with the arguments of examples/laplacian."""

    def launch(self, name: str, grid, block, arguments, **options) -> simulator.api.Result:
        source, output = FOLDER / f"lab_notes_{name}.hip", FOLDER / f"lab_notes_{name}.co"
        FOLDER.mkdir(parents=True, exist_ok=True)
        source.write_text(_text(name))
        flags = FLAGS + (FLAT_SCRATCH if name == SPILLS else ())
        command = rocm.find_toolchain().device_command(source, output, "gfx90a", extra=flags)
        command = [LIBRARIES if "--rocm-device-lib-path" in part else part for part in command]
        subprocess.run([shutil.which(COMPILER), *command[1:]], check=True)
        code = simulator.load(output, "gfx90a")
        (kernel,) = code.kernels
        f, u, g = arguments
        plain = [f, u, g.nx, g.ny, g.nz, g.x, g.y, g.z, g.c]
        return code.launch(kernel, grid, block, plain, **options)
