// Queries, outputs, and keys and values in rows, by TMA: boxes of 64 columns.
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/swizzle.h"
#include "../../common/cuda/tensor_map.h"
#include "../../common/cuda/tma.cuh"
#include "../gpu/problem.h"

namespace rocm_kernels {
namespace cuda {

struct PrefillMaps {
  CUtensorMap q, k, v, out;
};

// Host: describes queries, or outputs, by boxes of `rows` rows, of [query][head of a KV head];
// false where these are not whole queries, or TMA does not take them.
inline bool describe_rows(CUtensorMap& map, const AttentionArgs& args, const AttentionRows& rows,
                          int64_t head_dim, int64_t box_rows) {
  const bool ragged = args.cu_seqlens_q != nullptr;
  const int64_t heads = args.heads / args.kv_heads;
  if (box_rows % heads != 0) return false;
  const StackOfGroups groups = {rows.data,
                                ragged ? 1 : args.batch,
                                args.kv_heads,
                                heads,
                                ragged ? args.total_q : args.max_seqlen_q,
                                head_dim,
                                rows.batch_stride * 2,
                                rows.head_stride * 2,
                                rows.row_stride * 2};
  return make_head_groups_map(map, groups, static_cast<int>(box_rows / heads)) == nullptr;
}

// Host: describes rows of heads of 16-bit elements, by boxes of box_keys keys; false where the copy
// engine does not take them.
inline bool describe_keys(CUtensorMap& map, const AttentionArgs& args, const AttentionRows& rows,
                          int64_t head_dim, int box_keys) {
  const bool ragged = args.cu_seqlens_k != nullptr;
  const StackOfHeads heads = {rows.data,
                              ragged ? 1 : args.batch,
                              args.kv_heads,
                              ragged ? args.total_k : args.max_seqlen_k,
                              head_dim,
                              rows.batch_stride * 2,
                              rows.head_stride * 2,
                              rows.row_stride * 2};
  return make_heads_map(map, heads, box_keys) == nullptr;
}

// Keys of a sequence whose tiles TMA may bring: those that some query sees, for others
// may hold anything, and those behind the last row, which it takes for zeros.
ROCM_KERNELS_DEVICE KeyRange keys_in_boxes(const AttentionArgs& args, const Window& window,
                                           const Sequence& s) {
  KeyRange keys = window.seen(s, 0, s.q_count - 1);
  if (args.cu_seqlens_k == nullptr && keys.end == args.max_seqlen_k) keys.end = 1 << 30;
  return keys;
}

// A tile that TMA must not bring, by kThreads threads: zeros for keys outside of
// `keys`.
template <int kKeys, int kThreads>
__device__ __forceinline__ void copy_end_of_keys(const char* from, int64_t row_bytes,
                                                 int head_bytes, int boxes, KeyRange keys,
                                                 int first, uint32_t to, int thread) {
  const int byte = thread % 8 * 16;
#pragma unroll 1
  for (int row = thread / 8; row < kKeys; row += kThreads / 8) {
    const int key = first + row;
    const bool there = key >= keys.begin && key < keys.end;
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      const int at = box * kChunkBytes + byte;
      const bool counts = there && at < head_bytes;
      copy_vector(
          to + box * kKeys * kChunkBytes + static_cast<uint32_t>(swizzled(row, 0, 1, thread % 8)),
          counts ? from + key * row_bytes + at : from, counts ? 16 : 0);
    }
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
