// Attention of few or many queries to keys and values where they lie: contiguous, ragged, or in
// pages of a cache.
//
//   s[i, j]   = cap(scale * k_descale * sum_d q[i, d] k[j, d])   cap(x) = softcap tanh(x / softcap)
//   z[i]      = sum_j exp(s[i, j]) + exp(sink)                    over the keys that query i sees
//   out[i, e] = v_descale * sum_j exp(s[i, j]) / z[i] * v[j, e]
//   lse[i]    = log z[i]
//
// once for each sequence and query head; query heads h * group to (h + 1) * group - 1 share KV head
// h. Queries are the last positions of their sequence: query i of a sequence of len_q queries and
// len_k keys stands at p = i + len_k - len_q, and sees key j where p - window_left <= j <= p +
// window_right (a bound of -1 is none; causal is window_right = 0). A query that sees no key gives
// 0, and an lse of -inf, or of the sink.
//
// float32 softmax and sums; P is rounded to the queries' type before it meets V; out is rounded
// once. Each backend defines the functions below once.
#pragma once

#include "../blocks/heads/args.h"
#include "../common/core/context.h"
#include "../common/core/dtype.h"

namespace rocm_kernels {

constexpr int64_t kMaxHeadDim = 512;

// Rows of [row, head, element]: elements follow each other, the rest has strides in elements.
struct AttentionRows {
  const void* data = nullptr;
  int64_t batch_stride = 0;  // between sequences, or pages; 0 where rows of all follow each other
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

struct AttentionArgs {
  int64_t batch = 0;                     // sequences
  int64_t heads = 0, kv_heads = 0;       // heads is a multiple of kv_heads
  int64_t head_dim = 0, head_dim_v = 0;  // of queries and keys, of values and out; <= kMaxHeadDim

  // Queries: sequence b has rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]), or its own
  // max_seqlen_q.
  AttentionRows q;
  const int32_t* cu_seqlens_q = nullptr;  // [batch + 1]
  int64_t max_seqlen_q = 0;               // no sequence has more
  int64_t total_q = 0;                    // rows of q

  // Keys and values: rows [cu_seqlens_k[b], cu_seqlens_k[b + 1]); or the sequence's own
  // max_seqlen_k; or, in pages, row j % page_size of page block_table[b, j / page_size]. Of those
  // the first seqused_k[b] count, where given, and the first leftpad_k[b] are not seen.
  AttentionRows k, v;
  const int32_t* cu_seqlens_k = nullptr;  // [batch + 1]
  const int32_t* seqused_k = nullptr;     // [batch]
  const int32_t* leftpad_k = nullptr;     // [batch]
  const int32_t* block_table = nullptr;   // [batch, block_table_stride]; entries past a sequence's
  int64_t block_table_stride = 0;         // last page are not read
  int64_t page_size = 0;                  // of a page, where there is a block_table
  int64_t pages = 0;                      // that k and v have then
  int64_t max_seqlen_k = 0;               // no sequence has more keys
  int64_t total_k = 0;                    // rows of k, with cu_seqlens_k

  const float* k_descale = nullptr;  // [batch, kv_heads] by these strides; nullptr: 1
  const float* v_descale = nullptr;
  int64_t k_descale_batch_stride = 0, k_descale_head_stride = 0;
  int64_t v_descale_batch_stride = 0, v_descale_head_stride = 0;
  const void* sinks = nullptr;  // [heads], sink_dtype; nullptr: none

  void* out = nullptr;  // [row, head, head_dim_v] as q's rows
  int64_t out_batch_stride = 0, out_row_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // [batch, heads, row], or [heads, row] with cu_seqlens_q; may be nullptr
  int64_t lse_batch_stride = 0, lse_head_stride = 0;

  float scale = 1;
  float softcap = 0;  // 0: none
  int64_t window_left = -1, window_right = -1;

  DType q_dtype = DType::kBFloat16;   // float16 or bfloat16, on the CPU float32 too; out's as well
  DType kv_dtype = DType::kBFloat16;  // q_dtype, or FP8
  DType sink_dtype = DType::kBFloat16;

  // One new token a sequence, not in the caches yet, where rotates_new_tokens(args): k and v are
  // its caches; q is ignored, since the kernel rotates these queries itself.
  const RopeAndCacheArgs* fresh = nullptr;

  // No kernel that may still run writes keys or values, but a sequence's last. Of one query a
  // sequence, in rows.
  bool keys_are_settled = false;

  // Scratch of at least attention_workspace_bytes(args), 256-byte aligned, contents undefined.
  void* workspace = nullptr;

  // Which kernel, and how the work is divided: a text of visit_attention_configs(). nullptr: the
  // backend chooses.
  const char* config = nullptr;
};

// Bytes of scratch that launch_attention needs for these sizes; nothing that args point to is read.
int64_t attention_workspace_bytes(const AttentionArgs& args, const Context& context);

// Whether launch_attention() rotates the tokens of `fresh` itself and puts them into the caches, in
// the very bits of rope_and_cache and of attention behind it. Elsewhere `fresh` must be nullptr.
bool rotates_new_tokens(const AttentionArgs& args, const Context& context);

// Tells visit(text, state) every config that can serve args on the current device: first the one
// that launch_attention(args) takes, then the others that are worth timing, each once. Nothing that
// args point to is read, but the addresses' alignment counts.
Status visit_attention_configs(const AttentionArgs& args, const Context& context,
                               void (*visit)(const char* config, void* state), void* state);

// Caller's duty: sizes >= 0, heads % kv_heads == 0, dtypes as above.
Status launch_attention(const AttentionArgs& args, const Context& context);

}  // namespace rocm_kernels
