// MXFP4 in registers: four bits times a power of two, which bfloat16 holds exactly.
#pragma once

#include "../../common/cdna/buffer.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// 2^(exponent - 127), NaN for 255: an E8M0 byte.
ROCM_KERNELS_DEVICE float e8m0_scale(uint32_t exponent) {
  const uint32_t bits = exponent == 255 ? 0x7FC00000u
                        : exponent == 0 ? 0x00400000u
                                        : exponent << 23;
  return __builtin_bit_cast(float, bits);
}

// Eight codes, the first in the low bits, times e8m0_scale(), as bfloat16.
ROCM_KERNELS_DEVICE Words decode_mxfp4(uint32_t codes, float scale) {
  Words words;
#if defined(__gfx950__)
  // The instruction goes by the scale's exponent alone, so NaN is put in afterwards.
  const uint32_t nan = scale != scale ? 0x7FC07FC0u : 0;
  words[0] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 0));
  words[1] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 1));
  words[2] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 2));
  words[3] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 3));
  return words | Words{nan, nan, nan, nan};
#else
  // A code's low three bits look up the upper byte of its magnitude in float16, whose lower byte
  // is 0 for each: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  constexpr uint32_t kFirst = 0x3E3C3800u, kLast = 0x46444240u;
  const uint32_t even =
      __builtin_amdgcn_perm(kLast, kFirst, codes & 0x07070707u) | (codes << 4 & 0x80808080u);
  const uint32_t odd =
      __builtin_amdgcn_perm(kLast, kFirst, codes >> 4 & 0x07070707u) | (codes & 0x80808080u);
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t select = 0x040C000Cu + pair * 0x01000100u;  // 0x0C: a byte of zeros
    const auto halves = __builtin_bit_cast(Half2, __builtin_amdgcn_perm(odd, even, select));
    // float16 to float32 and the product in one instruction, which is a multiply-add.
    const float low = __builtin_fmaf(static_cast<float>(halves[0]), scale, 0.0f);
    const float high = __builtin_fmaf(static_cast<float>(halves[1]), scale, 0.0f);
    words[pair] = __builtin_amdgcn_perm(__builtin_bit_cast(uint32_t, high),
                                        __builtin_bit_cast(uint32_t, low), 0x07060302u);
  }
  return words;
#endif
}

#endif

}  // namespace rocm_kernels::cdna
