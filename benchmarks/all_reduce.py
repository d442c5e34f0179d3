"""Communicator's sums beside torch.distributed's, between processes of this machine.

    python benchmarks/all_reduce.py [--ranks 2] [--gpu] [--save]
    torchrun --nproc-per-node 2 benchmarks/all_reduce.py [--gpu] [--save]

Three kinds of rows, all through ``Communicator``: all_reduce; the same with residual, norm and FP8;
and linear_all_reduce, beside the product alone. On the CPU beside gloo: the mean of a round of
calls one after the other, the median of the rounds; each process has one thread. On GPUs beside
NCCL and the quicker of torch's symmetric-memory sums, without multicast: CUDA graphs of 40 calls,
in place where there is a sum alone, so that each needs the one before; the median of the replays,
the slowest rank's. A product of a weight that fits in the L2 cache finds it there.

--save writes results/tables/all_reduce_numbers.csv, of more than two ranks
all_reduce_more_ranks.csv, and of the products all_reduce_products.csv; other devices' rows stay.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cpu
import kernels
import tables
import torch
from torch import distributed, multiprocessing

CASES = ((1, 4096), (16, 4096), (8, 8192), (32, 8192), (512, 8192))  # rows, columns; bfloat16
CASES_ON_GPU = (*CASES, (8, 16384), (64, 8192), (32, 16384), (128, 8192))
MOST_ROWS_OF_NORM = 128
# rows, and N and K of a rank's share
PRODUCTS = [
    (m, n, k)
    for n, k in ((16384, 6656), (8192, 14336), (4096, 7168))
    for m in (1, 8, 32, 64)
]  # fmt: skip
PRODUCTS_ON_CPU = [(1, 4096, 1024), (8, 4096, 1024)]
NUMBERS, MORE_RANKS = "all_reduce_numbers", "all_reduce_more_ranks"
WITH_PRODUCT = "all_reduce_products"
ROUNDS = 7
GRAPH_CALLS, REPLAYS = 40, 30
EPS = 1e-5


class Here(NamedTuple):
    """What a rank measures with: its device, the package, its communicator and a clock."""

    rank: int
    device: torch.device
    package: Any
    communicator: Any
    microseconds: Callable[[Callable], float]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def host_microseconds(call: Callable) -> float:
    """Times a call from the host, in microseconds; all ranks call it, for each call waits for the
    others."""
    call()
    begin = time.perf_counter()
    call()
    calls = [max(3, min(300, int(0.1 / (time.perf_counter() - begin))))]
    distributed.broadcast_object_list(calls)
    rounds = []
    for _ in range(ROUNDS):
        distributed.barrier()
        begin = time.perf_counter()
        for _ in range(calls[0]):
            call()
        rounds.append((time.perf_counter() - begin) / calls[0] * 1e6)
    return statistics.median(rounds)


def graphed_microseconds(call: Callable) -> float:
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


def shared_zeros(here: Here, *shape: int) -> torch.Tensor:
    """Makes a tensor of zeros that all ranks can sum; on GPUs in torch's symmetric memory, which
    torch's own sums between GPUs need."""
    if not here.on_gpu:
        return torch.zeros(shape, dtype=torch.bfloat16)
    from torch.distributed import _symmetric_memory

    x = _symmetric_memory.empty(*shape, dtype=torch.bfloat16, device=here.device)
    _symmetric_memory.rendezvous(x, distributed.group.WORLD)
    return x.zero_()


def quickest_of_torchs(here: Here, *calls: Callable) -> float | None:
    return min(map(here.microseconds, calls)) if here.on_gpu else None


def measure_sum(here: Here, rows: int, columns: int) -> list:
    x, name = shared_zeros(here, rows, columns), distributed.group.WORLD.group_name
    shots = torch.ops.symm_mem
    found = [
        (
            "",
            here.microseconds(lambda: here.communicator.all_reduce(x, out=x)),
            here.microseconds(lambda: distributed.all_reduce(x)),
            quickest_of_torchs(
                here,
                lambda: shots.one_shot_all_reduce(x, "sum", name),
                lambda: shots.two_shot_all_reduce_(x, "sum", name),
            ),
        )
    ]
    if rows > MOST_ROWS_OF_NORM:
        return found
    residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
    out = here.package.rmsnorm_fp8(x, weight)

    def apart() -> None:
        distributed.all_reduce(x)
        here.package.rmsnorm_fp8(x, weight, EPS, residual, out=out)

    def fused() -> None:
        here.communicator.all_reduce_rmsnorm_fp8(x, weight, EPS, residual, out=out)

    times = here.microseconds(fused), here.microseconds(apart), None
    return [*found, (", residual, norm, FP8", *times)]


def measure_product(here: Here, m: int, n: int, k: int) -> list:
    """linear_all_reduce, the product alone, and with the others' sums behind it."""
    package, name = here.package, distributed.group.WORLD.group_name
    x, scale_x = package.quantize_fp8(torch.randn(m, k, device=here.device).bfloat16())
    w, scale_w = package.quantize_fp8(torch.randn(n, k, device=here.device).bfloat16() / 32)
    arguments, options = (x, w, scale_w), {"scale_x": scale_x, "out_dtype": torch.bfloat16}
    buffer, shots = shared_zeros(here, m, n), torch.ops.symm_mem

    def product() -> torch.Tensor:
        return package.fp8_linear(*arguments, **options)

    return [
        here.microseconds(lambda: here.communicator.linear_all_reduce(*arguments, **options)),
        here.microseconds(product),
        here.microseconds(lambda: distributed.all_reduce(product())),
        quickest_of_torchs(
            here,
            lambda: shots.one_shot_all_reduce_copy(buffer, product(), "sum", name),
            lambda: shots.two_shot_all_reduce_(buffer.copy_(product()), "sum", name),
        ),
    ]


def run_rank(rank: int, ranks: int, file: str, options: argparse.Namespace) -> None:
    """file: for the processes to find each other; "": torchrun has told them."""
    torch.set_num_threads(1)
    way = {"init_method": f"file://{file}", "rank": rank, "world_size": ranks} if file else {}
    if options.gpu:
        os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
        torch.cuda.set_device(rank)
    distributed.init_process_group("nccl" if options.gpu else "gloo", **way)
    package = kernels.get_local_kernel(cpu.ROOT, backend="cuda" if options.gpu else "cpu")
    device = torch.device("cuda", rank) if options.gpu else torch.device("cpu")
    clock = graphed_microseconds if options.gpu else host_microseconds
    here = Here(rank, device, package, package.comm.Communicator(), clock)
    if options.gpu:
        card = torch.cuda.get_device_name()
        machine, kind = card, f"{ranks} {card}, measured"
    else:
        machine, kind = cpu.processor(), f"CPU, {ranks} processes, measured"
    numbers, products = [], []

    def add(rows: list, what: str, times: list) -> None:
        rows.append([f"{kind}: {what}", *["" if us is None else f"{us:,.1f}" for us in times]])
        if rank == 0:
            print(*rows[-1], sep="\t", flush=True)

    for m, n in CASES_ON_GPU if here.on_gpu else CASES:
        for what, *times in measure_sum(here, m, n):
            if here.on_gpu or not what:
                add(numbers, f"{m} x {n}{what}", times)
    for m, n, k in PRODUCTS if here.on_gpu else PRODUCTS_ON_CPU:
        times = measure_product(here, m, n, k)
        add(products, f"{m} x {n} x {k}", times)
        products[-1].insert(3, f"{times[0] / times[1]:.2f}")
    if rank == 0 and options.save:
        source = f"python benchmarks/all_reduce.py --save\n{machine}, torch {torch.__version__}"
        header = ["", "us", "gloo or NCCL", "torch's symmetric memory"]
        tables.save_beside(NUMBERS if ranks == 2 else MORE_RANKS, source, header, numbers, kind)
        header = [
            "", "linear_all_reduce, us", "the product alone", "ratio", "product, then gloo or NCCL",
            "product, then torch's symmetric memory",
        ]  # fmt: skip
        tables.save_beside(WITH_PRODUCT, source, header, products, kind)
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        run_rank(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), "", options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/group", options)
        multiprocessing.spawn(run_rank, arguments, nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
