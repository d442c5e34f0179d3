// Four vectors at a time, which the loops over a row's columns work on; included by a kernel's
// body, and vector.h with it.
//
//   load_block<Order>(p)             kBlock elements at p
//   load_block<Order>(p, n)          the first n < kBlock of them; the others are 0
//   store_block<Order>(p, block)     as `store` of vector.h; to FP8: saturates, keeps NaN,
//   store_block<Order>(p, block, n)  and returns nothing
//   all(s)                           s in every lane; the operations of F32 work on blocks too
//
// In which vectors and lanes the columns of a block lie is free, as long as all blocks agree that
// meet in one computation: Order, the element type of the input, decides it. AVX-512 splits
// bfloat16 into even and odd columns, because a shift and a mask do that to 32 of them, where
// columns in order cost a permutation and a shift for each 16.
//
// FP8 is rounded by the float adder. Adding 2^(e + 20) to a magnitude of exponent e leaves an ulp
// of 2^(e - 3), FP8's step there; below the smallest normal FP8 number e stays, and so does the
// step. With the code of 2^e, less 8, in the low bits of that addend, the sum's low byte is the
// code.

#include "../../../common/cpu/vector.h"

constexpr int kVectors = 4;
constexpr int kBlock = kVectors * kLanes;

struct Block {
  F32 v[kVectors];
};

// Arithmetic vector by vector: four independent chains of operations side by side keep the
// pipelines busy, where one chain after the other would wait for its own results.
#define ROCM_KERNELS_EACH_VECTOR(expression)                   \
  Block result;                                                \
  for (int i = 0; i < kVectors; ++i) result.v[i] = expression; \
  return result

ROCM_KERNELS_VECTOR Block all(float scalar) { ROCM_KERNELS_EACH_VECTOR(set1(scalar)); }
ROCM_KERNELS_VECTOR Block operator-(const Block& a) { ROCM_KERNELS_EACH_VECTOR(-a.v[i]); }
ROCM_KERNELS_VECTOR Block operator+(const Block& a, const Block& b) {
  ROCM_KERNELS_EACH_VECTOR(a.v[i] + b.v[i]);
}
ROCM_KERNELS_VECTOR Block operator-(const Block& a, const Block& b) {
  ROCM_KERNELS_EACH_VECTOR(a.v[i] - b.v[i]);
}
ROCM_KERNELS_VECTOR Block operator*(const Block& a, const Block& b) {
  ROCM_KERNELS_EACH_VECTOR(a.v[i] * b.v[i]);
}
ROCM_KERNELS_VECTOR Block operator/(const Block& a, const Block& b) {
  ROCM_KERNELS_EACH_VECTOR(a.v[i] / b.v[i]);
}
ROCM_KERNELS_VECTOR Block fma(const Block& a, const Block& b, const Block& c) {
  ROCM_KERNELS_EACH_VECTOR(fma(a.v[i], b.v[i], c.v[i]));
}
ROCM_KERNELS_VECTOR Block clamp(const Block& a, float limit) {
  ROCM_KERNELS_EACH_VECTOR(clamp(a.v[i], limit));
}
ROCM_KERNELS_VECTOR Block round_nearest(const Block& a) {
  ROCM_KERNELS_EACH_VECTOR(round_nearest(a.v[i]));
}
ROCM_KERNELS_VECTOR Block max_magnitude(const Block& a, const Block& largest) {
  ROCM_KERNELS_EACH_VECTOR(max_magnitude(a.v[i], largest.v[i]));
}
ROCM_KERNELS_VECTOR Block where_negative(const Block& test, const Block& a, const Block& b) {
  ROCM_KERNELS_EACH_VECTOR(where_negative(test.v[i], a.v[i], b.v[i]));
}
ROCM_KERNELS_VECTOR Block times_power_of_two(const Block& a, const Block& n) {
  ROCM_KERNELS_EACH_VECTOR(times_power_of_two(a.v[i], n.v[i]));
}

#undef ROCM_KERNELS_EACH_VECTOR

ROCM_KERNELS_VECTOR float sum(const Block& a) { return sum((a.v[0] + a.v[1]) + (a.v[2] + a.v[3])); }
ROCM_KERNELS_VECTOR float largest(const Block& magnitudes) {
  F32 result = magnitudes.v[0];
  for (int i = 1; i < kVectors; ++i) result = max_magnitude(magnitudes.v[i], result);
  return largest(result);
}

template <bool kFnuz>
struct Fp8Rounding {
  static constexpr uint32_t kLargest = kFnuz ? 0x43700000 : 0x43E00000;  // 240, 448
  static constexpr uint32_t kSmallestExponent = kFnuz ? 127 - 7 : 127 - 6;
  static constexpr uint32_t kSmallestNormal = kSmallestExponent << 23;
  static constexpr uint32_t kExponentMask = 0x7F800000;
  static constexpr uint32_t kNan = kFnuz ? 0x80 : 0x7F;

  // Bits of the addend for the exponent bits of a magnitude.
  static constexpr uint32_t addend(uint32_t exponent_bits) {
    return exponent_bits + (exponent_bits >> 20) + (20u << 23) - (kSmallestExponent << 3);
  }
};

#if ROCM_KERNELS_CPU_AVX512
#include "block_avx512.h"
#else

#if ROCM_KERNELS_CPU_AVX2

template <bool kFnuz>
ROCM_KERNELS_VECTOR void store(Float8E4M3<kFnuz>* p, F32 v) {
  using Rounding = Fp8Rounding<kFnuz>;
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i magnitude = _mm256_min_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)),
                                             _mm256_set1_epi32(Rounding::kLargest));
  const __m256i exponent =
      _mm256_max_epi32(_mm256_and_si256(magnitude, _mm256_set1_epi32(Rounding::kExponentMask)),
                       _mm256_set1_epi32(Rounding::kSmallestNormal));
  const __m256i addend =
      _mm256_add_epi32(_mm256_add_epi32(exponent, _mm256_srli_epi32(exponent, 20)),
                       _mm256_set1_epi32(Rounding::addend(0)));
  const __m256i sum = _mm256_castps_si256(
      _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(addend)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i code = _mm256_blendv_epi8(_mm256_and_si256(sum, _mm256_set1_epi32(0x7F)),
                                          _mm256_set1_epi32(Rounding::kNan), nan);
  __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  if (kFnuz) {  // has no -0: its bits mean NaN
    sign = _mm256_andnot_si256(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()), sign);
  }
  const __m128i halves = narrow_to_16(_mm256_or_si256(sign, code));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}

#elif ROCM_KERNELS_CPU_NEON

template <bool kFnuz>
ROCM_KERNELS_VECTOR void store(Float8E4M3<kFnuz>* p, F32 v) {
  using Rounding = Fp8Rounding<kFnuz>;
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t magnitude =
      vminq_u32(vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF)), vdupq_n_u32(Rounding::kLargest));
  const uint32x4_t exponent = vmaxq_u32(vandq_u32(magnitude, vdupq_n_u32(Rounding::kExponentMask)),
                                        vdupq_n_u32(Rounding::kSmallestNormal));
  const uint32x4_t addend =
      vaddq_u32(vsraq_n_u32(exponent, exponent, 20), vdupq_n_u32(Rounding::addend(0)));
  const uint32x4_t sum = vreinterpretq_u32_f32(
      vaddq_f32(vreinterpretq_f32_u32(magnitude), vreinterpretq_f32_u32(addend)));
  const uint32x4_t code =
      vbslq_u32(vceqq_f32(v, v), vandq_u32(sum, vdupq_n_u32(0x7F)), vdupq_n_u32(Rounding::kNan));
  uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80));
  if (kFnuz) sign = vandq_u32(sign, vtstq_u32(code, code));  // has no -0: its bits mean NaN
  const uint16x4_t halves = vmovn_u32(vorrq_u32(sign, code));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
  const uint32_t word = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  __builtin_memcpy(p, &word, sizeof(word));
}

#else

template <bool kFnuz>
ROCM_KERNELS_VECTOR void store(Float8E4M3<kFnuz>* p, F32 v) {
  p->bits = fp8_from_float<kFnuz>(v);
}

#endif

template <class Order, class T>
ROCM_KERNELS_VECTOR Block load_block(const T* p) {
  Block block;
  for (int i = 0; i < kVectors; ++i) block.v[i] = load(p + i * kLanes);
  return block;
}

template <class Order, class T>
ROCM_KERNELS_VECTOR Block store_block(T* p, const Block& block) {
  Block stored;
  for (int i = 0; i < kVectors; ++i) stored.v[i] = store(p + i * kLanes, block.v[i]);
  return stored;
}

template <class Order, bool kFnuz>
ROCM_KERNELS_VECTOR void store_block(Float8E4M3<kFnuz>* p, const Block& block) {
  for (int i = 0; i < kVectors; ++i) store(p + i * kLanes, block.v[i]);
}

#endif

// The remainder of a row goes through a small array.
template <class Order, class T>
ROCM_KERNELS_VECTOR Block load_block(const T* p, int n) {
  T columns[kBlock] = {};
  __builtin_memcpy(columns, p, n * sizeof(T));
  return load_block<Order>(columns);
}

template <class Order, class T>
ROCM_KERNELS_VECTOR Block store_block(T* p, const Block& block, int n) {
  T columns[kBlock];
  const Block stored = store_block<Order>(columns, block);
  __builtin_memcpy(p, columns, n * sizeof(T));
  return stored;
}

template <class Order, bool kFnuz>
ROCM_KERNELS_VECTOR void store_block(Float8E4M3<kFnuz>* p, const Block& block, int n) {
  Float8E4M3<kFnuz> columns[kBlock];
  store_block<Order>(columns, block);
  __builtin_memcpy(p, columns, n);
}
