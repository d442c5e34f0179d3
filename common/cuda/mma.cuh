// mma.sync, and how bytes become its fragments. sm_80 and later.
//
// w is the 16-row operand of mma.m16n8k16 and a its 8 columns, so that a lane (group = lane / 4,
// quad = lane % 4) feeds rows `group` and `group + 8` of w and row `group` of a. The order of K
// inside an mma is free as long as both operands agree on it: a lane's 16 consecutive bytes of a
// row are taken to be the K elements that the lane must supply, and one 16-byte load fills its
// registers for several mma without any shuffle.
//
// FP8 is widened to float16, exactly, and multiplied there: on sm_90 and sm_100 the FP8 form of
// mma.sync is compiled to the same two steps, and where an FP8 unit exists it accumulates in fewer
// bits than float32.
#pragma once

#include "../core/dtype.h"
#include "widen.cuh"

namespace rocm_kernels {
namespace cuda {

constexpr int kMmaM = 8;   // rows of a of one mma, its columns
constexpr int kMmaN = 16;  // rows of w of one mma, its rows

// The two element types of a product, and what one 16-byte load of w amounts to.
template <DType kADType, DType kWDType>
struct MmaTypes {
  static constexpr DType kA = kADType;
  static constexpr DType kW = kWDType;
  static constexpr bool kFp8A = is_fp8(kA);
  static constexpr bool kFp8W = is_fp8(kW);
  static constexpr int kABytes = size_of(kA);
  static constexpr int kWBytes = size_of(kW);
  static constexpr bool kWideA = !kFp8A && kFp8W;
  static constexpr bool kBFloat = kA == DType::kBFloat16;
  static constexpr int kVectorElements = 16 / kWBytes;     // K elements in 16 bytes of w
  static constexpr int kVectorMmas = kVectorElements / 4;  // mma fed by them: a lane gives 4 each
  static constexpr int kAVectors = kWideA ? 2 : 1;         // 16-byte loads of a beside them
  static_assert(kA != DType::kFloat8E4M3FNUZ && kW != DType::kFloat8E4M3FNUZ,
                "MmaTypes: e4m3fn alone is widened; e4m3fnuz goes to a plain kernel");
  static_assert(is_fp8(kW) || kA == kW, "16-bit weights take activations of the same type");
};

// One lane's share of the K side of kMmas products: two registers of two elements for each.
template <int kMmas>
struct Fragment {
  uint32_t pair[kMmas][2];
};

template <class Types>
__device__ __forceinline__ Fragment<Types::kVectorMmas> widen_w(const uint4& vector) {
  Fragment<Types::kVectorMmas> fragment;
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < Types::kVectorMmas; ++i) {
    if constexpr (Types::kFp8W) {
      halves_from_fp8(words[i], fragment.pair[i][0], fragment.pair[i][1]);
      if constexpr (Types::kBFloat) {
        fragment.pair[i][0] = bfloats_from_halves(fragment.pair[i][0]);
        fragment.pair[i][1] = bfloats_from_halves(fragment.pair[i][1]);
      }
    } else {
      fragment.pair[i][0] = words[2 * i];
      fragment.pair[i][1] = words[2 * i + 1];
    }
  }
  return fragment;
}

template <class Types>
__device__ __forceinline__ Fragment<Types::kVectorMmas> widen_a(
    const uint4 (&vectors)[Types::kAVectors]) {
  if constexpr (Types::kFp8A == Types::kFp8W) {
    return widen_w<Types>(vectors[0]);
  } else {
    Fragment<Types::kVectorMmas> fragment;
#pragma unroll
    for (int v = 0; v < Types::kAVectors; ++v) {
      fragment.pair[2 * v][0] = vectors[v].x;
      fragment.pair[2 * v][1] = vectors[v].y;
      fragment.pair[2 * v + 1][0] = vectors[v].z;
      fragment.pair[2 * v + 1][1] = vectors[v].w;
    }
    return fragment;
  }
}

// sum[16 x 8] += a[16 x 16] b[16 x 8], in bfloat16 or float16: the one place that has mma.sync. a:
// the registers of rows `group`, `group + 8` for the lower half of k, then for the upper.
template <bool kBFloat>
__device__ __forceinline__ void multiply_16x8(float (&sum)[4], uint32_t a0, uint32_t a1,
                                              uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#define ROCM_KERNELS_MMA(TYPE)                                                        \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (kBFloat) {
    ROCM_KERNELS_MMA("bf16");
  } else {
    ROCM_KERNELS_MMA("f16");
  }
#undef ROCM_KERNELS_MMA
}

// sum[0..1]: row `group` of w, rows 2 * quad and 2 * quad + 1 of a; sum[2..3]: row `group + 8` of
// w.
template <class Types>
__device__ __forceinline__ void mma(float (&sum)[4], const Fragment<Types::kVectorMmas>& w_low,
                                    const Fragment<Types::kVectorMmas>& w_high,
                                    const Fragment<Types::kVectorMmas>& a) {
#pragma unroll
  for (int i = 0; i < Types::kVectorMmas; ++i) {
    multiply_16x8<Types::kBFloat>(sum, w_low.pair[i][0], w_high.pair[i][0], w_low.pair[i][1],
                                  w_high.pair[i][1], a.pair[i][0], a.pair[i][1]);
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
