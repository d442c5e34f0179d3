"""What is built and how users load it: layout, metadata, ABI, and every way in of the client."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import kernels
import pytest
from kernel_abi_check import ObjectFile
from kernels._rust import (
    Backend,
    Build,
    Digest,
    DigestAlgorithm,
    KernelDependency,
    KernelLock,
    KernelLocks,
    KernelVersion,
    Metadata,
)
from project import REPO_ID, ROOT

CPU_VARIANT = "torch-stable-abi211-cpu-x86_64-linux"
COMMITS = {1: "1" * 40, 2: "2" * 40}

GET_KERNEL = f"import kernels; package = kernels.get_kernel({REPO_ID!r}, version=1, backend='cpu')"
# Prints one number that only a working op can give: the sum of a norm of ones is the width.
USE = "import torch; print(round(package.rmsnorm(torch.ones(1, 64), torch.ones(64)).sum().item()))"


@pytest.fixture(scope="session")
def variant() -> Path:
    return ROOT / "build" / CPU_VARIANT


@pytest.fixture(scope="session")
def config() -> dict:
    with open(ROOT / "build.toml", "rb") as file:
        return tomllib.load(file)


@pytest.fixture(scope="session")
def second_version(tmp_path_factory, config) -> Path:
    """Version 2: the files that build.toml lists and no others, with the example's kernel added."""
    root = tmp_path_factory.mktemp("second") / "a path with spaces"
    files = set(config["torch"]["src"])
    for section in config["kernel"].values():
        if section["backend"] == "cpu":
            files |= set(section["src"])
    files |= {str(p.relative_to(ROOT)) for p in (ROOT / "torch-ext").rglob("*.py")}
    for name in [*sorted(files), "tools/build.py", "tools/rocm.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    text = (ROOT / "build.toml").read_text()
    (root / "build.toml").write_text(text.replace("\nversion = 1\n", "\nversion = 2\n"))
    patch = ["git", "apply", str(ROOT / "examples" / "add_kernel.patch")]
    subprocess.run(patch, cwd=root, check=True)
    command = [sys.executable, "tools/build.py", "--backend", "cpu"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return root / "build" / CPU_VARIANT


def hub_cache(folder: Path, versions: dict[int, Path]) -> Path:
    """A Hub cache as the client leaves it after downloading these versions."""
    repository = folder / f"kernels--{REPO_ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for version, variant in versions.items():
        (repository / "refs" / f"v{version}").write_text(COMMITS[version])
        target = repository / "snapshots" / COMMITS[version] / "build" / variant.name
        shutil.copytree(variant, target)
    return folder


def clean_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a clean process without the network."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_KERNELS"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**base, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result


def run_python(code: str, **environment: str) -> str:
    """What the code printed last."""
    return clean_python(code, **environment).stdout.strip().splitlines()[-1]


def test_build_toml_is_what_the_builder_reads(config):
    build = Build.open(str(ROOT))
    assert {Backend.CPU, Backend.CUDA, Backend.ROCm} == set(build.general.backends)
    for section in config["kernel"].values():
        for source in section["src"]:
            assert (ROOT / source).is_file(), source


def test_layout_and_metadata(variant, config):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.name.python_name == "rocm_kernels"
    assert metadata.version == config["general"]["version"]
    assert metadata.license == "Apache-2.0"
    assert metadata.backend.backend_type == Backend.CPU
    assert re.fullmatch(r"_rocm_kernels_cpu_[0-9a-f]+", metadata.id)
    assert metadata.provenance.kernel is None or re.fullmatch(
        "[0-9a-f]{40}", metadata.provenance.kernel.commit
    )
    assert (variant / f"{metadata.id}.abi3.so").is_file()
    assert (variant / "rocm_kernels" / "__init__.py").is_file()
    actual = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    stored = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
    actual_files = {k: v for k, v in actual.files.items() if "__pycache__" not in k}
    actual_files.pop("metadata.json", None)
    assert actual_files == stored


def test_extension_keeps_the_abi_promises(variant):
    (extension,) = variant.glob("*.abi3.so")
    extension_file = ObjectFile(extension)
    assert not extension_file.check_python_abi("3.9")
    violations = extension_file.check_manylinux("manylinux_2_28")
    assert not violations, [(v.name, v.dep, v.version) for v in violations]
    # Paths of the machine that built it do not reach the binary.
    assert str(ROOT).encode() not in extension.read_bytes()


def test_package_sources_are_python_39_and_import_nothing_else():
    for path in (ROOT / "torch-ext" / "rocm_kernels").rglob("*.py"):
        code = path.read_text()
        tree = ast.parse(code, str(path), feature_version=(3, 9))
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
        allowed = sys.stdlib_module_names | {"torch"}
        assert imported <= allowed, (path.name, imported - allowed)


def test_local_kernels_variable():
    code = f"{GET_KERNEL}; {USE}"
    assert run_python(code, LOCAL_KERNELS=f"{REPO_ID}={ROOT}") == "64"


def test_get_local_kernel():
    code = (
        "import kernels, pathlib\n"
        f"package = kernels.get_local_kernel(pathlib.Path({str(ROOT)!r}), backend='cpu')\n"
    )
    assert run_python(code + USE) == "64"


@pytest.mark.slow
def test_compatibility_folder(variant):
    code = (
        f"import sys; sys.path.insert(0, {str(variant)!r}); import rocm_kernels as package; {USE}"
    )
    assert run_python(code) == "64"


@pytest.mark.slow
def test_offline_hub_cache(tmp_path, variant):
    cache = hub_cache(tmp_path, {1: variant})
    code = f"{GET_KERNEL}; {USE}"
    assert run_python(code, HF_HUB_CACHE=str(cache)) == "64"


@pytest.mark.slow
def test_lock_file(tmp_path, variant):
    cache = hub_cache(tmp_path / "cache", {1: variant})
    dependency = KernelDependency(repo_id=REPO_ID, version=KernelVersion.Version(1))
    locks = KernelLocks({dependency: KernelLock(COMMITS[1])})
    (tmp_path / "kernels.lock").write_text(locks.to_json())
    code = (
        "import kernels, pathlib\n"
        f"lockfile = pathlib.Path({str(tmp_path / 'kernels.lock')!r})\n"
        f"package = kernels.load_kernel({REPO_ID!r}, lockfile=lockfile, backend='cpu')\n{USE}"
    )
    assert run_python(code, HF_HUB_CACHE=str(cache)) == "64"


@pytest.mark.slow
def test_two_versions_in_one_process(tmp_path, variant, second_version):
    cache = hub_cache(tmp_path, {1: variant, 2: second_version})
    code = (
        "import kernels\n"
        f"load = lambda v: kernels.get_kernel({REPO_ID!r}, version=v, backend='cpu')\n"
        "one, package = load(1), load(2)\n"
        "assert one.functional.ops is not package.functional.ops\n"
        "import torch; x = torch.randn(3, 40); w = torch.randn(40)\n"
        f"assert torch.equal(one.rmsnorm(x, w), package.rmsnorm(x, w))\n{USE}"
    )
    assert run_python(code, HF_HUB_CACHE=str(cache)) == "64"


def test_example_of_a_new_kernel_applies():
    """What it builds slow tests run."""
    patch = ["git", "apply", "--check", str(ROOT / "examples" / "add_kernel.patch")]
    subprocess.run(patch, cwd=ROOT, check=True)


@pytest.mark.slow
def test_example_of_a_new_kernel(second_version):
    code = (
        "import kernels, pathlib, torch\n"
        f"package = kernels.get_local_kernel(pathlib.Path({str(second_version)!r}))\n"
        "x = torch.randn(3, 5, 700) * 50\n"
        "torch.testing.assert_close(package.softcap(x, 30.0), package.reference.softcap(x, 30.0))\n"
        f"{USE}"
    )
    assert run_python(code) == "64"


@pytest.mark.kernels_ci
def test_all_is_complete(package):
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert hasattr(package, name), name


def test_package_is_loaded_once(package):
    assert kernels.get_kernel(REPO_ID, version=1, backend="cpu") is package
