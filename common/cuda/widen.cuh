// Narrow weights to the 16 bits that tensor cores multiply, exactly: FP8 (e4m3fn) to float16 or
// bfloat16, MXFP4 (e2m1 and a power of two for each 32 elements) to bfloat16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

// Four FP8 codes to two pairs of float16, in order.
__device__ __forceinline__ void halves_from_fp8(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  // The code's fields placed in a float16 leave its exponent 8 too small; 2^8 restores it and makes
  // subnormals normal. 480 is what the code of NaN would mean.
  const auto widen = [](uint32_t spread) {
    const uint32_t placed = (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 1);
    const __half2 value =
        __hmul2(*reinterpret_cast<const __half2*>(&placed), __float2half2_rn(256.0f));
    return *reinterpret_cast<const uint32_t*>(&value) |
           __hgt2_mask(__habs2(value), __float2half2_rn(448.0f));
  };
  low = widen((codes & 0xFFu) << 8 | (codes & 0xFF00u) << 16);
  high = widen((codes & 0xFF0000u) >> 8 | (codes & 0xFF000000u));
#endif
}

__device__ __forceinline__ uint32_t bfloats_from_halves(uint32_t halves) {
  const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  const __nv_bfloat162 narrow = __float22bfloat162_rn(wide);
  return *reinterpret_cast<const uint32_t*>(&narrow);
}

// MXFP4's scale by its code (E8M0), as two bfloat16: 2^(code - 127), of which 0 is subnormal and
// 255 a NaN.
__device__ __forceinline__ uint32_t bfloats_of_exponent(uint32_t code) {
  const uint32_t bits = code == 255 ? 0x7FC0u : code == 0 ? 0x0040u : code << 7;
  return bits << 16 | bits;
}

// Eight e2m1 codes times `scale`, two bfloat16, in order. A code's exponent and mantissa placed in
// a bfloat16 are 2^126 too small, and its subnormal is one there too.
__device__ __forceinline__ void bfloats_from_fp4(uint32_t codes, uint32_t scale,
                                                 uint32_t (&pairs)[4]) {
  constexpr uint32_t kMagnitudes = 0x01C001C0u, kSigns = 0x80008000u, kPlace = 0x7E807E80u;
  const auto times = [](uint32_t pair, uint32_t factor) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                           *reinterpret_cast<const __nv_bfloat162*>(&factor));
    return *reinterpret_cast<const uint32_t*>(&product);
  };
  // Codes i and i + 4.
  const uint32_t placed[4] = {
      (codes << 6 & kMagnitudes) | (codes << 12 & kSigns),
      (codes << 2 & kMagnitudes) | (codes << 8 & kSigns),
      (codes >> 2 & kMagnitudes) | (codes << 4 & kSigns),
      (codes >> 6 & kMagnitudes) | (codes & kSigns),
  };
  uint32_t apart[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) apart[i] = times(times(placed[i], kPlace), scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs[i] = __byte_perm(apart[2 * i], apart[2 * i + 1], 0x5410);
    pairs[i + 2] = __byte_perm(apart[2 * i], apart[2 * i + 1], 0x7632);
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
