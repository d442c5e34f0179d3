"""all_reduce beside torch.distributed's, between processes of this machine.

    python benchmarks/all_reduce.py [--ranks 2] [--gpu] [--save]

On the CPU beside gloo: the mean of a round of calls one after the other, the median of the rounds.
Each process has one thread. On GPUs beside NCCL and the quicker of torch's symmetric-memory sums:
CUDA graphs of 40 calls in place, each of which needs the one before, the median of the replays, the
slowest rank's. --save writes the rows to results/tables/all_reduce_numbers.csv.
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
GRAPH_CALLS, REPLAYS = 40, 30
EPS = 1e-5


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


def graphed_microseconds(call) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(GRAPH_CALLS):
                call()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / GRAPH_CALLS * 1e3)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return slowest.item()


def run_gpu_rank(rank: int, ranks: int, file: str, answers) -> None:
    from torch.distributed import _symmetric_memory

    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", f"file://{file}", rank=rank, world_size=ranks)
    package = kernels.get_local_kernel(cpu.ROOT, backend="cuda")
    communicator = package.comm.Communicator()
    name = distributed.group.WORLD.group_name
    for rows, columns in CASES:
        x = _symmetric_memory.empty(rows, columns, dtype=torch.bfloat16, device=f"cuda:{rank}")
        _symmetric_memory.rendezvous(x, distributed.group.WORLD)
        x.zero_()
        residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
        out = package.rmsnorm_fp8(x, weight)

        def norm(x=x, weight=weight, residual=residual, out=out):
            distributed.all_reduce(x)
            package.rmsnorm_fp8(x, weight, EPS, residual, out=out)

        def fused(x=x, weight=weight, residual=residual, out=out):
            communicator.all_reduce_rmsnorm_fp8(x, weight, EPS, residual, out=out)

        ours = graphed_microseconds(lambda x=x: communicator.all_reduce(x, out=x))
        nccl = graphed_microseconds(lambda x=x: distributed.all_reduce(x))
        one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
        shots = [graphed_microseconds(lambda f=f, x=x: f(x, "sum", name)) for f in (one, two)]
        found = [("", ours, nccl, min(shots))]
        with_norm = graphed_microseconds(fused), graphed_microseconds(norm)
        found.append((", residual, norm, FP8", *with_norm, None))
        if rank == 0:
            answers.put((rows, columns, found))


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
            answers.put((rows, columns, [("", ours, gloo, None)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/group", answers)
        run = run_gpu_rank if options.gpu else run_rank
        multiprocessing.spawn(run, arguments, nprocs=options.ranks)
    if options.gpu:
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        kind = f"{options.ranks} {torch.cuda.get_device_name()}, measured"
    else:
        machine = f"{cpu.processor()}, torch {torch.__version__}"
        kind = f"CPU, {options.ranks} processes, measured"
    rows = []
    for _ in CASES:
        m, n, found = answers.get()
        for what, *times in found:
            cells = ["" if us is None else f"{us:,.1f}" for us in times]
            rows.append([f"{kind}: {m} x {n}{what}", *cells])
            print(*rows[-1], sep="\t")
    if options.save:
        source, others = f"python benchmarks/all_reduce.py --save\n{machine}", []
        if (tables.RESULTS / "tables" / f"{TABLE}.csv").exists():
            others = tables.printed(TABLE)[1]
            others = [row for row in others if row[0].startswith("CPU") == options.gpu]
        header = ["", "us", "gloo or NCCL", "torch's symmetric memory"]
        tables.save_printed(TABLE, source, header, others + rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
