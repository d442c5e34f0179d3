"""Other versions of transformers than the tests' own: docs/models.md, "Versions"."""

import subprocess
import sys

import pytest
import transformers.core_model_loading as loading
from project import ROOT
from tiny_models import tiny_llama

sys.path.insert(0, str(ROOT / "tools"))
import neighbours

MODELS = ("tests/test_models.py", "tests/test_layers.py", "tests/test_moe_models.py")
CHECKPOINTS = ("tests/test_checkpoints.py", "tests/test_expert_checkpoints.py")
DIVIDED = "tests/test_tensor_parallel.py"
NO_DEMO = ("-k", "not smollm2")  # which reads its file by GgufConfig, newer than this
NEWEST = "newest"
VERSIONS = {
    "5.16.1": (*MODELS, *NO_DEMO),
    "5.17.0": MODELS,
    "5.21.1": (*MODELS, *CHECKPOINTS),
    "5.23.0": (*MODELS, *CHECKPOINTS, "tests/test_attention_models.py", DIVIDED),
    "5.24.0": neighbours.TESTS,
    NEWEST: neighbours.TESTS,
}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_models_run_whole(version, fetching):
    """Every family's decoder layers are counted, and the tests of models pass."""
    tests = VERSIONS[version]
    with fetching:
        if version == NEWEST:
            version = neighbours.newest(("transformers",))["transformers"]
            if version in VERSIONS:
                pytest.skip(f"it is {version}, which has a case")
        python = neighbours.environment("transformers", version)
    asked = [python, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.check_output(asked, text=True).split()[-1] == version
    result = neighbours.run("transformers", version, python, tests)
    left = {family: result.layers[family][2] for family in result.left()}
    assert left == {} and result.failed == [] and result.passed


def test_a_version_too_old_for_checkpoints_is_named(package, tmp_path, monkeypatch):
    model = tiny_llama()
    package.models.quantize_model_(model)
    monkeypatch.delattr(loading.WeightTransform, "copy")
    said = r"transformers 5\.21 or later, got"
    with pytest.raises(ImportError, match=said):
        model.save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=said), package.models.fp8_checkpoints():
        pass
