"""Processes that are the ranks of a group, and the cases that each of them runs.

A case is a function of this module, or of another one by "module.function"; ``Ranks.run`` calls it
on every rank and returns what each returned, or raises what one of them raised.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kernels
import torch
from project import REPO_ID
from torch import distributed

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "kernels"])
PATIENCE = 120.0  # seconds for a case


class Ranks:
    """``count`` processes in one group: of gloo, or of NCCL or RCCL, with a GPU each."""

    def __init__(self, count: int, folder: Path, backend: str = "cpu") -> None:
        self.backend, self.on_gpu = backend, backend != "cpu"
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, its = FORKS.Pipe()
            arguments = (its, rank, count, str(folder / "group"), backend)
            process = FORKS.Process(target=_serve, args=arguments)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, case: str, **arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((case, arguments))

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE), f"rank {rank} does not answer"
        failure, result = self.pipes[rank].recv()
        assert failure is None, f"rank {rank}: {failure}"
        return result

    def run(self, case: str, **arguments: Any) -> list[Any]:
        self.start(case, **arguments)
        for rank, pipe in enumerate(self.pipes):  # a failure leaves none for the next case
            assert pipe.poll(PATIENCE), f"rank {rank} does not answer"
        received = [pipe.recv() for pipe in self.pipes]
        for rank, (failure, _) in enumerate(received):
            assert failure is None, f"rank {rank}: {failure}"
        return [result for _, result in received]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Here:
    """What a case gets: its rank and device, the package, and a communicator of its own choice."""

    def __init__(self, rank: int, backend: str) -> None:
        self.rank = rank
        self.package = kernels.get_kernel(REPO_ID, version=1, backend=backend)
        self.device = torch.device("cpu") if backend == "cpu" else torch.device("cuda", rank)
        self.groups, self.communicators = {}, {}

    def group(self, ranks: int) -> Any:
        if ranks not in self.groups:
            self.groups[ranks] = distributed.new_group(list(range(ranks)))
        return self.groups[ranks]

    def communicator(self, ranks: int, max_bytes: int = 1 << 20, **more: Any) -> Any:
        return self.package.comm.Communicator(self.group(ranks), max_bytes, **more)

    def shared(self, ranks: int) -> Any:
        """One that cases with nothing to break share; None on a rank outside the group."""
        if ranks not in self.communicators:
            group = self.group(ranks)
            inside = distributed.get_rank(group) >= 0
            self.communicators[ranks] = self.communicator(ranks) if inside else None
        return self.communicators[ranks]


class Fields(tuple):
    """A named tuple of the package, whose class the asking process does not have: on GPUs it has
    loaded another variant of the package, or none."""

    def __new__(cls, values: Any, names: tuple[str, ...]) -> Fields:
        fields = super().__new__(cls, values)
        fields.names = names
        return fields

    def __reduce__(self) -> tuple:
        return Fields, (tuple(self), self.names)

    def __getattr__(self, name: str) -> Any:
        if name == "names" or name not in self.names:
            raise AttributeError(name)
        return self[self.names.index(name)]


def portable(result: Any) -> Any:
    """The same, of classes that any process can unpickle."""
    if isinstance(result, dict):
        return {key: portable(value) for key, value in result.items()}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return Fields(map(portable, result), result._fields)
    if isinstance(result, (list, tuple)):
        return type(result)(map(portable, result))
    return result


def _serve(pipe: Connection, rank: int, count: int, file: str, backend: str) -> None:
    torch.set_num_threads(2)
    if backend != "cpu":
        torch.cuda.set_device(rank)
    name = "gloo" if backend == "cpu" else "nccl"
    distributed.init_process_group(name, f"file://{file}", rank=rank, world_size=count)
    here = Here(rank, backend)
    while True:
        case, arguments = pipe.recv()
        try:
            module, _, function = case.rpartition(".")
            cases = vars(importlib.import_module(module)) if module else globals()
            pipe.send((None, portable(cases[function](here, **arguments))))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


# ---- Data


def parts_of(seed: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> list:
    """The ranks' x: zero-centred, and with what is easily got wrong."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(ranks):
        x = torch.randn(shape, generator=generator)
        chosen = torch.rand(shape, generator=generator)
        x[chosen < 0.05] = -0.0
        x[chosen > 0.99] *= 3e4
        parts.append(x.to(dtype))
    return parts


def guarded(here: Here, shape: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """A tensor full of poison, and a check that nothing beside it was written."""
    count = torch.Size(shape).numel()
    whole = torch.full((count + 128,), torch.nan, dtype=dtype, device=here.device)
    whole[:64], whole[-64:] = 7.0, 7.0

    def check() -> None:
        assert (whole[:64] == 7).all() and (whole[-64:] == 7).all()

    return whole[64:-64].view(shape), check


def bits(x: torch.Tensor) -> bytes:
    return x.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def require_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert bits(got) == bits(wanted), (got, wanted)


# ---- Cases


def sums(here: Here, ranks: int, shape: tuple, dtype: torch.dtype, seed: int, into: str) -> Any:
    communicator = here.shared(ranks)
    if communicator is None:
        return None
    parts = parts_of(seed, ranks, shape, dtype)
    wanted = here.package.reference.all_reduce(parts)
    x = parts[here.rank].to(here.device, copy=True)
    if into == "new":
        got = communicator.all_reduce(x)
    elif into == "x":
        got = communicator.all_reduce(x, out=x)
        assert got is x
    else:
        out, check = guarded(here, shape, dtype)
        got = communicator.all_reduce(x, out)
        assert got is out
        check()
    if into != "x":
        require_same_bits(x, parts[here.rank])
    require_same_bits(got, wanted)
    return bits(got)


def special_values(here: Here, ranks: int, dtype: torch.dtype) -> Any:
    communicator = here.shared(ranks)
    if communicator is None:
        return None
    inf, nan, large = torch.inf, torch.nan, torch.finfo(dtype).max
    values = [0.0, -0.0, inf, -inf, nan, large, -large, torch.finfo(dtype).tiny / 4, 1.0]
    table = torch.cartesian_prod(*[torch.tensor(values, dtype=torch.float64)] * 2).to(dtype)
    parts = [table[:, min(r, 1)].contiguous() for r in range(ranks)]
    got = communicator.all_reduce(parts[here.rank].to(here.device)).cpu()
    wanted = here.package.reference.all_reduce(parts)
    assert torch.equal(got.isnan(), wanted.isnan())
    require_same_bits(got.nan_to_num(5.0, inf, -inf), wanted.nan_to_num(5.0, inf, -inf))
    return bits(got)


def scatter_and_gather(here: Here, ranks: int, dtype: torch.dtype, rows: int, seed: int) -> None:
    communicator = here.shared(ranks)
    if communicator is None:
        return
    parts = parts_of(seed, ranks, (ranks * rows, 3, 37), dtype)
    x = parts[here.rank].to(here.device)
    mine = slice(here.rank * rows, (here.rank + 1) * rows)
    wanted = here.package.reference.all_reduce(parts)[mine]
    out, check = guarded(here, (rows, 3, 37), dtype)
    require_same_bits(communicator.reduce_scatter(x, out), wanted)
    check()
    require_same_bits(communicator.reduce_scatter(x), wanted)
    out, check = guarded(here, (ranks * ranks * rows, 3, 37), dtype)
    require_same_bits(communicator.all_gather(x, out), torch.cat(parts))
    check()
    # Not contiguous.
    turned = torch.cat([part.transpose(0, 2) for part in parts])
    require_same_bits(communicator.all_gather(x.transpose(0, 2)), turned)


def norms(
    here: Here, ranks: int, dtype: torch.dtype, seed: int, columns: int, quantization: dict
) -> Any:
    """Equal to the bit to a sum and the op that follows it."""
    communicator = here.shared(ranks)
    if communicator is None:
        return None
    parts = parts_of(seed, ranks, (5, columns), dtype)
    torch.manual_seed(seed)
    weight = torch.randn(columns).to(here.device, dtype)
    residual = torch.randn(5, columns).to(here.device, dtype)
    if quantization.get("scale"):
        quantization = {"scale": torch.tensor([quantization["scale"]], device=here.device)}
    h = residual.clone()
    summed = here.package.reference.all_reduce(parts).to(here.device)
    wanted = here.package.rmsnorm_fp8(summed, weight, 1e-5, h, **quantization)
    q = communicator.all_reduce_rmsnorm_fp8(
        parts[here.rank].to(here.device), weight, 1e-5, residual, **quantization
    )
    for got, expected in zip((*q, residual), (*wanted, h), strict=True):
        require_same_bits(got, expected)
    return bits(q[0])


def linear_shares(
    here: Here, ranks: int, seed: int, m: int, n: int, k: int, blocks: bool = False
) -> tuple[list, ...]:
    """Each rank's x and w with its scale, of its own K; the same on every rank."""
    torch.manual_seed(seed)
    quantize = here.package.quantize_fp8
    xs, ws = [], []
    for _ in range(ranks):
        xs.append(torch.randn(m, k, device=here.device).bfloat16())
        w = torch.randn(n, k, device=here.device) / 8
        if blocks:
            scale = torch.rand(-(-n // 128), -(-k // 128), device=here.device) / 100 + 0.01
            ws.append((quantize(w)[0], scale))
        else:
            ws.append(quantize(w))
    return xs, ws


def linears(
    here: Here,
    ranks: int,
    seed: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    blocks: bool = False,
    odd_rank: int = -1,
    config: str = "apart",
) -> Any:
    """K divided among the ranks. odd_rank: whose w is not aligned, so that its product does not
    send; config: what the others' products do."""
    communicator = here.shared(ranks)
    if communicator is None:
        return None
    xs, ws = linear_shares(here, ranks, seed, m, n, k, blocks)
    if odd_rank >= 0:
        w, scale = ws[odd_rank]
        memory = torch.empty(w.numel() + 1, dtype=torch.uint8, device=here.device)
        odd = memory[1:].view(w.shape).view(w.dtype)
        ws[odd_rank] = odd.copy_(w), scale
    of_n = torch.randn(n, device=here.device).to(dtype) if bias else None
    options = {"out_dtype": dtype}
    parts = [
        here.package.fp8_linear(x, w, s, bias=of_n if r == 0 else None, **options)
        for r, (x, (w, s)) in enumerate(zip(xs, ws, strict=True))
    ]
    x, (w, scale) = xs[here.rank], ws[here.rank]
    asked = communicator.linear_all_reduce_config(x, w, scale, **options)
    assert asked == ("apart" if here.rank == odd_rank else config), asked
    wanted = here.package.reference.all_reduce([part.cpu() for part in parts])
    for _ in range(3):  # both halves of the mailboxes
        got = communicator.linear_all_reduce(x, w, scale, bias=of_n, **options)
        require_same_bits(got, wanted)
    return bits(got)


def many(here: Here, ranks: int, seed: int, calls: int) -> Any:
    """Exchanges of all kinds and sizes, ranks that come late by chance."""
    communicator = here.shared(ranks)
    if communicator is None:
        return None
    kinds, own = random.Random(seed), random.Random(seed * 8 + here.rank)
    for call in range(calls):
        kind = kinds.choice(["sum", "scatter", "gather"])
        count = kinds.choice([1, 40, 3000, 40000 // ranks])
        parts = parts_of(seed + call, ranks, (ranks, count), torch.bfloat16)
        x = parts[here.rank].to(here.device)
        if own.random() < 0.05:
            time.sleep(own.random() * 0.01)
        if kind == "sum":
            wanted = here.package.reference.all_reduce(parts)
            got = communicator.all_reduce(x)
        elif kind == "scatter":
            wanted = here.package.reference.all_reduce(parts)[here.rank : here.rank + 1]
            got = communicator.reduce_scatter(x)
        else:
            got, wanted = communicator.all_gather(x), torch.cat(parts)
        require_same_bits(got, wanted)
    return None


def a_late_rank(here: Here, ranks: int, late: int) -> None:
    communicator = here.shared(ranks)
    if communicator is None:
        return
    parts = parts_of(3, ranks, (300,), torch.float32)
    if here.rank == late:
        time.sleep(0.5)
    got = communicator.all_reduce(parts[here.rank].to(here.device))
    require_same_bits(got, here.package.reference.all_reduce(parts))


def error_of(function: Any, *arguments: Any, **more: Any) -> str:
    try:
        function(*arguments, **more)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "no error"


def a_rank_that_stays_away(here: Here) -> list[str]:
    """Rank 1 calls when rank 0 has given up."""
    group = here.group(2)
    if here.rank > 1:
        return []
    communicator = here.communicator(2, timeout=0.5)
    x = torch.ones(100)
    if here.rank == 0:
        begin = time.monotonic()
        said = [error_of(communicator.all_reduce, x)]
        said.append(f"{time.monotonic() - begin < 10}")
    distributed.barrier(group)
    if here.rank == 1:
        said = [error_of(communicator.all_reduce, x)]
    said.append(error_of(communicator.all_reduce, x))
    return said


def other_calls_on_other_ranks(here: Here, other: str) -> str:
    here.group(2)
    if here.rank > 1:
        return ""
    communicator = here.communicator(2)
    if other == "size":
        return error_of(communicator.all_reduce, torch.ones(8 + here.rank))
    if other == "dtype":
        dtype = (torch.float16, torch.bfloat16)[here.rank]
        return error_of(communicator.all_reduce, torch.ones(8, dtype=dtype))
    call = (communicator.all_reduce, communicator.all_gather)[here.rank]
    return error_of(call, torch.ones(8))


def refused(here: Here, ranks: int) -> dict[str, str]:
    """By argument: what a rank says of a call that no other need hear of."""
    c, more = here.shared(ranks), {"device": here.device}
    if c is None:
        return {}
    x = torch.ones(ranks, **more)
    said = {
        "x": error_of(c.all_reduce, [1.0]),
        "dtype": error_of(c.all_reduce, torch.ones(4, dtype=torch.int32, **more)),
        "out dtype": error_of(c.all_reduce, x, torch.ones(ranks, **more).bfloat16()),
        "out shape": error_of(c.all_gather, x, torch.ones(ranks, **more)),
        "out strides": error_of(
            c.all_reduce, torch.ones(4, 4, **more), torch.ones(4, 4, **more).t()
        ),
        "rows": error_of(c.reduce_scatter, torch.ones(ranks + 1, **more)),
        "bytes": error_of(c.all_reduce, torch.ones((1 << 20) + 1, **more)),
        "gradient": error_of(c.all_reduce, torch.ones(4, requires_grad=True, **more)),
    }
    both = torch.ones(8, **more)
    said["overlap"] = error_of(c.all_reduce, both[:4], both[2:6])
    return said


def refused_memory(here: Here) -> dict[str, str]:
    """What the op itself is given: only a Communicator calls it."""
    c = here.shared(4)
    address, x = c._address, torch.ones(4)
    strange = torch.zeros(8192, dtype=torch.uint8)
    op = here.package.comm.communicator._all_reduce
    return {
        "memory": error_of(op, x, x, strange.data_ptr(), 8192, here.rank, 4, 1.0),
        "ranks": error_of(op, x, x, address, 8192, 0, 9, 1.0),
        "rank": error_of(op, x, x, address, 8192, 4, 4, 1.0),
    }


def refused_groups(here: Here) -> list[str]:
    communicator, count = here.package.comm.Communicator, distributed.get_world_size()
    alone = [distributed.new_group([rank]) for rank in range(count)][here.rank]
    said = [error_of(communicator, alone), error_of(communicator, None, 64 + here.rank)]
    made = here.communicator(count, 64)
    made.close()
    return [*said, error_of(made.all_reduce, torch.ones(1, device=here.device))]


def released(here: Here) -> list[bool]:
    def mapped() -> bool:
        return "rocm_kernels_released" in Path("/proc/self/maps").read_text()

    # Names are random: this case makes its own.
    from unittest import mock

    made = here.package.comm.memory
    where = made.tempfile.mkstemp

    def named(prefix: str, dir: str) -> Any:
        return where(prefix=f"{prefix}released", dir=dir)

    with mock.patch.object(made.tempfile, "mkstemp", named):
        communicator = here.communicator(4, 4096)
    before = mapped()
    communicator.all_reduce(torch.ones(5))
    communicator.close()
    return [
        before,
        mapped(),
        any("rocm_kernels_released" in name for name in os.listdir("/dev/shm")),
    ]


def compiled(here: Here, ranks: int) -> None:
    communicator = here.shared(ranks)
    if communicator is None:
        return

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = communicator.all_reduce(x * 2)
        z = communicator.all_reduce(y + x, out=torch.empty_like(x))
        products = communicator.linear_all_reduce(z, w, scale, bias=weight[:40])
        return z, products, *communicator.all_reduce_rmsnorm_fp8(z, weight, residual=y.clone())

    torch.manual_seed(here.rank)
    x, weight = torch.randn(3, 256).to(here.device), torch.ones(256, device=here.device)
    w, scale = here.package.quantize_fp8(torch.randn(40, 256).to(here.device))
    wanted = step(x, weight)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(x, weight)
    for a, b in zip(got, wanted, strict=True):
        require_same_bits(a, b)


def wait_for_a_dead_rank(here: Here) -> str:
    """The last rank's process ends before it calls."""
    ranks = distributed.get_world_size()
    communicator = here.communicator(ranks, timeout=2.0)
    distributed.barrier(here.group(ranks))
    if here.rank == ranks - 1:
        os._exit(3)
    x = torch.ones(5, device=here.device)
    if here.device.type == "cpu":
        return error_of(communicator.all_reduce, x)
    communicator.all_reduce(x)  # it returns at once
    return error_of(communicator.check)
