// The kernels of moe/cpu/product.cpp, for one instruction set (see common/cpu/isa.h): those of few
// rows, and MXFP4 to bfloat16, which holds every value of it. No include guard.

#include "../../blocks/product/cpu/few_rows_body.h"

// One block of 32 values, by the definition; scale 255 is NaN.
static void decode_mx_block(const uint8_t* codes, int scale, BFloat16* out) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float power = scale == 255 ? __builtin_nanf("") : __builtin_ldexpf(1.0f, scale - 127);
  for (int64_t i = 0; i < kMxScaleBlock; ++i) {
    const int code = codes[i / 2] >> (i % 2 * 4) & 0xF;
    const float magnitude = kMagnitudes[code & 7] * power;
    out[i] = to_bfloat16(code & 8 ? -magnitude : magnitude);
  }
}

#if ROCM_KERNELS_CPU_AVX512
// Bits of the bfloat16 of each code.
struct MxToBF16 {
  alignas(64) uint16_t bits[32];
  constexpr MxToBF16() : bits() {
    constexpr uint16_t kMagnitudes[8] = {0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0};
    for (int code = 0; code < 32; ++code) {
      bits[code] = static_cast<uint16_t>(kMagnitudes[code & 7] | (code & 8) << 12);
    }
  }
};
constexpr MxToBF16 kMxToBF16;
#endif

// A row of k values, a multiple of kMxScaleBlock.
static void decode_mx_row(const uint8_t* codes, const uint8_t* scales, int64_t k, BFloat16* out) {
  for (int64_t block = 0; block * kMxScaleBlock < k; ++block) {
    const uint8_t* const block_codes = codes + block * kMxScaleBlock / 2;
    BFloat16* const block_out = out + block * kMxScaleBlock;
#if ROCM_KERNELS_CPU_AVX512
    // A scale adds to the exponent field, away from its ends, of all but zeros.
    if (scales[block] > 1 && scales[block] < 252) {
      const __m256i pairs =
          _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block_codes)));
      const __m256i nibbles =
          _mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi16(0xF)),
                          _mm256_and_si256(_mm256_slli_epi16(pairs, 4), _mm256_set1_epi16(0xF00)));
      const __m512i values = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(nibbles),
                                                      _mm512_load_si512(kMxToBF16.bits));
      const __mmask32 nonzero = _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7FFF));
      const __m512i shift = _mm512_set1_epi16(static_cast<int16_t>((scales[block] - 127) * 128));
      _mm512_storeu_si512(block_out, _mm512_mask_add_epi16(values, nonzero, values, shift));
      continue;
    }
#endif
    decode_mx_block(block_codes, scales[block], block_out);
  }
}
