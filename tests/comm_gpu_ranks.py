"""Cases of comm_ranks.py about the memory of GPUs, graphs and streams."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from comm_ranks import (
    Here,
    error_of,
    linear_shares,
    many,
    parts_of,
    require_same_bits,
    sums,
)
from torch import distributed


def sharing(here: Here, symmetric_works: bool, ipc_works: bool, met_before: int = 0) -> str:
    """How ranks agree on the way in which they share a GPU's memory, both ways played.

    met_before: how often rank 1 has met others over symmetric memory, and rank 0 has not.
    """
    group, memory = here.group(2), here.package.comm.memory
    if here.rank > 1:
        return ""

    def symmetric(group: Any, size: int, device: torch.device) -> Any:
        if here.rank == 1 and not symmetric_works:
            raise RuntimeError("no fabric\nbut a long tale")
        return torch.empty(size, dtype=torch.uint8), [8, 16], "symmetric"

    def ipc(group: Any, size: int, device: torch.device) -> Any:
        if not ipc_works:
            raise RuntimeError("no handle")
        return torch.empty(size, dtype=torch.uint8), [8, 16], "ipc"

    meetings = met_before if here.rank == 1 else 0
    ways = {"_by_symmetric_memory": symmetric, "_by_ipc_handles": ipc, "_meetings": meetings}
    with mock.patch.multiple(memory, **ways), mock.patch("torch.cuda.synchronize"):
        report = torch.zeros(1, dtype=torch.int64)
        try:
            return memory.gpu_memory(group, 4096, torch.device("cpu"), report)[1]
        except RuntimeError as error:
            return str(error)


def a_rank_that_a_gpu_waited_for(here: Here, ranks: int) -> list[str]:
    """The others call when rank 0 has given up: its x is there, its second one never comes."""
    group = here.group(ranks)
    if here.rank >= ranks:
        return []
    communicator = here.communicator(ranks, timeout=0.5)
    x = torch.ones(100, device=here.device)
    said = []
    for callers in (range(1), range(1, ranks)):
        if here.rank in callers:
            communicator.all_reduce(x)
            said.append(error_of(communicator.check))
            said.append(error_of(communicator.all_reduce, x))
            said.append(error_of(communicator.check))
        distributed.barrier(group)
    return said


def graphs(here: Here, ranks: int) -> None:
    """A graph of three exchanges, replayed with other numbers, and calls between the replays."""
    communicator = here.shared(ranks)
    if communicator is None:
        return
    x = torch.zeros(7, 1000, device=here.device, dtype=torch.bfloat16)
    weight = torch.ones(1000, device=here.device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    communicator.all_reduce_rmsnorm_fp8(communicator.all_reduce(x), weight)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = communicator.all_reduce(x)
        z = communicator.all_reduce(y)
        q, scale = communicator.all_reduce_rmsnorm_fp8(z, weight)
    for seed in range(6):
        parts = parts_of(seed, ranks, (7, 1000), torch.bfloat16)
        x.copy_(parts[here.rank])
        graph.replay()
        first = here.package.reference.all_reduce(parts)
        second = here.package.reference.all_reduce([first] * ranks)
        require_same_bits(y, first)
        require_same_bits(z, second)
        third = here.package.reference.all_reduce([second] * ranks).to(here.device)
        wanted, wanted_scale = here.package.rmsnorm_fp8(third, weight)
        require_same_bits(q, wanted)
        require_same_bits(scale, wanted_scale)
        require_same_bits(communicator.all_reduce(x), first)


def groups_of_other_sizes(here: Here) -> Any:
    """A group of all behind one of two, whose members have met once more than the others."""
    pair, everyone = here.group(2), here.group(distributed.get_world_size())
    if distributed.get_rank(pair) >= 0:
        here.communicator(2).close()
    count = distributed.get_world_size(everyone)
    mine = Here.__new__(Here)
    vars(mine).update(vars(here), communicators={count: here.communicator(count)})
    return sums(mine, count, (70001,), torch.float32, 12, "new")


def linears_in_graphs(here: Here, ranks: int) -> None:
    """Products that send, each of the sum before, among other exchanges; weights that a kernel may
    read before the one in front of it is done, and others."""
    communicator = here.shared(ranks)
    if communicator is None:
        return
    package, size = here.package, 2048
    layers = [linear_shares(here, ranks, seed, 4, size, size)[1] for seed in range(3)]
    weight = torch.ones(size, device=here.device, dtype=torch.bfloat16)
    x = torch.zeros(4, size, device=here.device, dtype=torch.bfloat16)

    def step(x: torch.Tensor, product: Any, add: Any) -> torch.Tensor:
        for layer in layers:
            x = product(x, layer)
            x = add(package.rmsnorm(x, weight))
        return x

    def mine(x: torch.Tensor, layer: Any) -> torch.Tensor:
        return communicator.linear_all_reduce(x, *layer[here.rank])

    def apart(x: torch.Tensor, layer: Any) -> torch.Tensor:
        parts = [package.fp8_linear(x, w, scale).cpu() for w, scale in layer]
        return package.reference.all_reduce(parts).to(here.device)

    def added(x: torch.Tensor) -> torch.Tensor:
        return package.reference.all_reduce([x.cpu()] * ranks).to(here.device)

    graphs = []
    for settled in ([], [layer[here.rank][0] for layer in layers]):
        with package.functional.product.settled(settled):
            step(x, mine, communicator.all_reduce)
            torch.cuda.synchronize()
            graphs.append((torch.cuda.CUDAGraph(), None))
            with torch.cuda.graph(graphs[-1][0]):
                graphs[-1] = graphs[-1][0], step(x, mine, communicator.all_reduce)
    for seed in range(4):
        torch.manual_seed(seed)
        x.copy_(torch.randn(4, size, device=here.device))
        wanted = step(x, apart, added)
        for graph, y in graphs:
            for _ in range(20):
                graph.replay()
            require_same_bits(y, wanted.cpu())
        require_same_bits(step(x, mine, communicator.all_reduce), wanted.cpu())


def streams(here: Here, ranks: int) -> None:
    """One communicator from stream to stream, each waiting for the one before; and two at once,
    each with a stream of its own."""
    here.group(ranks)
    if here.rank >= ranks:
        return
    pair = [here.communicator(ranks), here.communicator(ranks)]
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    parts = [parts_of(seed, ranks, (5000,), torch.float32) for seed in range(40)]
    wanted = [here.package.reference.all_reduce(part) for part in parts]
    xs = [part[here.rank].to(here.device) for part in parts]
    torch.cuda.synchronize()
    got = []
    for number, x in enumerate(xs):
        side, before = sides[number % 2], sides[1 - number % 2]
        side.wait_stream(before)
        with torch.cuda.stream(side):
            got.append(pair[0].all_reduce(x))
    torch.cuda.synchronize()
    for one, expected in zip(got, wanted, strict=True):
        require_same_bits(one, expected)
    got = []
    for number, x in enumerate(xs):
        with torch.cuda.stream(sides[number % 2]):
            got.append(pair[number % 2].all_reduce(x))
    torch.cuda.synchronize()
    for one, expected in zip(got, wanted, strict=True):
        require_same_bits(one, expected)


def memory_by_ipc(here: Here, ranks: int) -> Any:
    """As many exchanges, where torch's symmetric memory is refused."""
    here.group(ranks)
    if here.rank >= ranks:
        return None

    def refused(*arguments: Any) -> None:
        raise RuntimeError("no symmetric memory")

    with mock.patch.object(here.package.comm.memory, "_by_symmetric_memory", refused):
        communicator = here.communicator(ranks)
    mine = Here.__new__(Here)
    vars(mine).update(vars(here), communicators={ranks: communicator})
    many(mine, ranks, 300, 40)
    graphs(mine, ranks)
    return sums(mine, ranks, (70001,), torch.bfloat16, 9, "out")


def released_on_a_gpu(here: Here) -> tuple[int, int]:
    """Bytes that the GPU has less while there is a Communicator, and after it."""
    group = here.group(2)
    if here.rank > 1:
        return 0, 0

    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        distributed.barrier(group)
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    here.communicator(2).close()  # what is made once
    before = free()
    communicator = here.communicator(2, 64 << 20)
    communicator.all_reduce(torch.ones(5, device=here.device))
    during = free()
    communicator.close()
    free()  # until all ranks have closed
    return before - during, before - free()
