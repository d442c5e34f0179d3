"""Where the project lies, what it is called on the Hub, and a torch that says what we want."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/rocm-kernels"

# What torch.version says of a build, by backend: cuda, hip.
TORCH_BUILDS = {"cpu": (None, None), "cuda": ("13.0", None), "rocm": (None, "7.1.25424")}


def slow_but(quick: list, values: Iterable) -> list:
    """Values, or tuples of some, for pytest's parametrize: all but the `quick` ones are slow."""
    found = []
    for value in values:
        each = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*each, marks=[pytest.mark.slow] * (value not in quick)))
    return found


def torch_built_for(backend: str, folder: Path) -> dict[str, str]:
    """Environment variables: a process's torch, whatever it is, says that it was built for a
    backend. The kernels client asks no more than that; and no GPU is to be seen."""
    cuda, hip = TORCH_BUILDS[backend]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        f"import torch\ntorch.version.cuda = {cuda!r}\ntorch.version.hip = {hip!r}\n"
    )
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
