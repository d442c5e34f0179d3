"""The vLLM plugin with vLLM itself, which has an environment of its own."""

import os
import subprocess

import pytest
from project import ROOT


@pytest.mark.slow
def test_with_vllm_itself():
    """`make test-vllm`: the first time it fetches vLLM, a gigabyte, into build/vllm."""
    ours = ("LOCAL_KERNELS", "MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        ["make", "test-vllm"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
