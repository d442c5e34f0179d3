"""Upload to a Hub and load from it, in a clean process each time, without the internet."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer
from huggingface_hub import HfApi
from project import ROOT, torch_built_for

PUBLISHER = "org"
REPO_ID = f"{PUBLISHER}/rocm-kernels"
CPU_VARIANT = "torch-stable-abi211-cpu-x86_64-linux"

USE = "import torch; print(round(package.rmsnorm(torch.ones(1, 64), torch.ones(64)).sum().item()))"
KERNELS = "from kernels.cli import main; main()"
LOAD = f"import kernels; package = kernels.get_kernel({REPO_ID!r}, version=1); {USE}"


def upload(hub: HubServer, variants: dict[str, Path], branch: str = "v1") -> str:
    """What `kernel-builder upload` does: the build on the version's branch. Returns the commit."""
    api = HfApi(endpoint=hub.url, token="not-a-secret")
    api.create_repo(REPO_ID, repo_type="kernel", exist_ok=True)
    api.create_branch(REPO_ID, repo_type="kernel", branch=branch, exist_ok=True)
    for name, folder in variants.items():
        commit = api.upload_folder(
            repo_id=REPO_ID,
            repo_type="kernel",
            revision=branch,
            folder_path=folder,
            path_in_repo=f"build/{name}",
            ignore_patterns=["**/__pycache__/**"],
        )
    return commit.oid


def edited(variant: Path, folder: Path) -> Path:
    """The variant with a mark in one module."""
    copy = folder / "edited"
    shutil.copytree(variant, copy)
    with open(copy / "functional" / "__init__.py", "a") as file:
        file.write("\nMARK = 2\n")
    return copy


@pytest.fixture
def variant() -> Path:
    return ROOT / "build" / CPU_VARIANT


@pytest.fixture
def hub(variant):
    """A Hub with version 1 of a trusted publisher."""
    with HubServer(trusted=(PUBLISHER,)) as hub:
        hub.first_commit = upload(hub, {CPU_VARIANT: variant})
        hub.requests.clear()
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    """Runs code, or the client's command line, in a clean process with a cache of its own.

    Some of the client's commands take no backend, so torch says that it was built for the CPU.
    """

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_KERNELS"))}
        base |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        base |= {"HF_HUB_DISABLE_XET": "1", "NO_COLOR": "1", "COLUMNS": "1000"}
        base |= torch_built_for("cpu", tmp_path / "torch")
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**base, **environment})

    return run


def result_of(process: subprocess.CompletedProcess) -> str:
    assert process.returncode == 0, process.stderr
    return process.stdout.strip().splitlines()[-1]


def error_of(process: subprocess.CompletedProcess) -> str:
    assert process.returncode != 0, process.stdout
    return process.stderr.strip()


@pytest.mark.slow
def test_version_branch(hub, client):
    assert result_of(client("-c", LOAD)) == "64"
    assert any("/refs" in request for request in hub.requests)
    downloaded = [request for request in hub.requests if "/resolve/" in request]
    assert downloaded
    assert all(f"/build/{CPU_VARIANT}/" in request for request in downloaded)


def test_offline_cache(hub, client):
    """kernels 0.17 with huggingface_hub 2 loads offline only from a complete snapshot of the branch
    (get_kernel itself fetches one variant): `hf download` first, as docs/release.md tells."""
    prepare = (
        "from huggingface_hub import snapshot_download\n"
        f"snapshot_download({REPO_ID!r}, repo_type='kernel', revision='v1')"
    )
    assert client("-c", prepare).returncode == 0
    hub.requests.clear()
    assert result_of(client("-c", LOAD, HF_HUB_OFFLINE="1")) == "64"
    pinned = LOAD.replace("version=1", f"revision={hub.first_commit!r}")
    assert result_of(client("-c", pinned, HF_HUB_OFFLINE="1")) == "64"
    assert hub.requests == []


def test_offline_without_a_cache_says_so(client):
    assert "not available in the local cache" in error_of(client("-c", LOAD, HF_HUB_OFFLINE="1"))


@pytest.mark.slow
def test_pinned_revision_survives_a_later_upload(hub, client, variant, tmp_path):
    second = upload(hub, {CPU_VARIANT: edited(variant, tmp_path)})
    assert second != hub.first_commit
    code = (
        "import kernels, sys; package = kernels.get_kernel(sys.argv[1], revision=sys.argv[2]); "
        "print(hasattr(package.functional, 'MARK'))"
    )
    assert result_of(client("-c", code, REPO_ID, hub.first_commit)) == "False"
    assert result_of(client("-c", code, REPO_ID, "v1")) == "True"


def test_unknown_version_lists_what_there_is(client):
    code = LOAD.replace("version=1", "version=7")
    assert "Version 7 not found, available versions: 1" in error_of(client("-c", code))


def test_missing_variant_says_why_each_was_rejected(hub, client, variant):
    gpu = CPU_VARIANT.replace("cpu", "rocm71")
    upload(hub, {gpu: variant}, branch="v3")
    message = error_of(client("-c", LOAD.replace("version=1", "version=3")))
    assert "Cannot find a build variant for this system" in message
    assert gpu in message


@pytest.mark.parametrize("trust", ["", ", trust_remote_code=['other/kernel']"])
def test_untrusted_publisher_is_refused(hub, client, trust):
    hub.trusted.clear()
    message = error_of(client("-c", LOAD.replace("version=1", f"version=1{trust}")))
    assert "is not from a trusted publisher" in message
    # Refused before anything was downloaded.
    assert not any("/resolve/" in request for request in hub.requests)


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["True", f"[{REPO_ID!r}]"])
def test_trust_can_be_given(hub, client, trust):
    hub.trusted.clear()
    code = LOAD.replace("version=1", f"version=1, trust_remote_code={trust}")
    assert result_of(client("-c", code)) == "64"


def test_truncated_download_is_refused(hub, client):
    hub.corrupt = lambda path, content: content[:-1] if path.endswith(".so") else content
    message = error_of(client("-c", LOAD, HF_HUB_DOWNLOAD_TIMEOUT="2"))
    assert re.search("[Cc]onsistency check failed|IncompleteRead|incomplete|peer closed", message)


TAMPERED = """
import pathlib, sys
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata
from kernels.install import install_kernel
folder = install_kernel("org/rocm-kernels", version=1)
stored = Metadata.read_from_file(folder / "metadata.json").digest
try:
    stored.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
except DigestValidationError as error:
    sys.exit("\\n".join(str(violation) for violation in error.violations))
"""


@pytest.mark.parametrize("tamper", [False, True])
def test_digest_tells_a_tampered_file(hub, client, tamper):
    """get_kernel trusts the publisher and does not hash; the digest that every variant carries, and
    `kernels verify-signature` checks, tells a file that was changed without changing its size."""
    if tamper:
        hub.corrupt = lambda path, content: (
            content.replace(b"eps", b"EPS", 1) if path.endswith("functional/norm.py") else content
        )
        assert "functional/norm.py" in error_of(client("-c", TAMPERED))
    else:
        assert client("-c", TAMPERED).returncode == 0


def test_changed_cache_is_told_from_the_repository(hub, client, tmp_path):
    """`hf cache verify` compares what is on disk with the Hub's own checksums."""
    assert result_of(client("-c", LOAD)) == "64"
    (cached,) = (tmp_path / "home").rglob("functional/norm.py")
    blob = cached.resolve()
    blob.write_bytes(blob.read_bytes().replace(b"eps", b"EPS", 1))
    check = (
        "from huggingface_hub import HfApi\n"
        f"result = HfApi().verify_repo_checksums({REPO_ID!r}, repo_type='kernel', "
        f"revision={hub.first_commit!r})\n"
        "print(sorted(m['path'] for m in result.mismatches))"
    )
    assert result_of(client("-c", check)) == f"['build/{CPU_VARIANT}/functional/norm.py']"


def test_unsigned_build_is_reported(client):
    process = client("-c", KERNELS, "verify-signature", REPO_ID, "1")
    assert process.returncode == 1
    assert "signature not found" in process.stdout


@pytest.mark.slow
def test_lock_file_pins_the_commit(hub, client, variant, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    locked = client("-c", KERNELS, "lock", str(project))
    assert locked.returncode == 0, locked.stderr
    assert hub.first_commit in (project / "kernels.lock").read_text()
    # A later upload to the branch does not change what the lock file loads.
    upload(hub, {CPU_VARIANT: edited(variant, tmp_path)})
    downloaded = client("-c", KERNELS, "download", str(project))
    assert downloaded.returncode == 0, downloaded.stderr
    code = (
        "import kernels, pathlib\n"
        f"lockfile = pathlib.Path({str(project / 'kernels.lock')!r})\n"
        f"package = kernels.get_locked_kernel({REPO_ID!r}, lockfile=lockfile)\n"
        f"assert not hasattr(package.functional, 'MARK')\n{USE}"
    )
    assert result_of(client("-c", code)) == "64"


@pytest.mark.slow
def test_info_and_versions(client):
    info = client("-c", KERNELS, "info", REPO_ID)
    assert "License: Apache-2.0" in info.stdout, info.stderr
    assert "Backends: cpu" in info.stdout
    versions = client("-c", KERNELS, "versions", REPO_ID)
    assert "Version 1" in versions.stdout and CPU_VARIANT in versions.stdout, versions.stderr
