"""The simulator as a package by itself: installed by pip, and its three uses."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import simulator

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "simulator" / "examples"


def run(*command, cwd, **environment) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def example(name: str, folder: pathlib.Path, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return run(sys.executable, EXAMPLES / name, *arguments, cwd=folder, PYTHONPATH=path)


def check_own_kernel(printed: str) -> None:
    wrong, right = printed.split("with barriers: ")
    assert re.search(r"lds-race in sums at \S+sums.hip:9", wrong)
    assert right.startswith("sums right: True") and "lds-race" not in right


def test_own_kernel(tmp_path):
    check_own_kernel(example("own_kernel.py", tmp_path))


def test_torch_extension(tmp_path):
    if not pathlib.Path("/usr/include/hip/hip_runtime.h").exists():
        pytest.skip("needs the HIP headers of libamdhip64-dev")
    assert example("torch_extension.py", tmp_path).startswith("right: True")


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_triton(tmp_path, target):
    pytest.importorskip("triton", reason="pip install triton")
    printed = example("triton_matmul.py", tmp_path, "--target", target)
    error = re.search(rf"{target}: largest error (\S+), (\d+) MFMA", printed)
    # Sums of 384 products of unit variance reach 100, where neighbouring halves lie 1/16 apart.
    assert float(error[1]) <= 1 / 32 and int(error[2]) > 0


@pytest.mark.slow
def test_pip_installs_module_command_and_version(tmp_path):
    """The engine is compiled on first use, into the user's cache and not beside the module."""
    environment, cache = tmp_path / "venv", tmp_path / "cache"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python, command = environment / "bin" / "python", environment / "bin" / "cdna-simulator"
    run(python, "-m", "pip", "install", "--quiet", ROOT / "simulator", cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).split()[-1] == simulator.__version__
    where = run(python, "-c", "import simulator; print(simulator.__file__)", cwd=tmp_path)
    assert pathlib.Path(where.strip()).is_relative_to(environment)
    used = {"XDG_CACHE_HOME": str(cache)}
    printed = run(python, EXAMPLES / "own_kernel.py", "--html", "page.html", cwd=tmp_path, **used)
    check_own_kernel(printed)
    assert "Where the cycles went" in (tmp_path / "page.html").read_text()
    assert list((cache / "cdna-simulator").glob("*/libsimulator.so"))
    assert not list(pathlib.Path(where.strip()).parent.rglob("*.so"))
