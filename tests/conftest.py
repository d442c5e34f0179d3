"""Backends: the same cases run on each device of --device.

    pytest --device cpu,simulator       # the default: all that this machine has

``reference`` is the definition itself, ``cpu``, ``cuda`` and ``rocm`` load build/ the way users do,
``simulator`` runs the machine code of the launchers on the CPU, gfx942 unless SIMULATOR_TARGET says
another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kernels
import pytest
import torch
from project import REPO_ID, ROOT
from torch.utils._device import DeviceContext, _device_constructors

sys.path.insert(0, str(ROOT / "tools"))  # before others' packages: pip has a `build`, too

# kernel-builder's ci-test has one variant, the sources and tests/*.py; no tools, no simulator, and
# of Python's packages those that flake.nix names.
IN_BUILDER = not (ROOT / "tools").is_dir()
BUILDER_TESTS = ("test_compile", "test_rmsnorm_fp8", "test_skinny_gemm", "test_swiglu_fp8")
collect_ignore = []
if IN_BUILDER:
    modules = [*Path(__file__).parent.glob("test_*.py"), *Path(__file__).parent.glob("*/")]
    collect_ignore = [str(path) for path in modules if path.stem not in BUILDER_TESTS]
    on_gpu = torch.cuda.is_available()
    HERE = SimpleNamespace(
        backend=("rocm" if torch.version.hip else "cuda") if on_gpu else "cpu",
        device=torch.device("cuda" if on_gpu else "cpu"),
    )
else:
    import load
    import rocm

    HERE = load.choose()

DEVICES = ("reference", "cpu", "simulator", "cuda", "rocm")

# Who asks for one of these computes on the device: `--device cuda` runs these tests and no others.
DEVICE_FIXTURES = {"backend", "best_package", "device"}

os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")


@dataclass(frozen=True)
class Backend:
    """One device to test: ``ops`` has the functional API, tensors live on ``device``."""

    name: str
    ops: Any
    device: torch.device
    fp8_dtype: torch.dtype  # the native dialect

    def __str__(self) -> str:
        return self.name


def available_devices() -> list[str]:
    """A GPU where there is one, else the simulator where there is a compiler for it."""
    if IN_BUILDER:
        return [HERE.backend]
    if HERE.backend != "cpu":
        return ["reference", "cpu", HERE.backend]
    try:
        rocm.find_toolchain()
    except rocm.ToolchainMissing:
        return ["reference", "cpu"]
    return ["reference", "cpu", "simulator"]


def pytest_configure(config: pytest.Config) -> None:
    # Here and not in pyproject.toml, which kernel-builder's ci-test does not have.
    config.addinivalue_line("markers", "not_on(device, ...): the case is not one of these devices'")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default=",".join(available_devices()),
        help=f"comma-separated devices to run the kernels' cases on, of {', '.join(DEVICES)}",
    )


def selected_devices(config: pytest.Config) -> list[str]:
    names = [name.strip() for name in config.getoption("--device").split(",") if name.strip()]
    unknown = sorted(set(names) - set(DEVICES))
    if unknown or not names:
        raise pytest.UsageError(f"--device takes names of {', '.join(DEVICES)}, got {unknown}")
    absent = {"cuda", "rocm"} & set(names) - {HERE.backend}
    if absent:
        raise pytest.UsageError(f"--device {', '.join(sorted(absent))}: here is the {HERE}")
    return names


def pytest_report_header(config: pytest.Config) -> list[str]:
    names = ", ".join(selected_devices(config))
    return [f"devices: {names} (torch {torch.__version__})", f"users get: {HERE}"]


def _reaches_the_device(item: pytest.Item) -> bool:
    """By this file's fixtures, not by a test's own of the same name."""
    found = item._fixtureinfo.name2fixturedefs
    return any(found[name][-1].func.__module__ == __name__ for name in DEVICE_FIXTURES & {*found})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu_alone = set(selected_devices(config)) <= {"cuda", "rocm"}

    def is_kept(item: pytest.Item) -> bool:
        # Packaging, the simulator and the like are the same on every machine.
        return not on_gpu_alone or _reaches_the_device(item)

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        left_out = {n for mark in metafunc.definition.iter_markers("not_on") for n in mark.args}
        names = [name for name in selected_devices(metafunc.config) if name not in left_out]
        metafunc.parametrize("backend", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    name = request.param
    if name == "simulator":
        import simulated

        return Backend(name, simulated.functional(), torch.device("cpu"), simulated.NATIVE)
    if name in ("cuda", "rocm"):
        package = kernels.get_kernel(REPO_ID, version=1, backend=name)
        device = torch.device("cuda", 0)
        return Backend(name, package, device, package.native_fp8_dtype(device))
    package = kernels.get_kernel(REPO_ID, version=1, backend="cpu")
    ops = package.reference if name == "reference" else package
    return Backend(name, ops, torch.device("cpu"), torch.float8_e4m3fn)


@pytest.fixture(scope="session")
def cpu_package() -> ModuleType:
    """The package's CPU variant, which every machine has."""
    return kernels.get_kernel(REPO_ID, version=1, backend="cpu")


@pytest.fixture
def package(request: pytest.FixtureRequest) -> ModuleType:
    """The CPU variant; for a test that kernelizes models the one whose layers they get, since a
    program has one variant."""
    kernelizes = "run_kernelized" in request.fixturenames
    return request.getfixturevalue("best_package" if kernelizes else "cpu_package")


@pytest.fixture(scope="session")
def best_package() -> ModuleType:
    """The package as users load it: for ``device``."""
    return kernels.get_kernel(REPO_ID, version=1, backend=HERE.backend)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """This machine's best device that the package runs on."""
    return HERE.device


@pytest.fixture
def run_kernelized(best_package: ModuleType, device: torch.device) -> Callable:
    """Call it with a model, and a mode: kernelized, on ``device``."""
    mapping = best_package.layers.kernel_mapping()

    def kernelized(model: torch.nn.Module, mode: kernels.Mode = kernels.Mode.INFERENCE):
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            return kernels.kernelize(model.to(device), mode=mode)

    return kernelized


@pytest.fixture(scope="session")
def toolchain() -> Any:
    """The compiler for AMD GPUs (tools/rocm.py)."""
    try:
        return rocm.find_toolchain()
    except rocm.ToolchainMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def on_the_simulator(request: pytest.FixtureRequest) -> None:
    """For tests of the simulator's device alone."""
    if "simulator" not in selected_devices(request.config):
        pytest.skip("runs with --device simulator")


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """For tests of a GPU alone."""
    if device.type == "cpu":
        pytest.skip(f"needs a GPU and a build for it; here is the {HERE}")
    return device


class OnDevice(DeviceContext):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if given.get("generator") is not None and func in _device_constructors():
            # Else it is the CPU's, and noticed on a GPU alone.
            assert given.get("device") is not None, "a generator draws on a device that is named"
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """Tensors that a test makes lie on ``device``, unless it says where."""
    with OnDevice(device):
        yield


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Fresh data for each test, the same for the same test on every backend and in every run."""
    name = request.node.originalname or request.node.name
    torch.manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
