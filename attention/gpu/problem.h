// What attention kernels of both GPU families share: where a sequence's keys lie, which of them a
// query sees, and how a row ends.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/device.h"
#include "../../common/gpu/math.h"
#include "../attention.h"

namespace rocm_kernels {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_inff();

// ---- A sequence --------------------------------------------------------------------------------

struct Sequence {
  int q_begin, q_count;      // its queries, as rows of q
  int64_t k_begin;           // its first key, as a row of k; 0 in pages
  int k_first;               // keys before it are not seen
  int k_count;               // keys that count
  const int32_t* pages;      // its row of the block table, or nullptr
  int64_t k_batch, v_batch;  // elements before its first row
};

// What memory says of a sequence's lengths.
struct Lengths {
  int q_begin, q_end, k_begin, k_end, k_used, k_first;

  ROCM_KERNELS_DEVICE bool operator==(const Lengths& other) const {
    return q_begin == other.q_begin && q_end == other.q_end && k_begin == other.k_begin &&
           k_end == other.k_end && k_used == other.k_used && k_first == other.k_first;
  }
};

// Whether memory says anything of them.
ROCM_KERNELS_DEVICE bool has_lengths(const AttentionArgs& args) {
  return args.cu_seqlens_q != nullptr || args.cu_seqlens_k != nullptr ||
         args.seqused_k != nullptr || args.leftpad_k != nullptr;
}

// Read past NVIDIA's L1: decode asks before the kernel before is done too, which may write them,
// and L1 would keep what they were.
ROCM_KERNELS_DEVICE Lengths lengths_of(const AttentionArgs& args, int b) {
  constexpr int kAll = 0x7fffffff;
  const int q_count = static_cast<int>(args.max_seqlen_q);
  const int k_count = static_cast<int>(args.max_seqlen_k);
  Lengths lengths = {0, q_count, 0, k_count, kAll, 0};
  if (args.cu_seqlens_q != nullptr) {
    lengths.q_begin = load_older(args.cu_seqlens_q + b);
    lengths.q_end = load_older(args.cu_seqlens_q + b + 1);
  }
  if (args.cu_seqlens_k != nullptr) {
    lengths.k_begin = load_older(args.cu_seqlens_k + b);
    lengths.k_end = load_older(args.cu_seqlens_k + b + 1);
  }
  if (args.seqused_k != nullptr) lengths.k_used = load_older(args.seqused_k + b);
  if (args.leftpad_k != nullptr) lengths.k_first = load_older(args.leftpad_k + b);
  return lengths;
}

ROCM_KERNELS_DEVICE Sequence sequence_of(const AttentionArgs& args, int b, const Lengths& lengths) {
  Sequence s;
  s.q_begin = lengths.q_begin;
  s.q_count = lengths.q_end - lengths.q_begin;
  s.k_begin = lengths.k_begin;
  s.k_count = max(min(lengths.k_end - lengths.k_begin, lengths.k_used), 0);
  s.k_first = args.leftpad_k == nullptr ? 0 : min(max(lengths.k_first, 0), s.k_count);
  s.pages = nullptr;
  if (args.block_table != nullptr) s.pages = args.block_table + b * args.block_table_stride;
  const bool apart = args.block_table == nullptr;
  s.k_batch = apart ? b * args.k.batch_stride : 0;
  s.v_batch = apart ? b * args.v.batch_stride : 0;
  return s;
}
ROCM_KERNELS_DEVICE Sequence sequence_of(const AttentionArgs& args, int b) {
  return sequence_of(args, b, lengths_of(args, b));
}

// Keys [begin, end).
struct KeyRange {
  int begin, end;
};

// The window of each query; no bound is one of 2^30 keys, which no sequence has, so that sums of
// positions fit 32 bits.
struct Window {
  int left, right;

  static Window of(const AttentionArgs& args) {
    constexpr int64_t kAll = int64_t{1} << 30;
    const auto bound = [](int64_t asked) {
      return static_cast<int>(asked < 0 || asked > kAll ? kAll : asked);
    };
    return {bound(args.window_left), bound(args.window_right)};
  }

  // Keys that some query of [first, last] of a sequence sees.
  ROCM_KERNELS_DEVICE KeyRange seen(const Sequence& s, int first, int last) const {
    const int offset = s.k_count - s.q_count;
    const int end = max(min(last + offset + 1 + right, s.k_count), 0);
    return {min(max(first + offset - left, s.k_first), end), end};
  }

  // Keys that each of them sees.
  ROCM_KERNELS_DEVICE KeyRange seen_by_all(const Sequence& s, int first, int last) const {
    return {seen(s, last, last).begin, seen(s, first, first).end};
  }
};

// ---- Scales of FP8 keys and values of a sequence's KV head; 1 where there are none -------------

ROCM_KERNELS_DEVICE float k_descale_of(const AttentionArgs& args, int b, int kv_head) {
  return args.k_descale == nullptr ? 1.0f
                                   : args.k_descale[b * args.k_descale_batch_stride +
                                                    kv_head * args.k_descale_head_stride];
}
ROCM_KERNELS_DEVICE float v_descale_of(const AttentionArgs& args, int b, int kv_head) {
  return args.v_descale == nullptr ? 1.0f
                                   : args.v_descale[b * args.v_descale_batch_stride +
                                                    kv_head * args.v_descale_head_stride];
}

// ---- The end of a row --------------------------------------------------------------------------

ROCM_KERNELS_DEVICE float sink_of(const AttentionArgs& args, int head) {
  if (args.sink_dtype == DType::kFloat32) return static_cast<const float*>(args.sinks)[head];
  if (args.sink_dtype == DType::kFloat16) {
    return to_float(static_cast<const float16*>(args.sinks)[head]);
  }
  return to_float(static_cast<const bfloat16*>(args.sinks)[head]);
}

// Takes a head's sink into `total`, whose scale is `most` (log2): what to multiply the row's sums
// by.
ROCM_KERNELS_DEVICE float add_sink(const AttentionArgs& args, int head, float& most, float& total) {
  if (args.sinks == nullptr) return 1.0f;
  const float sink = sink_of(args, head) * kLog2E;
  const float both = fmaxf(most, sink);
  if (both == -kInfinity) return 1.0f;
  const float by = fast_exp2(most - both);
  total = total * by + fast_exp2(sink - both);
  most = both;
  return by;
}

ROCM_KERNELS_DEVICE void store_lse(const AttentionArgs& args, int64_t own, int q_row, int head,
                                   float most, float total) {
  if (args.lse == nullptr) return;
  args.lse[own * args.lse_batch_stride + head * args.lse_head_stride + q_row] =
      total == 0 ? -kInfinity : (most + log2f(total)) / kLog2E;
}

// Element `column` of out for query `q_row` of sequence b: `value` of sums on the scale of
// `most` (log2), of which `total` is the sum of exponentials. Column 0 stores lse.
template <typename Q>
ROCM_KERNELS_DEVICE void finish_element(const AttentionArgs& args, int b, int q_begin, int q_row,
                                        int head, int column, float most, float total, float value,
                                        float v_descale) {
  value *= add_sink(args, head, most, total);
  const int64_t own = args.cu_seqlens_q == nullptr ? b : 0;
  if (column == 0) store_lse(args, own, q_begin + q_row, head, most, total);
  const float result = total > 0 ? value / total * v_descale : total == 0 ? 0.0f : total;
  static_cast<Q*>(args.out)[own * args.out_batch_stride + (q_begin + q_row) * args.out_row_stride +
                            head * args.out_head_stride + column] = from_float<Q>(result);
}

// The same for all of a row's elements: what to multiply the values by; 0 where the row is 0,
// whatever the values are. Stores lse where `stores_lse`.
ROCM_KERNELS_DEVICE float finish_row(const AttentionArgs& args, int b, int q_begin, int q_row,
                                     int head, bool stores_lse, float most, float total,
                                     float v_descale) {
  const float by = add_sink(args, head, most, total);
  if (stores_lse) {
    store_lse(args, args.cu_seqlens_q == nullptr ? b : 0, q_begin + q_row, head, most, total);
  }
  return total > 0 ? by * v_descale / total : total == 0 ? 0.0f : total;
}

}  // namespace rocm_kernels
