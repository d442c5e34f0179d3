"""Loads what build/ holds, for the best device that can run it here.

    python tools/load.py                # says which, and why
    python tools/load.py --need-gpu     # and fails where torch has no GPU

The kernels client picks a variant by how torch was built. pip's torch for Linux is built for CUDA
wherever it is installed, so that says nothing of what can run. What loads the package in this
repository asks here instead: a GPU's variant is taken if torch has that GPU and build/ has code for
it, else the CPU's.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import kernels
import torch

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/rocm-kernels"


@dataclass(frozen=True)
class Choice:
    """A backend of the package ("cpu", "cuda" or "rocm"), where its tensors live, and why it."""

    backend: str
    device: torch.device
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} backend ({self.reason})"


def torch_gpu() -> tuple[str | None, str]:
    """The backend of the GPU that torch can use, and its name; or None, and why there is none."""
    backend = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
    if backend is None:
        return None, "torch is built for the CPU"
    if not torch.cuda.is_available():
        return None, f"torch is built for {backend}, and finds no GPU here"
    return backend, torch.cuda.get_device_name()


def choose() -> Choice:
    """The best backend that this machine, this torch and build/ have in common."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")
    gpu, reason = torch_gpu()
    if gpu is None:
        return Choice("cpu", torch.device("cpu"), reason)
    if not kernels.has_kernel(REPO_ID, version=1, backend=gpu):
        reason = f"build/ has no code for the {reason}; make build BACKEND={gpu} makes it"
        return Choice("cpu", torch.device("cpu"), reason)
    return Choice(gpu, torch.device("cuda"), reason)


def load(choice: Choice) -> ModuleType:
    """The package, as ``get_kernel`` gives it to users."""
    return kernels.get_kernel(REPO_ID, version=1, backend=choice.backend)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--need-gpu", action="store_true", help="fail where torch has no GPU")
    arguments = parser.parse_args()
    gpu, reason = torch_gpu()
    if arguments.need_gpu and gpu is None:
        print(f"error: this needs a GPU: {reason}", file=sys.stderr)
        return 1
    print(reason if arguments.need_gpu else choose())
    return 0


if __name__ == "__main__":
    sys.exit(main())
