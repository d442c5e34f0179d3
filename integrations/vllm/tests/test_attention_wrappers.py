"""vLLM's wrappers of a backend around the plugin's attention, without a model: what each makes of a
batch, and what comes out, against the definition."""

from types import SimpleNamespace

import pytest
import torch
from rocm_kernels_vllm import kernels
from rocm_kernels_vllm.attention import RocmKernelsAttention
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

HEADS, KV_HEADS, SIZE, PAGE, CHUNK = 4, 2, 64, 16, 32
NEW, KEYS = [1, 1, 70], [33, 40, 90]  # two sequences decode, and one has a chunk of its prompt
SCALE = 0.11


@pytest.fixture
def served():
    """A batch, vLLM's description of it, and its pages."""
    torch.manual_seed(0)
    starts = torch.tensor([0, *NEW]).cumsum(0).int()
    lengths = torch.tensor(KEYS, dtype=torch.int32)
    pages = [-(-count // PAGE) for count in KEYS]
    table = torch.zeros(len(NEW), max(pages), dtype=torch.int32)
    for row, own in zip(table, torch.randperm(sum(pages)).int().split(pages), strict=True):
        row[: len(own)] = own
    batch = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(NEW),
        num_actual_tokens=sum(NEW), max_query_len=max(NEW), max_seq_len=max(KEYS),
        block_table_tensor=table, slot_mapping=torch.zeros(sum(NEW), dtype=torch.int64),
        seq_lens_cpu_upper_bound=lengths,
    )  # fmt: skip
    cache = torch.randn(sum(pages), KV_HEADS, PAGE, 2 * SIZE).bfloat16()
    query = torch.randn(sum(NEW), HEADS, SIZE).bfloat16()
    return SimpleNamespace(batch=batch, cache=cache, query=query, table=table)


def build(backend, batch):
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    config = SimpleNamespace(speculative_config=None, parallel_config=parallel)
    spec = SimpleNamespace(block_size=PAGE)
    builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    return builder.build(0, batch)


def run(served, query, metadata):
    impl = RocmKernelsAttention.get_impl_cls()(HEADS, SIZE, SCALE, KV_HEADS)
    out = torch.full_like(query, torch.nan)
    return impl.forward(None, query, None, None, served.cache, metadata, out)


def expected(served, sequence, position, chunk):
    """The output of the query at a position, from the keys of its chunk alone."""
    first = position - position % chunk
    pages = served.cache[served.table[sequence].long()]
    keys, values = pages.transpose(1, 2).flatten(0, 1)[first : position + 1].split(SIZE, dim=-1)
    row = sum(NEW[:sequence]) + position - (KEYS[sequence] - NEW[sequence])
    return kernels.package().reference.attention(
        served.query[row : row + 1].double(), keys.double(), values.double(), SCALE, True
    )[0][0]


def check(out, wanted):
    wanted = torch.stack(wanted)
    assert (out.double() - wanted).norm() < 2**-8 * wanted.norm()


@pytest.mark.parametrize("chunk", [None, CHUNK], ids=["as it is", "chunked"])
def test_chunks(served, chunk):
    """Llama 4's: a query sees the keys of its chunk alone."""
    backend = RocmKernelsAttention
    if chunk is not None:
        backend = create_chunked_local_attention_backend(backend, chunk)
    metadata = build(backend, served.batch)
    assert hasattr(metadata, "make_virtual_batches_block_table") == (chunk is not None)
    wanted = [
        expected(served, sequence, position, chunk or max(KEYS))
        for sequence, (new, keys) in enumerate(zip(NEW, KEYS, strict=True))
        for position in range(keys - new, keys)
    ]
    check(run(served, served.query, metadata), wanted)


@pytest.mark.parametrize("armed", [False, True])
def test_fast_prefill(served, armed):
    """--kv-sharing-fast-prefill: the layers that share a cache see the last row of each alone."""
    last = served.batch.query_start_loc[1:].long() - 1
    if armed:
        served.batch.logits_indices_padded = last
        served.batch.num_logits_indices = len(last)
        served.batch.max_logits_per_req = 1
    metadata = build(create_fast_prefill_custom_backend("Fast", RocmKernelsAttention), served.batch)
    assert metadata.num_logits_indices == (len(last) if armed else None)
    out = run(served, served.query[last] if armed else served.query, metadata)
    wanted = [expected(served, i, keys - 1, max(KEYS)) for i, keys in enumerate(KEYS)]
    check(out if armed else out[last], wanted)
