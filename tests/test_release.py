"""What a release rests on: the API's promise, the card, the workflows. The artifact's own proof is
in test_release_checks.py."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml
from project import ROOT

sys.path.insert(0, str(ROOT / "tools"))
public_api = importlib.import_module("public_api")
release_check = importlib.import_module("release_check")
report = importlib.import_module("mi300x_report")

CPU_VARIANT = "torch-stable-abi211-cpu-x86_64-linux"


@pytest.fixture(scope="module")
def cpu_build() -> Path:
    """This checkout's CPU variant, of exactly these sources."""
    command = [sys.executable, "tools/build.py", "--backend", "cpu"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return ROOT / "build" / CPU_VARIANT


@pytest.fixture
def copied(cpu_build, tmp_path) -> Path:
    target = tmp_path / "build" / CPU_VARIANT
    shutil.copytree(cpu_build, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def variant_of(folder: Path):
    return release_check.Variant(folder, ROOT)


def test_bill_of_materials(copied):
    first = Path(copied.parent.parent, release_check.check_sbom(variant_of(copied)))
    document = json.loads(first.read_text())
    assert document["bomFormat"] == "CycloneDX"
    files = document["metadata"]["component"]["components"]
    assert {file["name"] for file in files} == set(variant_of(copied).files)
    assert {"PyTorch", "torch"} <= {component["name"] for component in document["components"]}
    again = first.read_bytes()
    release_check.check_sbom(variant_of(copied))
    assert first.read_bytes() == again


@pytest.mark.slow
@pytest.mark.parametrize("built_for", ["cpu", "cuda", "rocm"])
def test_reproducible_from_the_listed_files(built_for):
    """Two folders with nothing but what build.toml lists give one build, byte for byte."""
    tool = {"cpu": "g++", "cuda": "nvcc", "rocm": "clang++-22"}[built_for]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = [sys.executable, "tools/build.py", "--backend", built_for]
    built = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    release_check.check_reproducible(variant_of(ROOT / built.stdout.split()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("built_for", ["cuda", "rocm"])
def test_cross_built_variant_passes(built_for):
    tool = {"cuda": "nvcc", "rocm": "clang++-22"}[built_for]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = [sys.executable, "tools/build.py", "--backend", built_for]
    built = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    variant = variant_of(ROOT / built.stdout.split()[-1])
    assert release_check.run(variant, release_check.CHECKS) == 0


@pytest.mark.slow
def test_ci_test_of_kernel_builder(cpu_build, tmp_path):
    """`nix run .#ci-test` has the listed files and tests/*.py, one variant, and few packages."""
    release_check.copy_listed(variant_of(cpu_build), tmp_path, "cpu")
    shutil.rmtree(tmp_path / "tools")
    for path in (ROOT / "tests").rglob("*.py"):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    variants = tmp_path / "variant"
    shutil.copytree(cpu_build, variants / cpu_build.name)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE_PACKAGES)
    command = [sys.executable, "-m", "pytest", str(tmp_path / "tests"), "-q", "-m", "kernels_ci"]
    environment = {**os.environ, "PYTHONPATH": str(hidden)}
    environment["LOCAL_KERNELS"] = f"org/rocm-kernels={variants}"
    command += ["-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 100


# The builder's Python has torch, kernels, pytest and what flake.nix names.
HIDE_PACKAGES = """
import sys

class Hide:
    names = {"kernel_abi_check", "ninja", "transformers", "elftools", "cyclonedx", "msgpack",
             "gguf", "accelerate", "rich"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
"""


def test_kernels_of_a_backend_have_the_same_targets():
    """metadata.json lists the union: a device in it must find every kernel."""
    config = release_check.Variant(ROOT, ROOT).config
    for key in ("rocm-archs", "cuda-capabilities"):
        targets = {n: s[key] for n, s in config["kernel"].items() if key in s}
        assert targets and len({tuple(archs) for archs in targets.values()}) == 1, targets


def test_public_api_is_the_stored_one_unless_unreleased():
    entry, released = public_api.newest_entry()
    assert entry == public_api.version(), "CHANGELOG.md begins with build.toml's version"
    stored = json.loads(public_api.STORED.read_text())
    current = {"version": entry, "released": released, "api": public_api.public_api()}
    assert public_api.may_write(stored, current) is None, public_api.difference(stored, current)
    if released:
        assert stored == current, "run `python tools/public_api.py --write`"


@pytest.mark.parametrize(
    ("version", "signature", "refused"),
    [(1, "(x)", False), (1, "(x, y)", True), (2, "(x, y)", False)],
)
def test_released_api_changes_with_the_version_only(version, signature, refused):
    stored = {"version": 1, "released": True, "api": {"f": "(x)"}}
    current = {"version": version, "released": True, "api": {"f": signature}}
    assert bool(public_api.may_write(stored, current)) == refused


def test_public_api_sees_what_matters(tmp_path):
    (tmp_path / "__init__.py").write_text(
        'from . import layers\nfrom .functional import f\n__all__ = ["f", "layers"]\n'
    )
    (tmp_path / "functional.py").write_text("def f(x: int, *, y=1) -> int: ...\ndef g(): ...\n")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "__init__.py").write_text(
        "from typing import Any\nfrom ..functional import g\nfrom .norm import A\n__all__ = ['A']"
    )
    (tmp_path / "layers" / "norm.py").write_text(
        "class A:\n  has_backward = False\n  def forward(self, x): ...\n  def _h(self): ...\n"
        "class B: ...\n"
    )
    assert public_api.public_api(tmp_path) == {
        "f": "(x: int, *, y=1) -> int",
        "layers": {"A": {"forward": "(self, x)", "has_backward": "= False"}},
    }


def card(**changes: object) -> str:
    """CARD.md as kernel-builder fills it: its variables, its trim_blocks."""
    api = public_api.public_api()
    config = release_check.Variant(ROOT, ROOT).config["general"]
    values = {
        "repo_id": config["hub"]["repo-id"],
        "version": config["version"],
        "functions": [name for name in api if name != "layers"],
        "layers": [n for n, members in api["layers"].items() if isinstance(members, dict)],
        "has_benchmark": (ROOT / "benchmarks" / "benchmark.py").exists(),
        "upstream": config.get("upstream"),
        "source": config.get("source"),
        "license": config["license"].lower(),
    }
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((ROOT / "CARD.md").read_text()).render({**values, **changes})


def test_card_renders():
    text = card()
    _, header, body = text.split("---\n", 2)
    assert yaml.safe_load(header)["license"] == "apache-2.0"
    assert "{{" not in text and "{%" not in text
    for name in public_api.public_api():
        assert f"- `{name}`" in body or name == "layers"
    for section in ("How to use", "Available functions", "Available layers", "Numbers", "Limits"):
        assert f"\n## {section}\n" in body
    for absent in ("functions", "layers", "license"):
        assert card(**{absent: None})


def test_card_example_runs(package):
    """The first example, with the package in place of a download."""
    example = re.search(r"```python\n(.*?)```", card(), re.DOTALL)[1]
    lines = [line for line in example.splitlines() if "get_kernel" not in line]
    scope = {"rocm_kernels": package}
    exec("\n".join(lines), scope)
    assert scope["y"].shape == (4, 1024) and scope["y"].isfinite().all()


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_workflow_is_pinned_and_asks_for_little(path):
    text = path.read_text()
    for action in re.findall(r"uses:\s*(\S+)", text):
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}, "rights are given to each job, not to all"
    for name, job in workflow["jobs"].items():
        assert "permissions" in job and "timeout-minutes" in job, name
        for step in job["steps"]:
            # A secret reaches a step through its environment, never through its command line.
            assert "secrets." not in str(step.get("run", "")), name


def test_report_keeps_the_machine_anonymous():
    text = f"{ROOT}/tools/build.py and {Path.home()}/.cache on {report.platform.node()}"
    assert report.anonymous(text).startswith("./tools/build.py and ~/.cache on ")
    node = report.platform.node()
    assert len(node) <= 3 or node not in report.anonymous(text)


def test_report_survives_a_step_that_fails(tmp_path):
    missing = report.run("missing", ["python", "no-such-file.py"], 1)
    assert missing["outcome"] != "0" and "no-such-file.py" in missing["output"]
    endless = report.run("endless", [sys.executable, "-c", "while True: pass"], 0.01)
    assert "longer than" in endless["outcome"]
    junit = tmp_path / "tests.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" '
        'name="bad"><failure>why</failure></testcase></testsuite></testsuites>'
    )
    assert report.test_results(junit) == {
        "passed": 1,
        "failed": 1,
        "skipped": 0,
        "failures": {"a::bad": "why"},
    }


@pytest.mark.slow
def test_report_tunes(cpu_build):
    step, tuning = report.tune(str(cpu_build), ["64,512"], "1,16")
    assert step["outcome"] == "0" and tuning["entries"][0]["n"] == 64
    step, tuning = report.tune(str(cpu_build), ["64"], "1")
    assert step["outcome"] != "0" and tuning == {}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "simulator"])
def test_report_without_a_gpu(device, tmp_path):
    output = tmp_path / "report.json"
    command = [sys.executable, "tools/mi300x_report.py", "--device", device, "--quick"]
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=True)
    written = json.loads(output.read_text())
    assert written["tests"]["passed"] > 100 and not written["tests"]["failures"]
    assert str(ROOT) not in output.read_text()
