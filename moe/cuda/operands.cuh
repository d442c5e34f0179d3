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
namespace cuda {

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
    const uint32_t bits = exponent == 255 ? 0x7FC0u : exponent == 0 ? 0x0040u : exponent << 7;
    scale = bits << 16 | bits;
  }
  // 16 of the 32 elements.
  __device__ __forceinline__ Fragment<4> fragment(int part) const {
    Fragment<4> result;
    const uint32_t words[2] = {part == 0 ? codes.x : codes.z, part == 0 ? codes.y : codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t four = words[i / 2] >> (i % 2 * 16);
      // A code's low three bits look up the bytes of its magnitude: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
      const uint32_t select = four & 0x7777u;
      const uint32_t low = __byte_perm(0xC0800000u, 0xC0804000u, select);
      const uint32_t high = __byte_perm(0x3F3F3F00u, 0x40404040u, select);
      const uint32_t first =
          __byte_perm(low, high, 0x5140) | (four << 12 & 0x8000u) | (four << 24 & 0x80000000u);
      const uint32_t second =
          __byte_perm(low, high, 0x7362) | (four << 4 & 0x8000u) | (four << 16 & 0x80000000u);
      result.pair[i][0] = scaled(first);
      result.pair[i][1] = scaled(second);
    }
    return result;
  }

 private:
  __device__ __forceinline__ uint32_t scaled(uint32_t pair) const {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                           *reinterpret_cast<const __nv_bfloat162*>(&scale));
    return *reinterpret_cast<const uint32_t*>(&product);
  }
};

}  // namespace cuda
}  // namespace rocm_kernels
