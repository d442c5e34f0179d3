// How elements become what the multiplier takes, for one instruction set. Part of the bodies
// of the CPU products (see common/cpu/isa.h): no include guard.
//
// A multiplier works on operands, vectors of kWidth values that follow each other along K:
//   F32Multiplier   floats and FMA, on every machine
//   BF16Multiplier  bfloat16 pairs and VDPBF16PS, twice the rate; AVX-512 only
// Its dot(sum, a, w) adds the products to the float32 lanes of `sum`.
//
// A decoder Decode<Multiplier, Element> turns one chunk, kChunk = kParts * kWidth elements, into
// kParts operands, in an order of its own: a and w only have to agree on it. Its operands times
// kGain are the values. NaN codes become NaN, and no FP8 value becomes a subnormal number, which
// VDPBF16PS would take for zero, or the FMA where the caller flushes denormals.

#include "../../../common/cpu/vector.h"

template <bool kFnuz>
using Fp8 = Float8E4M3<kFnuz>;

struct F32Sums {
#if ROCM_KERNELS_CPU_PORTABLE
  // Several sums side by side: fewer additions follow each other, and so do their roundings.
  typedef float Sum __attribute__((vector_size(16)));
  static constexpr int kSumLanes = 4;
  static ROCM_KERNELS_VECTOR Sum zero() { return Sum{}; }
  static ROCM_KERNELS_VECTOR Sum add_scaled(Sum total, Sum sum, float scale) {
    return total + sum * scale;
  }
  static ROCM_KERNELS_VECTOR Sum load_sum(const float* p) {
    Sum sum;
    __builtin_memcpy(&sum, p, sizeof(sum));
    return sum;
  }
  static ROCM_KERNELS_VECTOR void store_sum(float* p, Sum sum) {
    __builtin_memcpy(p, &sum, sizeof(sum));
  }
  static ROCM_KERNELS_VECTOR float total(Sum lanes) {
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  }
#else
  using Sum = F32;
  static constexpr int kSumLanes = kLanes;
  static ROCM_KERNELS_VECTOR Sum zero() { return set1(0.0f); }
  static ROCM_KERNELS_VECTOR Sum add_scaled(Sum total, Sum sum, float scale) {
    return fma(sum, set1(scale), total);
  }
  static ROCM_KERNELS_VECTOR Sum load_sum(const float* p) { return load(p); }
  static ROCM_KERNELS_VECTOR void store_sum(float* p, Sum sum) { store(p, sum); }
  static ROCM_KERNELS_VECTOR float total(Sum lanes) { return sum(lanes); }
#endif
};

struct F32Multiplier : F32Sums {
  using Value = float;
  using Operand = Sum;
  static constexpr int kParts = kSumLanes == 4 ? 4 : 2;
  static constexpr int kWidth = kSumLanes;
  static constexpr int kChunk = kParts * kWidth;
  // Columns that share the loads of a. A tile takes kTileColumns * kMaxTileRows registers for sums,
  // one for each of its columns and one for a: of 16 with AVX2 and before, of 32 elsewhere.
#if ROCM_KERNELS_CPU_AVX512 || ROCM_KERNELS_CPU_NEON
  static constexpr int kTileColumns = 4;
#else
  static constexpr int kTileColumns = 2;
#endif
  // Enough sums in flight to hide the latency of FMA, few enough for the registers.
  static constexpr int direct_columns(int rows) { return rows == 1 ? 4 : 2; }

  static ROCM_KERNELS_VECTOR Operand load_operand(const Value* p) { return load_sum(p); }
  static ROCM_KERNELS_VECTOR void store_operand(Value* p, Operand v) { store_sum(p, v); }
  static ROCM_KERNELS_VECTOR Sum dot(Sum sum, Operand a, Operand w) {
#if ROCM_KERNELS_CPU_PORTABLE
    return sum + a * w;
#else
    return fma(a, w, sum);
#endif
  }
};

template <class Multiplier, class Element>
struct Decode;

// 16-bit types, by the loads of common/cpu/vector.h.
template <class Element>
struct Decode<F32Multiplier, Element> {
  static constexpr float kGain = 1.0f;
  static ROCM_KERNELS_VECTOR void chunk(const Element* p, F32Multiplier::Operand* operands) {
#if ROCM_KERNELS_CPU_PORTABLE
    float values[F32Multiplier::kChunk];
    for (int i = 0; i < F32Multiplier::kChunk; ++i) values[i] = load(p + i);
    for (int part = 0; part < F32Multiplier::kParts; ++part) {
      operands[part] = F32Multiplier::load_operand(values + part * F32Multiplier::kWidth);
    }
#else
    for (int part = 0; part < F32Multiplier::kParts; ++part) {
      operands[part] = load(p + part * kLanes);
    }
#endif
  }
};

#if !ROCM_KERNELS_CPU_NEON
// The bfloat16 of each FP8 magnitude, in two tables of bytes.
template <bool kFnuz>
struct Fp8ToBF16 {
  uint8_t low[128];
  uint8_t high[128];

  constexpr Fp8ToBF16() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      int exponent = (code >> 3) + 127 - (kFnuz ? 8 : 7), mantissa = code & 7;
      int bits = (exponent << 7) | (mantissa << 4);
      if (code == 0) {
        bits = 0;
      } else if (code < 8) {  // subnormal: mantissa / 8 * 2^(1 - bias)
        for (++exponent; mantissa < 8; mantissa *= 2) --exponent;
        bits = (exponent << 7) | ((mantissa & 7) << 4);
      } else if (code == 127 && !kFnuz) {
        bits = 0x7FC0;
      }
      low[code] = static_cast<uint8_t>(bits & 0xFF);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
#endif

// FP8 by way of float16, which has one exponent bit more: sign-extend, shift the mantissa into
// place, clear the copy of the sign that landed in the exponent. The exponent biases differ by 8
// (OCP) or 7 (FNUZ), which kGain restores; float16 subnormals convert exactly whatever the FP mode.
template <bool kFnuz>
struct Decode<F32Multiplier, Fp8<kFnuz>> {
#if ROCM_KERNELS_CPU_PORTABLE
  static constexpr float kGain = 1.0f;
  static constexpr Fp8ToBF16<kFnuz> kTable{};

  static ROCM_KERNELS_VECTOR float value(Fp8<kFnuz> element) {
    const uint32_t code = element.bits, magnitude = code & 0x7F;
    uint32_t bits = (code ^ magnitude) << 24 | static_cast<uint32_t>(kTable.high[magnitude]) << 24 |
                    static_cast<uint32_t>(kTable.low[magnitude]) << 16;
    if (kFnuz && code == 0x80) bits = 0x7FC00000u;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(bits));
    return value;
  }

  static ROCM_KERNELS_VECTOR void chunk(const Fp8<kFnuz>* p, F32Multiplier::Operand* operands) {
    for (int part = 0; part < F32Multiplier::kParts; ++part, p += F32Multiplier::kWidth) {
      operands[part] = F32Multiplier::Operand{value(p[0]), value(p[1]), value(p[2]), value(p[3])};
    }
  }
#else
  static constexpr float kGain = kFnuz ? 128.0f : 256.0f;
  static constexpr int kFields = 0xBFFF - 0x10000;
  static constexpr int kNanMask = kFnuz ? 0xFFFF - 0x10000 : 0x3F80;
  static constexpr int kNan = kFnuz ? 0x8000 - 0x10000 : 0x3F80;

#if ROCM_KERNELS_CPU_AVX512
  static ROCM_KERNELS_VECTOR void chunk(const Fp8<kFnuz>* p, F32 operands[2]) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
    __m512i halves = _mm512_and_si512(shifted, _mm512_set1_epi16(kFields));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(
        _mm512_and_si512(halves, _mm512_set1_epi16(kNanMask)), _mm512_set1_epi16(kNan));
    halves = _mm512_mask_mov_epi16(halves, nan, _mm512_set1_epi16(0x7FFF));
    operands[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    operands[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
#elif ROCM_KERNELS_CPU_AVX2
  static ROCM_KERNELS_VECTOR void chunk(const Fp8<kFnuz>* p, F32 operands[2]) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(kFields));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, _mm256_set1_epi16(kNanMask)),
                                           _mm256_set1_epi16(kNan));
    halves = _mm256_or_si256(halves, _mm256_srli_epi16(nan, 1));
    operands[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    operands[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
#else
  static ROCM_KERNELS_VECTOR void chunk(const Fp8<kFnuz>* p, F32 operands[4]) {
    const int8x16_t codes = vreinterpretq_s8_u8(vld1q_u8(&p->bits));
    const int16x8_t wide[2] = {vmovl_s8(vget_low_s8(codes)), vmovl_high_s8(codes)};
    for (int half = 0; half < 2; ++half) {
      int16x8_t halves = vandq_s16(vshlq_n_s16(wide[half], 7), vdupq_n_s16(kFields));
      const uint16x8_t nan = vceqq_s16(vandq_s16(halves, vdupq_n_s16(kNanMask)), vdupq_n_s16(kNan));
      halves = vorrq_s16(halves, vreinterpretq_s16_u16(vshrq_n_u16(nan, 1)));
      const float16x8_t floats = vreinterpretq_f16_s16(halves);
      operands[2 * half] = vcvt_f32_f16(vget_low_f16(floats));
      operands[2 * half + 1] = vcvt_high_f32_f16(floats);
    }
  }
#endif
#endif
};

#if ROCM_KERNELS_CPU_AVX512

struct BF16Multiplier : F32Sums {
  using Value = uint16_t;
  using Operand = __m512i;
  static constexpr int kParts = 2;
  static constexpr int kWidth = 32;
  static constexpr int kChunk = kParts * kWidth;
  static constexpr int kTileColumns = 4;
  static constexpr int direct_columns(int) { return 4; }

  static ROCM_KERNELS_VECTOR Operand load_operand(const Value* p) { return _mm512_loadu_si512(p); }
  static ROCM_KERNELS_VECTOR void store_operand(Value* p, Operand v) { _mm512_storeu_si512(p, v); }
  static ROCM_KERNELS_VECTOR F32 dot(F32 sum, Operand a, Operand w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)w);
  }
};

// Two table look-ups a byte, then the bytes are interleaved within each 128 bits: operand 0 has the
// lower 8 elements of each 16, operand 1 the upper 8.
template <bool kFnuz>
struct Decode<BF16Multiplier, Fp8<kFnuz>> {
  static constexpr float kGain = 1.0f;
  alignas(64) static constexpr Fp8ToBF16<kFnuz> kTable{};

  static ROCM_KERNELS_VECTOR void chunk(const Fp8<kFnuz>* p, __m512i operands[2]) {
    convert(_mm512_loadu_si512(p), operands);
  }

  static ROCM_KERNELS_VECTOR void convert(__m512i codes, __m512i operands[2]) {
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.low), codes,
                                           _mm512_load_si512(kTable.low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.high), codes,
                                            _mm512_load_si512(kTable.high + 64));
    constexpr int kAOrBAndC = 0xF8;  // a | (b & c): the look-up ignores the sign
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), kAOrBAndC);
    if (kFnuz) {  // NaN is the code of a negative zero
      const __mmask64 nan = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128));
      low = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8(-1));
      high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(-1));
    }
    operands[0] = _mm512_unpacklo_epi8(low, high);
    operands[1] = _mm512_unpackhi_epi8(low, high);
  }
};

template <>
struct Decode<BF16Multiplier, BFloat16> {
  static constexpr float kGain = 1.0f;
  static ROCM_KERNELS_VECTOR void chunk(const BFloat16* p, __m512i operands[2]) {
    operands[0] = _mm512_loadu_si512(p);
    operands[1] = _mm512_loadu_si512(p + 32);
  }
};

// A bfloat16 a in the order of an FP8 w.
struct BFloat16InFp8Order {
  uint16_t bits;
};

template <>
struct Decode<BF16Multiplier, BFloat16InFp8Order> {
  static constexpr float kGain = 1.0f;
  static ROCM_KERNELS_VECTOR void chunk(const BFloat16InFp8Order* p, __m512i operands[2]) {
    const __m512i first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 32);
    operands[0] =
        _mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), second);
    operands[1] =
        _mm512_permutex2var_epi64(first, _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), second);
  }
};

#endif

// decoder::chunk for the last `count` < kChunk elements of a row, zeros after them.
template <class Multiplier, class Element>
ROCM_KERNELS_VECTOR void decode_tail(const Element* p, int64_t count,
                                     typename Multiplier::Operand* operands) {
  Element chunk[Multiplier::kChunk];
  __builtin_memset(chunk, 0, sizeof(chunk));
  __builtin_memcpy(chunk, p, count * sizeof(Element));
  Decode<Multiplier, Element>::chunk(chunk, operands);
}
