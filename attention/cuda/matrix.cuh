// Fragments that ldmatrix loads from shared memory, and what is made of them in registers. sm_80
// and later.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../../common/cuda/mma.cuh"

namespace rocm_kernels {
namespace cuda {

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

// The exponent, biased by 127, of the power of two that a bfloat16 row with that largest element is
// divided by to become float16: the largest then lies in [2^13, 2^14).
__device__ __forceinline__ uint32_t exponent_for_halves(float largest) {
  const uint32_t exponent = max(__float_as_uint(largest) >> 23, 14u) - 13;
  return exponent > 241 ? 127 : exponent;  // infinite, or NaN
}

// sum[16 x 8] += a[16 x 16] b[16 x 8] of type T.
template <typename T>
__device__ __forceinline__ void multiply_16x8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  multiply_16x8<!std::is_same<T, __half>::value>(sum, a[0], a[1], a[2], a[3], b0, b1);
}

}  // namespace cuda
}  // namespace rocm_kernels
