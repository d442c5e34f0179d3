"""The vLLM plugin with vLLM itself, which has an environment of its own."""

import contextlib
import os
import subprocess
import sys

import pytest
from project import ROOT

READY = ROOT / "build" / "vllm" / "ready"


def make(arguments=""):
    """`make test-vllm`, in the environment of these tests."""
    ours = ("LOCAL_KERNELS", "MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = ["make", "test-vllm", f"VENV={sys.prefix}", f"ARGS={arguments}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_the_newest_and_the_oldest_vllm_have_every_hook():
    if not READY.exists():
        pytest.skip("build/vllm is not there: make test-vllm fetches vLLM, some gigabytes")
    make("-k '(newest or oldest) and (hook_is_there or every_part)'")


@pytest.mark.slow
def test_with_vllm_itself(fetching):
    """The first time it fetches vLLM, some gigabytes, into build/vllm."""
    with contextlib.nullcontext() if READY.exists() else fetching:
        make()
