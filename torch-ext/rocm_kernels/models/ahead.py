"""What a product of a recorded step asks L2 for: the beginning of the next product's weight.

    product ─▶ norm or SwiGLU, FP8 ─▶ product

Once a product's last weights are on their way the memory would idle, until the next one's blocks
find room, behind those of the first, and fill their stages. A product is launched before the next
one is known. So each is told a place in the device's memory, and when all is recorded, what it is
to ask for is written there. A wrong guess costs time alone.
"""

import contextlib
from typing import Iterator, List, NamedTuple, Optional

import torch

from .._ops import ops

_PRODUCTS = 4096  # of a step, that have places
_WORDS = 4
# On an H200, a layer of an 8-billion Llama: gate and up, and down, have 0.9 and 0.45 MB a
# multiprocessor, and asked for early they gain 1.2 to 2 and 0.3 to 0.9 us; qkv and o, which have
# 0.19 and 0.13 and so little more than their stages hold, gain nothing or lose 0.4.
_LEAST = 256 << 10  # bytes of a weight for each multiprocessor
_ASKED = 64 << 10  # of which so many are asked for
_OF_L2 = 0.25  # that others may read in between


class Product(NamedTuple):
    """One of a step, in order: where its weight is, and bytes that others read before it."""

    data: int
    rows: int
    row_bytes: int
    row_stride: int
    runs: int  # of rows, of each of which a multiprocessor has a share
    before: int


def wanted(product: Product, processors: int, l2_bytes: int) -> List[int]:
    """What the product in front of it asks for, as blocks/product/ahead.h says: the first bytes of
    each multiprocessor's share of the rows."""
    nothing = [0] * _WORDS
    share = -(-product.rows // (processors * product.runs))
    if (
        product.row_stride != product.row_bytes
        or product.data % 16
        or product.row_bytes % 16
        or share * product.runs * product.row_bytes < _LEAST
        or product.before > _OF_L2 * l2_bytes
    ):
        return nothing
    asked = _ASKED // product.runs
    return [product.data, share * product.row_bytes, product.rows // share, asked]


@contextlib.contextmanager
def asking_ahead(device: torch.device) -> Iterator[Optional[torch.Tensor]]:
    """Products that are recorded within ask for the next one's weight, the last for the first's.
    Gives what the graph reads, which must live as long."""
    if device.type != "cuda" or not torch.version.cuda:
        yield None
        return
    places = torch.zeros(_PRODUCTS, _WORDS, dtype=torch.int64, device=device)
    ops.ask_ahead(places)
    try:
        yield places
    finally:
        lines = ops.ask_ahead(None).splitlines()
    products = [Product(*map(int, line.split())) for line in lines]
    facts = torch.cuda.get_device_properties(device)
    asked = [
        wanted(product, facts.multi_processor_count, facts.L2_cache_size)
        for product in [*products[1:], *products[:1]]
    ][:_PRODUCTS]
    if asked:
        places[: len(asked)].copy_(torch.tensor(asked, dtype=torch.int64, device="cpu"))
