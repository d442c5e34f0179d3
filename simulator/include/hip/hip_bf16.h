// __hip_bfloat16 for distributions whose HIP does not have it yet: ROCm's own header comes first
// where there is one. One value and two of them, conversions and arithmetic in f32.
#pragma once
#include <hip/hip_runtime.h>

struct __hip_bfloat16 {
  unsigned short data;
  __hip_bfloat16() = default;
  __host__ __device__ __hip_bfloat16(float x) {
    unsigned bits = __builtin_bit_cast(unsigned, x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    unsigned rounded = bits + 0x7fffu + (bits >> 16 & 1u);  // to the nearest, ties to even
    data = static_cast<unsigned short>(nan ? bits >> 16 | 64u : rounded >> 16);
  }
  __host__ __device__ operator float() const {
    return __builtin_bit_cast(float, static_cast<unsigned>(data) << 16);
  }
};
struct __hip_bfloat162 {
  __hip_bfloat16 x, y;
};

__host__ __device__ inline __hip_bfloat16 __float2bfloat16(float x) { return x; }
__host__ __device__ inline float __bfloat162float(__hip_bfloat16 x) { return x; }
__host__ __device__ inline __hip_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {x, y};
}
__host__ __device__ inline __hip_bfloat162 __bfloat162bfloat162(__hip_bfloat16 x) { return {x, x}; }
__host__ __device__ inline float2 __bfloat1622float2(__hip_bfloat162 v) { return {v.x, v.y}; }
__host__ __device__ inline __hip_bfloat16 __low2bfloat16(__hip_bfloat162 v) { return v.x; }
__host__ __device__ inline __hip_bfloat16 __high2bfloat16(__hip_bfloat162 v) { return v.y; }

#define SIMULATOR_BF16(name, op)                                                                  \
  __host__ __device__ inline __hip_bfloat16 __h##name(__hip_bfloat16 a, __hip_bfloat16 b) {       \
    return __hip_bfloat16(float(a) op float(b));                                                  \
  }                                                                                               \
  __host__ __device__ inline __hip_bfloat162 __h##name##2(__hip_bfloat162 a, __hip_bfloat162 b) { \
    return {__hip_bfloat16(float(a.x) op float(b.x)), __hip_bfloat16(float(a.y) op float(b.y))};  \
  }
SIMULATOR_BF16(add, +)
SIMULATOR_BF16(sub, -)
SIMULATOR_BF16(mul, *)
#undef SIMULATOR_BF16
