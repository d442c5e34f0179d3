"""Attention of other packages, by the queries, keys and values that attention.py times.

SDPA's backends are in torch. FlashAttention 3 comes out of vLLM's wheel, FlashInfer out of its own;
who does not import is missing, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# q [batch, rows, heads, D], k and v [batch, keys, KV heads, D], all contiguous.
Call = Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
# maker(q, k, v, causal): a call for operands of these shapes, or NotServed.
Maker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Call]


class NotServed(Exception):
    """A way of a peer that is not for such operands."""


PAGE = 16  # rows of a page, as vLLM's caches have


def find() -> tuple[dict[str, list[Maker]], dict[str, str]]:
    """The ways that each peer has, of which a caller takes the quickest; versions, or why none."""
    peers = {
        "cuDNN": [sdpa(SDPBackend.CUDNN_ATTENTION)],
        "flash": [sdpa(SDPBackend.FLASH_ATTENTION)],
    }
    said = {}
    for name, load in (("FlashAttention 3", flash_attention_3), ("FlashInfer", flashinfer)):
        try:
            said[name], peers[name] = load()
        except Exception as error:  # whatever a foreign package may raise
            said[name] = f"missing: {type(error).__name__}: {error}".splitlines()[0][:200]
    return peers, said


def in_pages(cache: torch.Tensor, rows: int) -> torch.Tensor:
    return cache.view(-1, rows, *cache.shape[2:])


def steps(count: int, by: int) -> torch.Tensor:
    """0, by, 2 by, ... of ``count`` sequences."""
    return torch.arange(count + 1, dtype=torch.int32, device="cuda") * by


def sdpa(backend: SDPBackend) -> Maker:
    def make(q, k, v, causal):
        if k.dtype != q.dtype:
            raise NotServed("SDPA takes no FP8 keys")

        def call(qkv):
            q, k, v = (t.transpose(1, 2) for t in qkv)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=True
                ).transpose(1, 2)

        return call

    return make


def flash_attention_3() -> tuple[str, list[Maker]]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.flash_attn_interface import (
        fa_version_unsupported_reason,
        get_scheduler_metadata,
    )

    if reason := fa_version_unsupported_reason(3):
        raise RuntimeError(reason)

    def ragged(q, k, v, causal):
        batch, rows, keys = *q.shape[:2], k.shape[1]
        ends = {"cu_seqlens_q": steps(batch, rows), "cu_seqlens_k": steps(batch, keys)}
        return lambda qkv: flash_attn_varlen_func(
            *(t.flatten(0, 1) for t in qkv), max_seqlen_q=rows, max_seqlen_k=keys, causal=causal,
            fa_version=3, **ends,
        ).view_as(qkv[0])  # fmt: skip

    def paged(page):
        def make(q, k, v, causal):
            (batch, rows, heads, size), keys, kv_heads = q.shape, k.shape[1], k.shape[2]
            if rows > 8:
                raise NotServed("pages are for decode steps")
            lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
            table = torch.arange(batch * keys // page, dtype=torch.int32, device="cuda")
            cu_q = steps(batch, rows)
            plan = get_scheduler_metadata(
                batch_size=batch, max_seqlen_q=rows, max_seqlen_k=keys, num_heads_q=heads,
                num_heads_kv=kv_heads, headdim=size, cache_seqlens=lengths, qkv_dtype=q.dtype,
                cu_seqlens_q=cu_q, page_size=page, causal=causal,
            )  # fmt: skip
            return lambda qkv: flash_attn_varlen_func(
                qkv[0].flatten(0, 1), in_pages(qkv[1], page), in_pages(qkv[2], page),
                max_seqlen_q=rows, cu_seqlens_q=cu_q, max_seqlen_k=keys, seqused_k=lengths,
                block_table=table.view(batch, -1), scheduler_metadata=plan, causal=causal,
                fa_version=3,
            ).view_as(qkv[0])  # fmt: skip

        return make

    return f"of vLLM {metadata.version('vllm')}", [ragged, paged(PAGE), paged(128)]


def flashinfer() -> tuple[str, list[Maker]]:
    import flashinfer

    def workspace() -> torch.Tensor:
        return torch.empty(128 << 20, dtype=torch.uint8, device="cuda")

    def decode(q, k, v, causal):
        (batch, rows, heads, size), keys, kv_heads = q.shape, k.shape[1], k.shape[2]
        if rows > 1:
            raise NotServed("it is for decode steps")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_tensor_cores=True, backend="fa2"
        )
        pages = keys // PAGE
        wrapper.plan(
            steps(batch, pages), torch.arange(batch * pages, dtype=torch.int32, device="cuda"),
            torch.full((batch,), PAGE, dtype=torch.int32, device="cuda"), heads, kv_heads, size,
            PAGE, q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        return lambda qkv: wrapper.run(
            qkv[0].flatten(0, 1), (in_pages(qkv[1], PAGE), in_pages(qkv[2], PAGE))
        ).view_as(qkv[0])

    def prompts(backend):
        def make(q, k, v, causal):
            (batch, rows, heads, size), keys, kv_heads = q.shape, k.shape[1], k.shape[2]
            if rows == 1 or k.dtype != q.dtype:
                raise NotServed("it is for prompts of 16 bits")
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                workspace(), "NHD", backend=backend
            )
            wrapper.plan(
                steps(batch, rows), steps(batch, keys), heads, kv_heads, size, causal=causal,
                q_data_type=q.dtype, kv_data_type=k.dtype,
            )  # fmt: skip
            return lambda qkv: wrapper.run(*(t.flatten(0, 1) for t in qkv)).view_as(qkv[0])

        return make

    return flashinfer.__version__, [decode, prompts("fa3"), prompts("fa2")]
