"""The model of exchanges between GPUs (all_reduce/gpu/time_model.h) beside what was measured, and
beside what others published."""

import csv
import itertools
import re
import shutil
import subprocess

import pytest
from project import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
TABLES = ROOT / "benchmarks" / "results" / "tables"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Call it with ranks and bytes: of NVLink and of xGMI the shots and the microseconds, and those
    of xGMI with three ways over a link."""
    program = tmp_path_factory.mktemp("model") / "times"
    source = ROOT / "tests" / "launches" / "all_reduce_times.cpp"
    subprocess.run(["g++", "-std=c++17", "-O1", str(source), "-o", str(program)], check=True)

    def ask(ranks, count):
        done = subprocess.run(
            [program], input=f"{ranks} {count}\n", capture_output=True, text=True, check=True
        )
        shots, us, xgmi_shots, xgmi_us, three_ways = map(float, done.stdout.split())
        return {"nvlink": (shots, us), "xgmi": (xgmi_shots, xgmi_us), "three ways": three_ways}

    return ask


def measured(table, devices):
    """Of the devices' rows without a norm, to 1 MB: bytes and microseconds."""
    for row in csv.reader(line for line in (TABLES / table).open() if line[0] != "#"):
        found = re.fullmatch(rf"{devices}\w*, measured: (\d+) x (\d+)", row[0])
        if found and (count := int(found[1]) * int(found[2]) * 2) <= 1 << 20:
            yield count, float(row[1])


@pytest.mark.parametrize(
    "ranks, table, card, error",
    [
        (2, "all_reduce_numbers.csv", "H100", 0.1),
        (4, "all_reduce_more_ranks.csv", "H200", 0.165),  # fitted to the kernels before these
        (8, "all_reduce_more_ranks.csv", "H200", 0.125),
    ],
)
def test_the_model_is_near_to_what_was_measured(model, ranks, table, card, error):
    rows = [*measured(table, f"{ranks} NVIDIA {card}")]
    assert len(rows) >= 4
    for count, us in rows:
        _, modelled = model(ranks, count)["nvlink"]
        assert abs(modelled - us) <= error * us, (count, us, modelled)


def test_published_small_sums_of_mi300x(model):
    """9.4 to 9.6 us by FBGEMM, 10 to 11 by torch (pytorch/FBGEMM#4072): data, flag and answer."""
    assert 9.4 * 0.9 <= model(8, 4096)["three ways"] <= 11 * 1.1


def test_published_growth_of_two_gpus(model):
    """Sum, norm and MXFP4 on two GPUs: 19.5 us for 256 KB, 26.7 for 512, 40.9 for 1 MB
    (ROCm/aiter#3229)."""
    times = [model(2, size << 10)["xgmi"][1] for size in (256, 512, 1024)]
    for (a, b), published in zip(itertools.pairwise(times), (7.2, 14.2), strict=True):
        assert abs((b - a) - published) <= 0.1 * published


def test_the_table_of_the_journal(model):
    """all_reduce_modelled.csv: what the program prints."""
    table = TABLES / "all_reduce_modelled.csv"
    _, *rows = csv.reader(line for line in table.open() if not line.startswith("#"))
    for size, *cells in rows:
        count, unit = size.split()
        for ranks, cell in zip((2, 4, 8), cells, strict=True):
            shots, us = model(ranks, int(count) << {"KB": 10, "MB": 20}[unit])["xgmi"]
            assert cell == f"{us:.1f}" + (" (2)" if shots == 2 else "")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_shots_begin_where_they_win(model, ranks):
    sizes = [1 << power for power in range(12, 25)]
    shots = [model(ranks, size)["xgmi"][0] for size in sizes]
    times = [model(ranks, size)["xgmi"][1] for size in sizes]
    assert shots == sorted(shots) and times == sorted(times)
    assert shots[0] == 1 and shots[-1] == (1 if ranks == 2 else 2)


def test_where_the_page_says_that_two_shots_begin(model):
    """docs/kernels/all_reduce.md, 'When which is chosen'."""
    page = " ".join((ROOT / "docs" / "kernels" / "all_reduce.md").read_text().split())
    for words, links in (("NVLink 4", "nvlink"), ("xGMI of MI300X", "xgmi")):
        found = rf"{words}[^:]*: one shot up to (\d+) KB with 4 ranks and (\d+) KB with 8"
        cells = re.search(found, page).groups()
        for ranks, kilobytes in zip((4, 8), map(int, cells), strict=True):
            assert model(ranks, kilobytes << 10)[links][0] == 1
            assert model(ranks, (kilobytes + 2) << 10)[links][0] == 2
