"""Other versions of transformers than the tests' own: docs/models.md, "Versions"."""

import os
import shutil
import subprocess
import sys

import pytest
import transformers.core_model_loading as loading
from project import ROOT
from tiny_models import tiny_llama

# With the client of the Hub that it asks for, where that is another than the tests' own.
OLD_HUB = ("huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0",
           "anyio==4.16.0", "certifi", "idna", "typing_extensions")  # fmt: skip
MODELS = ("tests/test_models.py", "tests/test_layers.py", "tests/test_moe_models.py")
NO_DEMO = ("-k", "not smollm2")  # which reads its file by GgufConfig, newer than this
VERSIONS = {
    "5.16.1": (OLD_HUB, (*MODELS, *NO_DEMO)),
    "5.17.0": (OLD_HUB, MODELS),
    "5.21.1": (OLD_HUB, (*MODELS, "tests/test_checkpoints.py", "tests/test_expert_checkpoints.py")),
    "5.23.0": ((), (*MODELS, "tests/test_checkpoints.py", "tests/test_expert_checkpoints.py")),
}


def installed(version, others):
    """The folder of a transformers, installed once."""
    folder = ROOT / "build" / f"transformers-{version}"
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        pip += ["--target", str(partial), f"transformers=={version}", *others]
        subprocess.run(pip, check=True)
        shutil.move(partial, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_models_are_quantised_and_run(version):
    others, files = VERSIONS[version]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *files]
    environment = {**os.environ, "PYTHONPATH": str(installed(version, others))}
    asked = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.check_output(asked, env=environment, text=True).split()[-1] == version
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_a_version_too_old_for_checkpoints_is_named(package, tmp_path, monkeypatch):
    model = tiny_llama()
    package.models.quantize_model_(model)
    monkeypatch.delattr(loading.WeightTransform, "copy")
    said = r"transformers 5\.21 or later, got"
    with pytest.raises(ImportError, match=said):
        model.save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=said), package.models.fp8_checkpoints():
        pass
