// A line of K of a 32 x 32 part, by the largest matrix instructions: they need half the LDS reads
// of 16 x 16.
//
// The product does not care how k is permuted as long as a and w are permuted alike. So a lane
// reads 16 contiguous bytes of a row and gives them to the instruction in whatever order they come.
#pragma once

#include "../../../common/cdna/mfma.h"
#include "tile.h"

namespace rocm_kernels::cdna {

constexpr int kPart = 32;                       // edge of a matrix instruction's result
constexpr int kPartSums = kPart * kPart / 64;   // sums of a part in a lane
constexpr int kLineFragments = kLine / 2 / 16;  // reads of 16 bytes by a lane for a part's line

using PartSums = float __attribute__((ext_vector_type(kPartSums)));

#if ROCM_KERNELS_CDNA

// sums += w . a over a line, or over a part of it by kCount fragments a lane: rows of w go down the
// result, rows of a across. Lane l then holds column l % 32 (a row of a), and in register r row 8 *
// (r / 4) + 4 * (l / 32) + r % 4 (a row of w): four neighbours of a row of out lie in four
// registers.
template <MmaKind kKind, int kCount>
ROCM_KERNELS_DEVICE PartSums mma_line(const Words (&w)[kCount], const Words (&a)[kCount],
                                      PartSums sums) {
  constexpr bool kFp8 = kKind == MmaKind::kFp8;
  constexpr bool kBFloat = kKind == MmaKind::kBFloat16 || kKind == MmaKind::kBFloat16Fp8;
#if defined(__gfx950__)
  if constexpr (kFp8) {
    // 64 elements of k an instruction, 32 bytes a lane; unit block scales (0 means none).
    const auto join = [](Words x, Words y) {
      return __builtin_bit_cast(int __attribute__((ext_vector_type(8))),
                                __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7));
    };
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      sums = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(
          join(w[i], w[i + 1]), join(a[i], a[i + 1]), sums, 0, 0, 0, 0, 0, 0);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kBFloat) {
        sums = __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(detail::BFloat8, w[i]),
                                                       __builtin_bit_cast(detail::BFloat8, a[i]),
                                                       sums, 0, 0, 0);
      } else {
        sums = __builtin_amdgcn_mfma_f32_32x32x16_f16(__builtin_bit_cast(detail::Half8, w[i]),
                                                      __builtin_bit_cast(detail::Half8, a[i]), sums,
                                                      0, 0, 0);
      }
    }
  }
#else
  const auto mma = [](detail::Words2 x, detail::Words2 y, PartSums part) {
    if constexpr (kFp8) {
      return __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(__builtin_bit_cast(long, x),
                                                        __builtin_bit_cast(long, y), part, 0, 0, 0);
    } else if constexpr (kBFloat) {
      return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(detail::Short4, x),
                                                      __builtin_bit_cast(detail::Short4, y), part,
                                                      0, 0, 0);
    } else {
      return __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(detail::Half4, x),
                                                  __builtin_bit_cast(detail::Half4, y), part, 0, 0,
                                                  0);
    }
  };
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums = mma(detail::low(w[i]), detail::low(a[i]), sums);
    sums = mma(detail::high(w[i]), detail::high(a[i]), sums);
  }
#endif
  return sums;
}

#endif

}  // namespace rocm_kernels::cdna
