// Attention for what no other kernel serves: any sizes, strides, alignment and dtypes, on any GPU.
//
// A wave has one row of q and one head. Its lanes share the elements of a head; keys go by one
// after the other, with a running maximum and sum.
#pragma once

#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "../../common/gpu/reduce.h"
#include "problem.h"

namespace rocm_kernels {

constexpr int kPlainWaves = 4;  // of a block

ROCM_KERNELS_DEVICE float load_as_float(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DType::kFloat16:
      return to_float(static_cast<const float16*>(data)[i]);
    case DType::kBFloat16:
      return to_float(static_cast<const bfloat16*>(data)[i]);
    case DType::kFloat8E4M3FN:
      return fp8_to_float<false>(static_cast<const uint8_t*>(data)[i]);
    default:
      return fp8_to_float<true>(static_cast<const uint8_t*>(data)[i]);
  }
}

// Grid: ceil(rows of the longest sequence / kPlainWaves) x heads x sequences.
template <typename Q>
__global__ void attention_plain(const AttentionArgs args, const Window window) {
  begin_after_previous_kernel();
  constexpr int kShare = static_cast<int>(kMaxHeadDim) / kWaveSize;  // of a head, a lane's most
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int row = static_cast<int>(blockIdx.x * kPlainWaves + threadIdx.x / kWaveSize);
  const int head = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
  const Sequence s = sequence_of(args, b);
  if (row >= s.q_count) return;
  const int kv_head = head / static_cast<int>(args.heads / args.kv_heads);
  const KeyRange keys = window.seen(s, row, row);
  const int64_t own = args.cu_seqlens_q == nullptr ? b : 0;

  float q[kShare] = {}, sums[kShare] = {};
  for (int i = 0; i < kShare; ++i) {
    const int at = i * kWaveSize + lane;
    if (at < args.head_dim) {
      q[i] = load_as_float(args.q.data, args.q_dtype,
                           own * args.q.batch_stride + (s.q_begin + row) * args.q.row_stride +
                               head * args.q.head_stride + at);
    }
  }
  const float scale = args.scale * k_descale_of(args, b, kv_head);
  float most = -kInfinity, total = 0;
  for (int key = keys.begin; key < keys.end; ++key) {
    int64_t page = 0, in_page = s.k_begin + key;
    if (s.pages != nullptr) {
      page = s.pages[key / args.page_size];
      in_page = key % args.page_size;
    }
    const int64_t k_at = s.k_batch + page * args.k.batch_stride + in_page * args.k.row_stride +
                         kv_head * args.k.head_stride;
    const int64_t v_at = s.v_batch + page * args.v.batch_stride + in_page * args.v.row_stride +
                         kv_head * args.v.head_stride;
    float score = 0;
    for (int i = 0; i < kShare; ++i) {
      const int at = i * kWaveSize + lane;
      if (at < args.head_dim) score += q[i] * load_as_float(args.k.data, args.kv_dtype, k_at + at);
    }
    score = reduce_lanes<kWaveSize>(score, Sum{}) * scale;
    if (args.softcap > 0) score = args.softcap * tanhf(score / args.softcap);
    score *= kLog2E;
    const float grown = score > most || most == -kInfinity ? score : most;
    const float by = most == -kInfinity ? 0.0f : fast_exp2(most - grown);
    const float p = grown == -kInfinity ? 0.0f : fast_exp2(score - grown);
    most = grown;
    total = total * by + p;
    for (int i = 0; i < kShare; ++i) {
      const int at = i * kWaveSize + lane;
      if (at < args.head_dim_v) {
        sums[i] = sums[i] * by + p * load_as_float(args.v.data, args.kv_dtype, v_at + at);
      }
    }
  }
  const float v_descale = v_descale_of(args, b, kv_head);
  for (int i = 0; i < kShare; ++i) {
    const int at = i * kWaveSize + lane;
    if (at < args.head_dim_v) {
      finish_element<Q>(args, b, s.q_begin, row, head, at, most, total, sums[i], v_descale);
    }
  }
}

// Host. `wave_size`: the device's.
inline Status launch_plain_attention(const AttentionArgs& args, int32_t wave_size, bool early,
                                     const Context& context) {
  if (args.heads > 65535 || args.batch > 65535) {
    return "more than 65,535 heads or sequences in one call; divide the batch";
  }
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>((args.max_seqlen_q + kPlainWaves - 1) / kPlainWaves),
                     static_cast<unsigned>(args.heads), static_cast<unsigned>(args.batch));
  launch.block = kPlainWaves * wave_size;
  launch.stream = stream_of(context);
  launch.early = early;
  const Window window = Window::of(args);
  switch (args.q_dtype) {
    case DType::kFloat32:
      return launch_kernel(attention_plain<float>, launch, args, window);
    case DType::kFloat16:
      return launch_kernel(attention_plain<float16>, launch, args, window);
    default:
      return launch_kernel(attention_plain<bfloat16>, launch, args, window);
  }
}

}  // namespace rocm_kernels
