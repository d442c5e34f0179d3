"""How the workgroups of a kernel meet on AMD: what one published before is what all read behind."""

import subprocess

import numpy as np
import pytest
from project import ROOT

simulated = pytest.importorskip("simulated")
import simulator  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

STATE_WORDS = 512  # GridState's, and more


@pytest.fixture(scope="module")
def code(toolchain, tmp_path_factory):
    built = tmp_path_factory.mktemp("grid") / "grid_barrier.co"
    source = ROOT / "tests" / "devices" / "grid_barrier.hip"
    subprocess.run(toolchain.device_command(source, built, simulated.TARGET), check=True)
    return simulator.load(built)


def aligned_state():
    words = np.zeros(STATE_WORDS + 32, np.uint32)
    begin = -words.ctypes.data % 128 // 4
    return words[begin : begin + STATE_WORDS]


@pytest.mark.parametrize("workgroups", [1, 5, 8, 21])
def test_all_meet_round_after_round_and_launch_after_launch(code, workgroups):
    """Fewer workgroups than XCDs, too; and the state is as the launch before left it."""
    state, rounds = aligned_state(), 3
    state[256:264] = 0xFFFFFFFD  # the epochs: about to begin anew
    group, lane = np.arange(workgroups), np.arange(64)
    for seed in range(3):
        sums = np.zeros((rounds, workgroups, 64), np.uint32)
        published = np.zeros((2, workgroups, 64), np.uint32)
        args = [simulator.Out(sums), simulator.Out(published), state, rounds]
        code.launch("phases", workgroups, 64, args, seed=seed).check("suspicious")
        for round in range(rounds):
            numbers = round * 1000 + group[:, None] * 64 + (lane + group[:, None]) % 64
            assert (sums[round] == numbers.sum(0)).all()
