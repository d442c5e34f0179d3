"""A part of `make calibrate`: what AMD published for an MI250X, within the errors that we state.

The grid is as wide as the published one but shallower, as examples/laplacian/laplacian.py explains.
"""

import csv
import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "simulator" / part) for part in ("calibration", "examples/laplacian")]

import calibrate  # noqa: E402
import laplacian  # noqa: E402

PLANES = (12, 24)


@pytest.fixture(scope="module")
def code():
    if not shutil.which("clang++-22"):
        pytest.skip("compiling HIP for the Laplacian needs clang 22 and HIP's headers")
    return laplacian.compiled()


@pytest.mark.parametrize("kernel", ["bounded_8", "streaming_8"])
def test_traffic_and_time_of_the_laplacian(code, kernel):
    """Two steps on which no constant was fitted. Which lines share a set of L2 depends on where the
    arrays lie, so the traffic moves by a few percent from run to run."""
    assert ("laplacian", kernel) not in calibrate.FITTED
    published, step = laplacian.published()[kernel], laplacian.step(code, kernel, PLANES)
    assert step.fetch_bytes / 1e9 == pytest.approx(float(published["fetch_gb"]), rel=0.09)
    assert step.seconds * 1e3 == pytest.approx(2.64172 / float(published["speedup"]), rel=0.15)
    assert step.occupancy == int(published["occupancy"]) and step.scratch == 0
    # What must be written is written once.
    assert step.write_bytes == pytest.approx(510**3 * 8, rel=0.02)


def test_spills_cost_what_they_cost(code):
    """16 points a thread without launch bounds: three times the traffic at half the speed."""
    published, step = laplacian.published()["tiled_16"], laplacian.step(code, "tiled_16", PLANES)
    assert step.scratch > 100 and step.occupancy == 4
    assert step.fetch_bytes / 1e9 == pytest.approx(float(published["fetch_gb"]), rel=0.15)
    assert step.write_bytes / 1e9 == pytest.approx(2.547, rel=0.25)
    assert 2.64172 / 0.42 * 0.65 <= step.seconds * 1e3 <= 2.64172 / 0.42 * 1.25


def test_every_published_step_is_a_kernel_of_the_example(code):
    rows = laplacian.published()
    assert len(rows) == 13 and set(rows) == set(code.kernels)


def test_fitted_points_exist():
    steps = {name for source, name in calibrate.FITTED if source == "laplacian"}
    assert steps < set(laplacian.published())
    text = (ROOT / "benchmarks" / "data" / "mi300x_published_us.csv").read_text()
    rows = {int(r["rows"]) for r in csv.DictReader(x for x in text.splitlines() if x[0] != "#")}
    assert {n for source, n in calibrate.FITTED if source != "laplacian"} <= rows
