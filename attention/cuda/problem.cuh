// What the attention kernels on NVIDIA GPUs share: where keys lie, which a query sees, and matrix
// instructions with fragments by ldmatrix. sm_80 and later.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <cstdint>
#include <type_traits>

#include "../attention.h"

namespace rocm_kernels {
namespace cuda {

constexpr float kLog2E = 1.4426950408889634f;

// ---- A sequence --------------------------------------------------------------------------------

struct Sequence {
  int q_begin, q_count;      // its queries, as rows of q
  int64_t k_begin;           // its first key, as a row of k; 0 in pages
  int k_count;               // keys that count
  const int32_t* pages;      // its row of the block table, or nullptr
  int64_t k_batch, v_batch;  // elements before its first row
};

__device__ __forceinline__ Sequence sequence_of(const AttentionArgs& args, int b) {
  Sequence s;
  s.q_begin = 0;
  s.q_count = static_cast<int>(args.max_seqlen_q);
  if (args.cu_seqlens_q != nullptr) {
    s.q_begin = args.cu_seqlens_q[b];
    s.q_count = args.cu_seqlens_q[b + 1] - s.q_begin;
  }
  s.k_begin = 0;
  s.k_count = static_cast<int>(args.max_seqlen_k);
  if (args.cu_seqlens_k != nullptr) {
    s.k_begin = args.cu_seqlens_k[b];
    s.k_count = args.cu_seqlens_k[b + 1] - args.cu_seqlens_k[b];
  }
  if (args.seqused_k != nullptr) s.k_count = min(s.k_count, args.seqused_k[b]);
  s.pages = nullptr;
  if (args.block_table != nullptr) s.pages = args.block_table + b * args.block_table_stride;
  const bool apart = args.block_table == nullptr;
  s.k_batch = apart ? b * args.k.batch_stride : 0;
  s.v_batch = apart ? b * args.v.batch_stride : 0;
  return s;
}

// Keys [begin, end).
struct KeyRange {
  int begin, end;
};

// The window of each query, on a scale that cannot overflow: of at most 2^30 keys.
struct Window {
  int left, right;

  // Keys that some query of [first, last] of a sequence sees.
  __device__ __forceinline__ KeyRange seen(const Sequence& s, int first, int last) const {
    const int offset = s.k_count - s.q_count;
    const int end = max(min(last + offset + 1 + right, s.k_count), 0);
    return {min(max(first + offset - left, 0), end), end};
  }
};

// ---- Matrix instructions -----------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t word) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (sizeof(T) == 2 && std::is_same<T, __half>::value) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// sum[16 x 8] += a[16 x 16] b[16 x 8].
template <typename T>
__device__ __forceinline__ void multiply_16x8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
#define ROCM_KERNELS_MMA(TYPE)                                                        \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same<T, __half>::value) {
    ROCM_KERNELS_MMA("f16");
  } else {
    ROCM_KERNELS_MMA("bf16");
  }
#undef ROCM_KERNELS_MMA
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- The end of a row --------------------------------------------------------------------------

__device__ __forceinline__ float sink_of(const AttentionArgs& args, int head) {
  if (args.sink_dtype == DType::kFloat32) return static_cast<const float*>(args.sinks)[head];
  if (args.sink_dtype == DType::kFloat16) {
    return __half2float(static_cast<const __half*>(args.sinks)[head]);
  }
  return __bfloat162float(static_cast<const __nv_bfloat16*>(args.sinks)[head]);
}

// Element `column` of out for query `q_row` of sequence b: `value` of sums on the scale of
// `most` (log2), of which `total` is the sum of exponentials. Column 0 stores lse.
template <typename Q>
__device__ __forceinline__ void finish_element(const AttentionArgs& args, int b, int q_begin,
                                               int q_row, int head, int column, float most,
                                               float total, float value, float v_descale) {
  if (args.sinks != nullptr) {
    const float sink = sink_of(args, head) * kLog2E;
    const float both = fmaxf(most, sink);
    if (both > -CUDART_INF_F) {
      const float by = exp2_fast(most - both);
      total = total * by + exp2_fast(sink - both);
      value *= by;
      most = both;
    }
  }
  const int64_t own = args.cu_seqlens_q == nullptr ? b : 0;
  if (column == 0 && args.lse != nullptr) {
    args.lse[own * args.lse_batch_stride + head * args.lse_head_stride + q_begin + q_row] =
        total > 0 ? (most + log2f(total)) / kLog2E : -CUDART_INF_F;
  }
  const float result = total > 0 ? __fdividef(value, total) * v_descale : total == 0 ? 0.0f : total;
  static_cast<Q*>(args.out)[own * args.out_batch_stride + (q_begin + q_row) * args.out_row_stride +
                            head * args.out_head_stride + column] = static_cast<Q>(result);
}

}  // namespace cuda
}  // namespace rocm_kernels
