"""What NVIDIA's choices of a config offer fits the shared memory of every generation of GPUs: by
the host's own compiler and without a GPU (tests/launches/offers.cpp)."""

import subprocess

import pytest
from project import ROOT

DESIGNS = {
    80: "decode plain tiled",
    86: "decode plain tiled",
    89: "decode plain tiled",
    90: "decode plain prefill resident streamed streamed_wgmma tiled warpgroup",
    100: "decode plain resident streamed tiled",
    120: "decode plain streamed tiled",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    program = tmp_path_factory.mktemp("offers") / "offers"
    source = ROOT / "tests/launches/offers.cpp"
    command = ["g++", "-std=c++17", "-O1", f"-I{ROOT}", source, "-o", program]
    subprocess.run(command, check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def test_every_offered_config_fits(played):
    assert played[-1].startswith("offers ") and played[-1].endswith(", misfits 0"), played[:20]
    assert int(played[-1].split()[1].rstrip(",")) > 100000


def test_every_gpu_is_offered_its_designs(played):
    """A check that is too strict would leave a GPU with less than it can run."""
    expected = [f"sm_{capability}: {names}" for capability, names in DESIGNS.items()]
    assert [line for line in played if line in expected] == expected, played[-8:]
