"""How fast the simulator executes this package's kernels on gfx942, its checks on.

    python simulator/calibration/speed.py [--save]

Prints the tables of docs/simulator.md; --save writes results/tables, from where `python
benchmarks/pages.py --write` puts them there. The first has wave-instructions, and processor time of
one thread, which other work on the machine disturbs less than time of day; the least of five runs.
The second has the time of day with one host thread and with as many as there are cores, and beside
it what the host itself gains: the same work hashed by so many threads that share nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import simulated  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402

import simulator  # noqa: E402

RUNS = 5
HASHED = 512 << 20  # bytes


def product(ops, m: int, n: int, k: int):
    blocks = -(-k // 128)
    a, w = (torch.randn(rows, k).to(simulated.NATIVE) for rows in (m, n))
    scale_a, scale_w = torch.rand(m, blocks) + 0.5, torch.rand(-(-n // 128), blocks) + 0.5
    return lambda: ops.gemm(a, w, scale_a, scale_w)


def skinny_product(ops, m: int, n: int, k: int):
    a, w = (torch.randn(rows, k).to(simulated.NATIVE) for rows in (m, n))
    one = torch.ones(1)
    return lambda: ops.skinny_gemm(a, w, one, one)


def norm(ops, rows: int, columns: int):
    x, residual = (torch.randn(rows, columns).half() for _ in range(2))
    weight, scale = torch.randn(columns).half(), torch.ones(1)
    return lambda: ops.rmsnorm_fp8(x, weight, residual=residual, scale=scale)


def swiglu(ops, rows: int, columns: int):
    x, scale = torch.randn(rows, columns).half(), torch.ones(1)
    return lambda: ops.swiglu_fp8(x, scale=scale)


CASES = {
    "`gemm` FP8 with block scales, 512 x 3072 x 1536": (product, 512, 3072, 1536),
    "`skinny_gemm` FP8, 8 x 2304 x 16384": (skinny_product, 8, 2304, 16384),
    "residual + RMSNorm + FP8, 256 x 16384": (norm, 256, 16384),
    "the same, 32 x 16384": (norm, 32, 16384),
    "SwiGLU + FP8, 128 x 16384": (swiglu, 128, 16384),
}


def processor_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def least(clock: Callable[[], float], call: Callable) -> float:
    """The least of five runs by this clock."""
    seconds = []
    for _ in range(RUNS):
        before = clock()
        call()
        seconds.append(clock() - before)
    return min(seconds)


def hashes(threads: int) -> Callable:
    """Hashes 512 MiB, shared out to so many threads; hashlib gives the interpreter free."""
    part = bytes(HASHED // threads)

    def run() -> None:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: hashlib.sha256(part).digest(), range(threads)))

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write results/tables too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ops = simulated.functional()
    hip = simulator.load_runtime()
    cores = len(os.sched_getaffinity(0))
    speed, scaling = [], []
    for name, (make, *sizes) in CASES.items():
        call = make(ops, *sizes)
        hip.threads(1)
        seconds, alone = least(processor_seconds, call), least(time.perf_counter, call)
        count = hip.last().raw["counters"]["instructions"]
        speed.append([name, f"{count:,}", f"{seconds:.3f}", f"{count / seconds / 1e6:.1f}"])
        hip.threads(cores)
        shared = least(time.perf_counter, call)
        scaling.append([name, f"{alone:.3f}", f"{shared:.3f}", f"{alone / shared:.2f}"])
    alone, shared = (least(time.perf_counter, hashes(threads)) for threads in (1, cores))
    scaling.append(["the host, hashing", f"{alone:.3f}", f"{shared:.3f}", f"{alone / shared:.2f}"])
    printed = {
        "simulator_speed": (["launch, checks on", "wave-instructions", "seconds", "M/s"], speed),
        "simulator_threads":
            (["time of day, seconds", "one thread", f"{cores} threads", "gain"], scaling),
    }  # fmt: skip
    for name, (header, rows) in printed.items():
        print(tables.markdown(header, rows))
        if arguments.save:
            source = f"python simulator/calibration/speed.py, {datetime.date.today()}"
            tables.save_printed(name, source, header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
