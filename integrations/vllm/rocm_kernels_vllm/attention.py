"""vLLM's attention on flash_attn_varlen_func: prompts, decoding steps and drafts to be verified,
from vLLM's pages in 16 bits or FP8.

vLLM has a name for a backend of others, CUSTOM: ``--attention-backend CUSTOM`` picks this one. What
it does not serve, it says by vLLM's own ``supports_*``, and vLLM refuses to start with the reason.

A page is ``[KV heads, rows, 2 * D]`` in name, each key with its value behind it; where heads and
rows lie is vLLM's choice, for the kernel takes any strides. vLLM's own op writes the pages.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from vllm import _custom_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from . import kernels
from .parts import HookMoved

MAX_HEAD_SIZE = 512
# A graph's bound is the longest sequence that the model allows, whatever it will serve. The config
# for so many keys is, by the kernels' model, a quarter behind the best at most up to 8,192 of them,
# and 43 % up to 131,072, whose own config takes 3 times as long as the best for one of 512.
USUAL_SEQLEN_K = 1024
FP8 = ("fp8", "fp8_e4m3")
NAME = "CUSTOM"  # vLLM's, for a backend that is not its own
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"


def attention() -> bool:
    if not current_platform.is_cuda_alike():
        return False  # vLLM asks for no other there
    ours = f"{__name__}.{RocmKernelsAttention.__name__}"
    member = registry.AttentionBackendEnum[NAME]
    if member.is_overridden() and member.get_path() != ours:
        raise HookMoved(f"the attention backend {NAME} is {member.get_path()} already")
    registry.register_backend(member, ours)
    return True


class RocmKernelsAttention(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *FP8]
    # An op of its own writes the pages, before attention.
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["RocmKernelsAttentionImpl"]:
        return RocmKernelsAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["MetadataBuilder"]:
        return MetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Tells vLLM 0.26 the shape of a cache; later versions have this one and do not ask."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
        use_mm_prefix, device_capability,
    ) -> str | None:  # fmt: skip
        if reason := kernels.why_not():
            return f"rocm-kernels has no kernels here ({reason})"
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return (
                f"a 16-bit cache must have the dtype of queries, got {kv_cache_dtype} for {dtype}"
            )
        return None


class Sequences(NamedTuple):
    """Sequences in a row of the batch that one launch serves, and where their queries begin."""

    first_row: int
    cu_seqlens_q: torch.Tensor  # int32 [sequences + 1], from first_row on
    seqused_k: torch.Tensor  # int32 [sequences]
    block_table: torch.Tensor  # int32 [sequences, pages]
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass
class Metadata:
    """A batch. A plain dataclass, as vLLM's wrappers of a backend set attributes on it (chunked
    attention), or derive from its class and copy its fields (fast prefill)."""

    parts: tuple[Sequences, ...]


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Sequences that decode come first, and prompts get a launch of their own: how keys are divided
    among blocks depends on the longest query of a launch.

    A graph is of a batch that decodes: its tensors are vLLM's own, which stay where they are.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        _allow_drafts()

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        batch = common_attn_metadata
        if batch.causal is not True:
            raise NotImplementedError("rocm-kernels' attention in vLLM is causal, got causal=False")
        threshold = self.reorder_batch_threshold
        decodes, prompts, rows, _ = split_decodes_and_prefills(batch, decode_threshold=threshold)
        everything = Sequences(
            0, batch.query_start_loc, batch.seq_lens, batch.block_table_tensor,
            batch.max_query_len, batch.max_seq_len,
        )  # fmt: skip
        if not decodes or not prompts:
            return Metadata((everything,))
        return Metadata((
            Sequences(
                0, batch.query_start_loc[: decodes + 1], batch.seq_lens[:decodes],
                batch.block_table_tensor[:decodes], threshold, batch.max_seq_len,
            ),
            Sequences(
                rows, batch.query_start_loc[decodes:] - rows, batch.seq_lens[decodes:],
                batch.block_table_tensor[decodes:], batch.max_query_len, batch.max_seq_len,
            ),
        ))  # fmt: skip


def _allow_drafts() -> None:
    """Lets models that draft several tokens have this attention. On ROCm vLLM lists the metadata of
    those that may; each has its builder build a batch anew for each token, and so does ours.

    Its list is of each proposer, which is there before its builders are: a property adds to it.
    Where nothing drafts, the module is not imported, and need not be."""
    proposer = getattr(sys.modules.get(PROPOSER), "SpecDecodeBaseProposer", None)
    if proposer is None or hasattr(proposer, "allowed_attn_types"):
        return

    def listed(self):
        types = vars(self).get("allowed_attn_types")
        return types if types is None else (*types, Metadata)

    def keep(self, types):
        vars(self)["allowed_attn_types"] = types

    proposer.allowed_attn_types = property(listed, keep)


class Pages(NamedTuple):
    """A cache of vLLM, ``[pages, KV heads, rows, 2 * D]``, and its keys and values, ``[pages, rows,
    KV heads, D]``: as vLLM's op writes them (FP8 perhaps as bytes), and as they are read."""

    kv_cache: torch.Tensor
    written: tuple[torch.Tensor, ...]
    read: tuple[torch.Tensor, ...]


class RocmKernelsAttentionImpl(AttentionImpl[Metadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError(
                "rocm-kernels' attention takes no alibi_slopes; choose another --attention-backend"
            )
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"rocm-kernels' attention in vLLM is a decoder's, got {attn_type}; choose another "
                "--attention-backend"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window = (-1 if sliding_window is None else sliding_window - 1, -1)
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.pages: Pages | None = None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        keys, values = self._pages(kv_cache).written
        _custom_ops.reshape_and_cache_flash(
            key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale,
            layer._v_scale,
        )  # fmt: skip

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
        output_block_scale=None,
    ):  # fmt: skip
        """``query`` and ``output`` ``[rows, heads, D]``; what lies behind the last sequence's rows
        is vLLM's padding, and stays as it is."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("rocm-kernels' attention in vLLM has no quantised results")
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output.fill_(0)
        keys, values = self._pages(kv_cache).read
        fp8 = self.kv_cache_dtype in FP8
        k_descale, v_descale = (layer._k_scale, layer._v_scale) if fp8 else (None, None)
        flash_attn_varlen_func = kernels.package().flash_attn_varlen_func
        recorded = current_platform.is_cuda() and torch.cuda.is_current_stream_capturing()
        usual = USUAL_SEQLEN_K if recorded else None
        for part in attn_metadata.parts:
            # vLLM's bound may be of what a sequence can become, and more than its pages hold.
            room = part.block_table.shape[1] * keys.shape[1]
            first = part.first_row
            flash_attn_varlen_func(
                query[first:] if first else query, keys, values, part.cu_seqlens_q,
                max_seqlen_q=part.max_seqlen_q, max_seqlen_k=min(part.max_seqlen_k, room),
                softmax_scale=self.scale, causal=True, window_size=self.window,
                softcap=self.softcap, s_aux=self.sinks, block_table=part.block_table,
                seqused_k=part.seqused_k, usual_seqlen_k=usual, k_descale=k_descale,
                v_descale=v_descale,
                out=output[first:] if first else output,
            )  # fmt: skip
        return output

    def _pages(self, kv_cache: torch.Tensor) -> "Pages":
        """Made once: outside a graph a view costs the host as much as a launch does."""
        if self.pages is None or self.pages.kv_cache is not kv_cache:
            written = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            read = written
            if self.kv_cache_dtype in FP8:
                read = tuple(pages.view(current_platform.fp8_dtype()) for pages in written)
            self.pages = Pages(kv_cache, written, read)
        return self.pages
