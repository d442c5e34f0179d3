// The operands of a grouped product on NVIDIA GPUs: those of common/cuda/mma.cuh, and MXFP4 weights
// of a bfloat16 a.
//
// A step of K is 64 bytes of w, 16 a lane. Of MXFP4 these are 32 elements, which share one scale:
// a lane multiplies them by it as it makes bfloat16 of them, exactly, and in two parts, for sums of
// more than 64 elements of K would lose bits (tiled.cuh).
#pragma once

#include "../../common/cuda/mma.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../gpu/problem.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda::moe {

template <DType kADType, DType kWDType>
struct GroupedTypes : MmaTypes<kADType, kWDType> {
  static constexpr int kStepElements = kMoeStepBytes / MmaTypes<kADType, kWDType>::kWBytes;
  static constexpr int kPacked = 1;  // elements of w in one of its dtype
  static constexpr int kParts = 1;   // of a step, whose sums are added apart
};

struct Mxfp4Types {
  static constexpr int kABytes = 2, kWBytes = 1;
  static constexpr bool kFp8A = false, kFp8W = true;  // a takes more vectors than w: widen_a()
  static constexpr bool kBFloat = true;
  static constexpr int kVectorMmas = 4;  // of a part
  static constexpr int kAVectors = 2;    // of a part
  static constexpr int kStepElements = 2 * kMoeStepBytes;
  static constexpr int kPacked = 2;
  static constexpr int kParts = 2;
};

// The exponent (E8M0) of the 32 elements that are number `block` of a row of w; MXFP4 alone has
// one. By the byte from memory: a row's lie in one or two lines, which stay in L1.
template <class Types>
__device__ __forceinline__ uint32_t exponent_code(const GroupedProblem& p, int expert, int row,
                                                  int block) {
  if constexpr (Types::kPacked == 1) return 0;
  if (row < 0 || block * static_cast<int>(kMxScaleBlock) >= p.k) return 127;
  return p.w.mx_scales[expert * p.w.mx_expert_stride + row * p.w.mx_row_stride + block];
}

// A lane's 16 bytes of a row of w, from shared memory, and their exponent.
template <class Types>
struct WeightVector {
  uint4 codes;

  __device__ __forceinline__ void load(uint32_t from, uint32_t) { codes = load_shared(from); }
  __device__ __forceinline__ Fragment<Types::kVectorMmas> fragment(int) const {
    return widen_w<Types>(codes);
  }
};

template <>
struct WeightVector<Mxfp4Types> {
  uint4 codes;
  uint32_t scale;  // two bfloat16

  __device__ __forceinline__ void load(uint32_t from, uint32_t exponent) {
    codes = load_shared(from);
    scale = bfloats_of_exponent(exponent);
  }
  // 16 of the 32 elements.
  __device__ __forceinline__ Fragment<4> fragment(int part) const {
    Fragment<4> result;
    const uint32_t words[2] = {part == 0 ? codes.x : codes.z, part == 0 ? codes.y : codes.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[4];
      bfloats_from_fp4(words[i], scale, pairs);
#pragma unroll
      for (int j = 0; j < 4; ++j) result.pair[2 * i + j / 2][j % 2] = pairs[j];
    }
    return result;
  }
};

}  // namespace cuda::moe
}  // namespace rocm_kernels
