"""all_reduce beside torch.distributed's, between processes of this machine.

    python benchmarks/all_reduce.py [--ranks 2] [--save]

On the CPU beside gloo: the mean of a round of calls one after the other, the median of the rounds.
Each process has one thread. --save writes the rows to results/tables/all_reduce_numbers.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time

import cpu
import kernels
import tables
import torch
from torch import distributed, multiprocessing

CASES = ((1, 4096), (16, 4096), (8, 8192), (32, 8192), (512, 8192))  # rows, columns; bfloat16
TABLE = "all_reduce_numbers"
ROUNDS = 7


def microseconds(call) -> float:
    """Of one call, for all ranks alike: each waits for the others."""
    call()
    begin = time.perf_counter()
    call()
    calls = max(3, min(300, int(0.1 / (time.perf_counter() - begin))))
    calls = [calls]
    distributed.broadcast_object_list(calls)
    rounds = []
    for _ in range(ROUNDS):
        distributed.barrier()
        begin = time.perf_counter()
        for _ in range(calls[0]):
            call()
        rounds.append((time.perf_counter() - begin) / calls[0] * 1e6)
    return statistics.median(rounds)


def run_rank(rank: int, ranks: int, file: str, answers) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=ranks)
    package = kernels.get_local_kernel(cpu.ROOT, backend="cpu")
    communicator = package.comm.Communicator()
    for rows, columns in CASES:
        x = torch.zeros(rows, columns, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        ours = microseconds(lambda x=x, out=out: communicator.all_reduce(x, out))
        gloo = microseconds(lambda x=x: distributed.all_reduce(x))
        if rank == 0:
            answers.put((rows, columns, ours, gloo))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/group", answers)
        multiprocessing.spawn(run_rank, arguments, nprocs=options.ranks)
    rows = []
    for _ in CASES:
        m, n, ours, gloo = answers.get()
        case = f"CPU, {options.ranks} processes, measured: {m} x {n}"
        rows.append([case, f"{ours:,.1f}", f"{gloo:,.1f}"])
        print(*rows[-1], sep="\t")
    if options.save:
        machine = f"{cpu.processor()}, torch {torch.__version__}"
        source = f"python benchmarks/all_reduce.py --save\n{machine}"
        tables.save_printed(TABLE, source, ["", "us", "gloo"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
