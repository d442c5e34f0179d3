"""Metadata lists the targets that the extension's fat binary holds code for.

A rocm variant is built for the targets of build.toml, of one small source in place of the kernels:
their own build takes minutes, and test_release.py has it among the slow tests.
"""

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import release_check
import rocm

BINDING = """\
#include "registration.h"
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""
PROBE = """\
#include <hip/hip_runtime.h>
#if !defined(WITHOUT)
__global__ void probe(int* out) { *out = 1; }
#endif
"""


def targets() -> list[str]:
    """What build.toml builds the kernels for."""
    return release_check.Variant(ROOT, ROOT).config["kernel"]["rmsnorm_fp8_rocm"]["rocm-archs"]


def build_of_a_probe(root: Path, probe: str) -> release_check.Variant:
    text = (ROOT / "build.toml").read_text()
    head = text[: text.index("[torch]")]
    config = f"""{head}
[torch]
src = ["torch-ext/torch_binding.cpp"]
[torch.stable-abi]
rocm = "2.11"
[kernel.probe_rocm]
backend = "rocm"
depends = ["torch"]
rocm-archs = {json.dumps(targets())}
src = ["probe.hip"]
"""
    for name, content in {
        "build.toml": config,
        "torch-ext/torch_binding.cpp": BINDING,
        "torch-ext/rocm_kernels/__init__.py": "from ._ops import ops\n",
        "probe.hip": probe,
        **{
            f"tools/{name}": (ROOT / "tools" / name).read_text() for name in ("build.py", "rocm.py")
        },
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    command = [sys.executable, "tools/build.py", "--backend", "rocm"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return release_check.Variant(root / done.stdout.split()[-1], root)


pytestmark = pytest.mark.usefixtures("toolchain")


@pytest.fixture(scope="module")
def variant(tmp_path_factory) -> release_check.Variant:
    return build_of_a_probe(tmp_path_factory.mktemp("probe") / "a path with spaces", PROBE)


def test_metadata_lists_the_targets_that_hold_code(variant):
    assert variant.metadata.backend.archs == targets()
    (held,) = release_check.device_code.units(variant.extension, "rocm")
    assert held == set(targets())
    assert release_check.check_device_code(variant)


@pytest.mark.parametrize("change", ["one more", "one fewer"])
def test_other_metadata_is_found(variant, tmp_path, change):
    shutil.copytree(variant.folder, tmp_path / "copy")
    path = tmp_path / "copy" / "metadata.json"
    metadata = json.loads(path.read_text())
    archs = metadata["backend"]["archs"]
    metadata["backend"]["archs"] = [*archs, "gfx906"] if change == "one more" else archs[1:]
    path.write_text(json.dumps(metadata))
    odd = "gfx906" if change == "one more" else archs[0]
    with pytest.raises(release_check.Failure, match=odd):
        release_check.check_device_code(release_check.Variant(tmp_path / "copy", variant.root))


def test_a_target_without_a_kernel_is_found(tmp_path):
    last = targets()[-1]
    variant = build_of_a_probe(tmp_path, PROBE.replace("WITHOUT", f"__{last}__"))
    with pytest.raises(ValueError, match=f"{last} holds no kernel"):
        release_check.check_device_code(variant)


def test_builds_that_start_together_share_the_device_libraries(tmp_path, monkeypatch):
    """The first command in a fresh clone may be one that compiles in many processes at once."""
    libraries = next((path for path in rocm._DEVICE_LIBRARIES if path.is_dir()), None)
    if libraries is None:
        pytest.skip("this machine's device libraries are ROCm's, which lack nothing")
    monkeypatch.setattr(rocm, "ROOT", tmp_path)
    _, suffix = rocm._newest_clang()
    begin = threading.Barrier(8)

    def complete(_: int) -> Path:
        begin.wait()
        return rocm._complete_device_libraries(libraries, suffix)

    with ThreadPoolExecutor(8) as pool:
        (folder,) = set(pool.map(complete, range(8)))
    constants = {f"oclc_isa_version_{target.removeprefix('gfx')}.bc" for target in rocm.TARGETS}
    made = {path.name for path in folder.iterdir()}
    assert made == constants | {path.name for path in libraries.glob("*.bc")}
