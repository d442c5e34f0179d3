"""Memory that the ranks of a group share: a header and room for data each, as
blocks/peers/memory.h describes it."""

import os
import struct
import tempfile
from typing import Any, List, Optional, Tuple

import torch

MOST_RANKS = 8
_HEADER_BYTES = 4096
_MAGIC = 0x3152454550534B52
_PAGE = 4096
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def shared_memory(group: Any, data_bytes: int) -> torch.Tensor:
    """This rank's bytes, zeros behind the header's first fields; on the CPU, of processes of one
    host.

    Every rank maps one file whole. Its name is gone before this returns, so the memory goes with
    the last process that has it, however that ends.
    """
    dist = torch.distributed
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = _HEADER_BYTES + -(-data_bytes // _PAGE) * _PAGE
    made: List[Any] = [None, None]  # the file, or why there is none
    if rank == 0:
        try:
            made[0] = _new_file(ranks * size)
        except OSError as error:
            made[1] = f"rank 0 cannot make {ranks * size} bytes of shared memory: {error}"
    try:
        dist.broadcast_object_list(made, src=dist.get_global_rank(group, 0), group=group)
        path, why = made
        mapped: Optional[torch.Tensor] = None
        if why is None:
            try:
                os.stat(path)  # torch would make the file
                mapped = torch.from_file(path, shared=True, size=ranks * size, dtype=torch.uint8)
            except (OSError, RuntimeError) as error:
                why = (
                    f"rank {rank} cannot map rank 0's memory, though all ranks must run on one "
                    f"host: {error}"
                )
        require_on_all_ranks(group, why)
    finally:
        if rank == 0 and made[0] is not None:
            os.unlink(made[0])
    own = mapped[rank * size : (rank + 1) * size]
    peers = [mapped.data_ptr() + r * size for r in range(ranks)]
    write_header(own, rank, peers)
    dist.barrier(group)  # nobody reads a header that is not there
    return own


def gpu_memory(
    group: Any, data_bytes: int, device: torch.device, report: torch.Tensor
) -> Tuple[torch.Tensor, Any]:
    """This rank's bytes on its GPU, for GPUs that reach each other's memory: mailboxes that are
    empty (blocks/peers/gpu/mailbox.h); and what keeps the others' bytes mapped.

    Args:
        report: int64, ``[1]``, pinned: where a kernel says who did not come.
    """
    dist = torch.distributed
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = _HEADER_BYTES + -(-data_bytes // _PAGE) * _PAGE
    reasons: List[str] = []
    for share in (_by_symmetric_memory, _by_ipc_handles):
        if share is _by_symmetric_memory and not _met_equally_often(group):
            reasons.append("the ranks have met in different numbers of groups")
            continue
        why: Optional[str] = None
        try:
            own, peers, kept = share(group, size, device)
        except RuntimeError as error:
            why = f"{str(error).splitlines()[0]}"
        said: List[Optional[str]] = [None] * ranks
        dist.all_gather_object(said, why, group=group)
        found = [f"rank {r}: {text}" for r, text in enumerate(said) if text is not None]
        if not found:
            break
        reasons.append(found[0])
    else:
        raise RuntimeError(
            "the ranks must have GPUs of one host that reach each other's memory, and cannot share "
            f"it. By torch's symmetric memory: {reasons[0]}; by IPC handles: {reasons[1]}"
        )
    own[:_HEADER_BYTES].zero_()
    own[_HEADER_BYTES:].fill_(0xFF)
    write_header(own, rank, peers, report.data_ptr())
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody fills a mailbox that is not empty yet
    return own, kept


_meetings = 0  # of this process, over torch's symmetric memory


def _met_equally_often(group: Any) -> bool:
    """Whether the ranks can meet over torch's symmetric memory, and counts that they do. torch
    numbers the meetings of a process, not of a group: ranks that differ wait for each other until
    the store's time is over."""
    global _meetings
    counts: List[int] = [0] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(counts, _meetings, group=group)
    equal = len({*counts}) == 1
    _meetings += equal
    return equal


def _by_symmetric_memory(
    group: Any, size: int, device: torch.device
) -> Tuple[torch.Tensor, List[int], Any]:
    """This rank's bytes, the addresses of all ranks', and what keeps them mapped."""
    from torch.distributed import _symmetric_memory

    # A multicast object is of no use here, and a matter of the whole host's switches.
    given = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        # Not by empty(), which from torch 2.11 on takes it from a pool that gives nothing back.
        make = _symmetric_memory._SymmetricMemory.empty_strided_p2p
        own = make((size,), (1,), torch.uint8, device)
        handle = _symmetric_memory.rendezvous(own, group)
    finally:
        if given is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = given
    return own, list(handle.buffer_ptrs), None


def _by_ipc_handles(
    group: Any, size: int, device: torch.device
) -> Tuple[torch.Tensor, List[int], Any]:
    """Shares memory by the handles with which torch sends tensors from process to process."""
    dist = torch.distributed
    own = torch.empty(size, dtype=torch.uint8, device=device)
    handle: Any = None
    try:
        handle = own.untyped_storage()._share_cuda_()
    finally:  # the others wait
        handles: List[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(handles, handle, group=group)
    if None in handles:
        raise RuntimeError("another rank has no handle")
    storages = [own.untyped_storage()] * len(handles)
    for r, (_, *rest) in enumerate(handles):
        if r != dist.get_rank(group):
            # On this rank's GPU, which then reaches the other's.
            storages[r] = torch.UntypedStorage._new_shared_cuda(device.index, *rest)
    return own, [storage.data_ptr() for storage in storages], storages


def write_header(own: torch.Tensor, rank: int, peers: List[int], report: int = 0) -> None:
    """The fields of a header that are written once.

    Args:
        own: this rank's bytes.
        peers: the addresses of all ranks' bytes, as this process has them.
        report: the address of a word that the host reads.
    """
    data_bytes = own.numel() - _HEADER_BYTES
    addresses = [*peers, *[0] * (MOST_RANKS - len(peers))]
    fields = struct.pack(
        f"<QIIq{MOST_RANKS}QQ", _MAGIC, rank, len(peers), data_bytes, *addresses, report
    )
    own[: len(fields)].copy_(torch.frombuffer(bytearray(fields), dtype=torch.uint8))


def require_on_all_ranks(group: Any, why: Optional[str]) -> None:
    """Raises on every rank what any rank has to say; None: nothing."""
    said: List[Optional[str]] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(said, why, group=group)
    found = [text for text in said if text is not None]
    if found:
        raise RuntimeError(found[0])


def _new_file(size: int) -> str:
    """A file of that many zeros, in memory where the system has a place for that."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    handle, path = tempfile.mkstemp(prefix="rocm_kernels_", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)  # a file without blocks kills who writes to it
        else:
            os.ftruncate(handle, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)
    return path
