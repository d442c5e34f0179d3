"""The launchers of all_reduce on several simulated devices, all ranks' launches queued at once: the
results have the definition's bits, and every mailbox is empty again."""

import os
import subprocess

import pytest
import simulated
from project import ROOT, slow_but

import simulator

pytestmark = pytest.mark.usefixtures("toolchain", "on_the_simulator")


@pytest.fixture(scope="module")
def build_program(toolchain):
    """Call it with the name of a file of tests/devices/: a program that links the launchers."""
    library = simulated.build_launchers()
    folder = library.parent / "devices"
    folder.mkdir(exist_ok=True)

    def build(name):
        source, compiled = ROOT / "tests" / "devices" / f"{name}.hip", folder / f"{name}.o"
        fnuz = f"-DFNUZ={int(simulated.TARGET == 'gfx942')}"
        command = toolchain.compile_command(source, compiled, (simulated.TARGET,), extra=(fnuz,))
        subprocess.run(command, check=True)
        libraries = [str(library), str(simulator.runtime())]
        paths = [f"-Wl,-rpath,{os.path.dirname(path)}" for path in libraries]
        linked = [toolchain.compiler, "--hip-link", str(compiled), *libraries, *paths]
        subprocess.run([*linked, "-pthread", "-o", str(folder / name)], check=True)
        return folder / name

    return build


@pytest.fixture(scope="module")
def program(build_program):
    return build_program("all_reduce")


@pytest.fixture(scope="module")
def norm_program(build_program):
    return build_program("all_reduce_norm")


def run(program, seed, *arguments):
    environment = {**os.environ, "SIMULATOR_SEED": str(seed)}
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    return done.stdout + done.stderr


FLOAT, BFLOAT16 = 0, 1
SIZES = (64, 1000, 77, 1, 3001, 20000)


@pytest.mark.parametrize(
    "ranks, dtype, seed",
    slow_but([(2, BFLOAT16, 1), (3, FLOAT, 2), (4, BFLOAT16, 0)], [
        (2, FLOAT, 0), (2, BFLOAT16, 1), (3, FLOAT, 2), (4, BFLOAT16, 0), (4, BFLOAT16, 1),
        (4, BFLOAT16, 2), (8, BFLOAT16, 0),
    ]),
)  # fmt: skip
def test_all_exchanges_in_a_row(program, ranks, dtype, seed):
    """Sizes change from one to the next, so places of mailboxes have other owners."""
    assert run(program, seed, ranks, 3, dtype, len(SIZES), *SIZES) == "wrong 0\n"


@pytest.mark.parametrize("ranks, seed", slow_but([(4, 0)], [(4, 0), (4, 1), (8, 0)]))
def test_all_reduce_in_two_shots(program, ranks, seed):
    """As many bytes as the model gives to two shots; the last part is short."""
    assert run(program, seed, ranks, 0, BFLOAT16, 3, 150001, 16, 120000) == "wrong 0\n"


@pytest.mark.parametrize("ranks, seed", [(2, 0), (2, 1), (3, 0), (4, 0), (8, 0)])
def test_sums_of_what_kernels_before_them_sent(program, ranks, seed):
    """As products send their results; on some ranks, while others have a product and a sum."""
    sizes = (512, 8, 4000, 2048, 1024, 8)
    assert run(program, seed, ranks, 4, BFLOAT16, len(sizes), *sizes) == "wrong 0\n"


def test_a_rank_that_does_not_come_to_what_was_sent(program):
    """The kernel behind a product ends, tells which, and stores nothing; so does the next."""
    assert run(program, 0, 2, 5, BFLOAT16, 1, 512) == "failed 2, reported 2, written 0\n"


def test_more_than_the_memory_holds(program):
    said = run(program, 0, 2, 0, FLOAT, 1, 300000)
    assert said.startswith("the tensor has more bytes than the Communicator was made for")


STATIC, PER_TOKEN, PER_GROUP = 1, 2, 3  # Scaling


@pytest.mark.parametrize(
    "ranks, scaling",
    slow_but([(2, STATIC), (2, PER_GROUP), (4, PER_TOKEN)], [
        (2, STATIC), (2, PER_TOKEN), (2, PER_GROUP), (4, PER_TOKEN), (8, PER_GROUP),
    ]),
)  # fmt: skip
def test_a_norm_in_the_same_kernel(norm_program, ranks, scaling):
    """The bytes of all_reduce and rmsnorm_fp8 one after the other."""
    shapes = (3, 2048, 1, 8192, 5, 1032, 2, 4096)
    assert run(norm_program, ranks, ranks, scaling, *shapes) == "wrong 0\n"
