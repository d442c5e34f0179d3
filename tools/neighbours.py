"""Runs the tests of models beside the newest versions of their packages, and prints a table.

    python tools/neighbours.py                                # each that is newer than here
    python tools/neighbours.py --transformers 5.17.0 5.23.0   # these versions of transformers

First comes what is here, to compare with; then each package of NEIGHBOURS of which PyPI has a newer
version than requirements.txt, one at a time, so that it is clear whose news it is. Each has an
environment of its own in build/neighbours: this Python's packages, and over them the other version
with what it asks for. The exit code is 1 if a test failed, or a family of models has layers that do
not run whole.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / name) for name in ("tools", "tests")]
import mi300x_report  # noqa: E402

NEIGHBOURS = ("transformers", "accelerate", "compressed-tensors", "peft", "kernels", "torchao")
TESTS = (
    "tests/test_layers.py", "tests/test_models.py", "tests/test_moe_models.py",
    "tests/test_families.py", "tests/test_decoder_layers.py", "tests/test_hooks.py",
    "tests/test_surroundings.py", "tests/test_export.py", "tests/test_checkpoints.py",
    "tests/test_expert_checkpoints.py", "tests/test_published_checkpoints.py",
    "tests/test_expert_files.py", "tests/test_attention_models.py",
    "tests/test_fp8_cache.py", "tests/test_tensor_parallel.py",
)  # fmt: skip
UNKNOWN = "unknown to it"


@dataclass
class Result:
    """What one environment gave: its versions, counts of layers, counts of tests.

    Attributes:
        layers: of each family, how many of its decoder layers run whole, how many it has, and why
            the others do not.
    """

    neighbour: str
    version: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    layers: dict[str, tuple[int, int, str]] = field(default_factory=dict)

    def left(self) -> list[str]:
        """The families whose layers do not all run whole."""
        return [name for name, (whole, count, why) in self.layers.items() if whole < count or why]


# ---- environments


def pinned() -> dict[str, str]:
    """The versions that the requirements name."""
    text = "".join(path.read_text() for path in sorted(ROOT.glob("requirements*.txt")))
    return {name: version for name, version in re.findall(r"^([\w-]+)==(\S+)", text, re.M)}


def newest(names: tuple[str, ...]) -> dict[str, str]:
    """The versions that pip would install into this Python."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command = [*pip, "--no-deps", "--report", "-", *names]
    report = json.loads(subprocess.check_output(command, text=True))
    found = {each["metadata"]["name"]: each["metadata"]["version"] for each in report["install"]}
    return {name.replace("_", "-").lower(): version for name, version in found.items()}


def environment(name: str, version: str) -> str:
    """The Python of an environment with a version of a package, made once."""
    folder = ROOT / "build" / "neighbours" / f"{name}-{version}"
    python = str(folder / "bin" / "python")
    if (folder / "ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    own = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    Path(own, "here.pth").write_text("".join(f"{path}\n" for path in here))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if name == "torchao":  # in a folder of its own: requirements-torchao.txt says why
        pip += ["--no-deps", "--target", str(folder / "torchao")]
    else:
        (folder / "torchao").symlink_to(Path(sys.prefix) / "torchao")
    subprocess.run([*pip, f"{name}=={version}"], check=True)
    (folder / "ready").touch()
    return python


# ---- what runs in them


def run(neighbour: str, version: str, python: str, tests: tuple[str, ...] = TESTS) -> Result:
    """Counts whole layers in an environment, then runs the tests there."""
    result = Result(neighbour, version, layers=count_with(python))
    report = ROOT / "build" / "neighbours" / "junit.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*pytest, *tests], cwd=ROOT, stdout=sys.stderr)
    found = mi300x_report.test_results(report)
    result.passed = found.get("passed", 0)
    result.failed = [*found.get("failures", {"pytest itself": "has left no results"})]
    return result


def count_with(python: str) -> dict[str, tuple[int, int, str]]:
    """Runs :func:`count` by that Python."""
    command = [python, str(Path(__file__)), "--count"]
    said = subprocess.check_output(command, cwd=ROOT, text=True)
    return {name: tuple(each) for name, each in json.loads(said.splitlines()[-1]).items()}


def count() -> dict[str, tuple[int, int, str]]:
    """Counts for each family's tiny model: decoder layers that run whole, all layers, and why
    others do not."""
    import load
    from kernels import Mode, kernelize, use_kernel_mapping
    from models_table import ROWS
    from test_families import ALIKE, tiny
    from transformers import CONFIG_MAPPING

    choice = load.choose()
    package = load.load(choice)
    found = {}
    for family in (*ROWS, *ALIKE):
        if family not in CONFIG_MAPPING:
            found[family] = 0, 0, UNKNOWN
            continue
        model = tiny(family, pad_token_id=0).to(choice.device)
        report = package.models.quantize_model_(model)
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE)
        decoder = type(model.model.layers[0]).__name__
        counts = package.models.kernelized_layers(model)
        whole = sum(number for (name, _), number in counts.items() if name == decoder)
        missing = {**report.layers, **package.models.unkernelized_layers(model)}
        why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        if whole < len(model.model.layers) and not why:
            why = "nothing says why"
        found[family] = whole, len(model.model.layers), why
    return found


# ---- the table


def table(results: list[Result]) -> str:
    lines = ["| neighbour | version | passed | failed |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {r.neighbour} | {r.version} | {r.passed} | {len(r.failed)} |" for r in results]
    titles = " | ".join(f"{r.neighbour} {r.version}" for r in results)
    lines += ["", f"| whole layers | {titles} |", "| --- |" + " ---: |" * len(results)]
    for family in dict.fromkeys(family for r in results for family in r.layers):
        cells = []
        for result in results:
            whole, layers, why = result.layers.get(family, (0, 0, UNKNOWN))
            cells.append(f"{whole} of {layers}" if layers else why)
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    lines.append("")
    for r in results:
        lines += [f"{r.neighbour} {r.version}: {name}: {r.layers[name][2]}" for name in r.left()]
        lines += [f"{r.neighbour} {r.version}: failed {test}" for test in r.failed]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transformers", nargs="+", help="these versions, and no other package")
    parser.add_argument("--count", action="store_true", help="the layers of this Python, as JSON")
    arguments = parser.parse_args()
    if arguments.count:
        print(json.dumps(count()))
        return 0
    here = pinned()
    if arguments.transformers:
        wanted = [("transformers", version) for version in arguments.transformers]
    else:
        found = newest(NEIGHBOURS)
        wanted = [(name, found[name]) for name in NEIGHBOURS if found[name] != here[name]]
        if not wanted:
            print("PyPI has nothing newer than what is here")
    results = [run("here", f"transformers {here['transformers']}", sys.executable)]
    results += [run(name, version, environment(name, version)) for name, version in wanted]
    print(table(results), end="")
    return int(any(result.failed or result.left() for result in results))


if __name__ == "__main__":
    sys.exit(main())
