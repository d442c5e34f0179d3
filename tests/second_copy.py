"""The package a second time in a process, as of another revision."""

import importlib.util
import sys
from pathlib import Path

import torch


def second_copy(package, monkeypatch):
    """Its ops have the same names, where those of revisions have names of their own."""
    monkeypatch.setattr(torch.library, "register_fake", lambda *given: None)  # they have theirs
    folder = Path(package.__file__).parent
    spec = importlib.util.spec_from_file_location("kernels_again", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    for name in [name for name in sys.modules if name.split(".")[0] == spec.name]:
        del sys.modules[name]  # of the last test's
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
