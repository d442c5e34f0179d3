// How the elements of queries, keys and values are multiplied, and queries as they are multiplied
// with; part of attention_body.h, so no include guard.
//
// Queries of bfloat16 meet pairs of bfloat16 where the machine multiplies these, and so do their
// exponentials; all other products are of floats. Without such pairs bfloat16 is still cheap to
// split into floats, even elements and odd ones, and FP8 goes through it.

#include "../../blocks/product/cpu/operands.h"
#include "rows_body.h"

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// A vector in a register: compilers would rather load what several products use with each of them,
// and make constants anew for each row.
template <class V>
ROCM_KERNELS_VECTOR V kept(V v) {
#if ROCM_KERNELS_CPU_AVX2
  __asm__("" : "+x"(v));
#endif
  return v;
}

// Elements that FP8 is widened by, for kinds that do so.
constexpr int kInPairs = 32;

// For queries Q and keys and values T: the multiplier of scores and the order that it wants queries
// in; what decoded keys are stored as; of values, how many keys it adds at once, to how many
// vectors of a chunk; whether values are packed for more than kFewRows rows, as keys are that are
// not of the type that is stored; whether all rows meet keys and values widened to bfloat16.
template <class Q, class T>
struct Kind {
  using Multiplier = F32Multiplier;
  using Stored = float;
  using QueryMultiplier = Multiplier;
  using Order = Q;
  using Weight = float;
  static constexpr bool kPacks = !kSame<T, float>;
  static constexpr bool kWidens = false;
  static constexpr int kFewRows = 4;
  static constexpr int kPairs = 1;
  static constexpr int kParts = Multiplier::kParts;
  static constexpr int kChunk = Multiplier::kChunk;
  static constexpr float kGain = Decode<Multiplier, T>::kGain;  // of values
  static constexpr bool kInOrder = true;
};

// The last `count` < kChunk elements of a row, zeros after them.
template <class Multiplier, class T>
ROCM_KERNELS_VECTOR void decode_rest(const T* p, int64_t count,
                                     typename Multiplier::Operand* operands) {
#if ROCM_KERNELS_CPU_AVX512
  constexpr int64_t kBytes = Multiplier::kChunk * sizeof(T);
  alignas(64) char chunk[kBytes < 64 ? 64 : kBytes];
  const char* const from = reinterpret_cast<const char*>(p);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < kBytes; at += 64) {
    const int64_t left = smaller(larger(bytes - at, 0), 64);
    const __mmask64 mask = left == 0 ? 0 : ~uint64_t{0} >> (64 - left);
    _mm512_store_si512(chunk + at, _mm512_maskz_loadu_epi8(mask, from + at));
  }
  Decode<Multiplier, T>::chunk(reinterpret_cast<const T*>(chunk), operands);
#else
  decode_tail<Multiplier, T>(p, count, operands);
#endif
}

// Vectors of a chunk of values, kWhole or its first `count` elements, of kPairs keys.
template <class K, bool kWhole, class T>
ROCM_KERNELS_VECTOR void decode_values(const Rows<T>& rows, int64_t e, int64_t count,
                                       F32Multiplier::Operand* v) {
  if (kWhole) {
    Decode<typename K::Multiplier, T>::chunk(rows.at(0, e), v);
  } else {
    decode_rest<typename K::Multiplier, T>(rows.at(0, e), count, v);
  }
}

ROCM_KERNELS_VECTOR F32Multiplier::Sum add_weighted(F32Multiplier::Sum sum,
                                                    F32Multiplier::Operand v, const float* weight) {
  return F32Multiplier::add_scaled(sum, v, *weight);
}

#if ROCM_KERNELS_CPU_AVX512

// Keys in pairs: the elements of two rows are interleaved within each 128 bits, so the elements of
// out lie in quads, lane by lane through all vectors of a chunk.
template <class T, int kPartsOfChunk, class OrderOfQueries>
struct PairKind {
  using Multiplier = BF16Multiplier;
  using Stored = BFloat16;
  using QueryMultiplier = Multiplier;
  using Order = OrderOfQueries;
  using Weight = BFloat16;
  static constexpr bool kPacks = true;
  static constexpr bool kWidens = false;
  static constexpr int kFewRows = 4;
  static constexpr int kPairs = 2;
  static constexpr int kParts = kPartsOfChunk;
  static constexpr int kChunk = kParts * kLanes;
  static constexpr float kGain = Decode<Multiplier, T>::kGain;
  static constexpr bool kInOrder = false;
};
template <>
struct Kind<BFloat16, BFloat16> : PairKind<BFloat16, 2, BFloat16> {};
template <bool kFnuz>
struct Kind<BFloat16, Fp8<kFnuz>> : PairKind<Fp8<kFnuz>, 4, BFloat16InFp8Order> {};

ROCM_KERNELS_VECTOR __m512i load_bytes(const void* p, int64_t bytes) {
  return _mm512_maskz_loadu_epi8(bytes >= 64 ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1, p);
}

template <class K, bool kWhole>
ROCM_KERNELS_VECTOR void decode_values(const Rows<BFloat16>& rows, int64_t e, int64_t count,
                                       __m512i* v) {
  const __m512i a =
      kWhole ? _mm512_loadu_si512(rows.at(0, e)) : load_bytes(rows.at(0, e), 2 * count);
  const __m512i b =
      kWhole ? _mm512_loadu_si512(rows.at(1, e)) : load_bytes(rows.at(1, e), 2 * count);
  v[0] = _mm512_unpacklo_epi16(a, b);
  v[1] = _mm512_unpackhi_epi16(a, b);
}

template <class K, bool kWhole, bool kFnuz>
ROCM_KERNELS_VECTOR void decode_values(const Rows<Fp8<kFnuz>>& rows, int64_t e, int64_t count,
                                       __m512i* v) {
  const __m512i a = kWhole ? _mm512_loadu_si512(rows.at(0, e)) : load_bytes(rows.at(0, e), count);
  const __m512i b = kWhole ? _mm512_loadu_si512(rows.at(1, e)) : load_bytes(rows.at(1, e), count);
  Decode<BF16Multiplier, Fp8<kFnuz>>::convert(_mm512_unpacklo_epi8(a, b), v);
  Decode<BF16Multiplier, Fp8<kFnuz>>::convert(_mm512_unpackhi_epi8(a, b), v + 2);
}

ROCM_KERNELS_VECTOR F32 add_weighted(F32 sum, __m512i v, const BFloat16* weights) {
  int32_t pair;
  __builtin_memcpy(&pair, weights, sizeof(pair));
  return BF16Multiplier::dot(sum, v, _mm512_set1_epi32(pair));
}

#endif

#if ROCM_KERNELS_CPU_AVX2

// Pairs of bfloat16, as 32 bits have them: first the even elements of 16, then the odd ones. FP8 is
// widened to bfloat16 within halves of 128 bits: of 32 elements the second and the third eight have
// changed places.
struct PairsMultiplier : F32Multiplier {};

template <>
struct Decode<PairsMultiplier, float> : Decode<F32Multiplier, float> {};

template <>
struct Decode<PairsMultiplier, BFloat16> {
  static constexpr float kGain = 1.0f;
  static ROCM_KERNELS_VECTOR void chunk(const BFloat16* p, F32* operands) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    operands[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    operands[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF0000)));
  }
};

template <class Q, class T>
struct KindInPairs {
  using Multiplier = PairsMultiplier;
  using Stored = float;
  using QueryMultiplier = F32Multiplier;
  using Order = Q;
  using Weight = float;
  static constexpr bool kPacks = true;
  static constexpr bool kWidens = !kSame<T, BFloat16>;
  static constexpr int kFewRows = 16;  // bfloat16 costs little to decode again for each four
  static constexpr int kPairs = 1;
  static constexpr int kParts = Multiplier::kParts;
  static constexpr int kChunk = Multiplier::kChunk;
  static constexpr float kGain = Decode<Multiplier, T>::kGain;
  static constexpr bool kInOrder = false;
};
template <>
struct Kind<BFloat16, BFloat16> : KindInPairs<BFloat16, BFloat16> {};
template <class Q, bool kFnuz>
struct Kind<Q, Fp8<kFnuz>> : KindInPairs<Q, Fp8<kFnuz>> {};

// Rows of elements in the order of a kind, and back.
template <class K>
void put_in_pairs(float* values, int64_t elements) {
  for (int64_t e = 0; e < elements; e += kInPairs) {
    F32 v[4];
    for (int i = 0; i < 4; ++i) v[i] = load(values + e + i * kLanes);
    for (int i = 0; i < 2; ++i) {
      const F32 a = K::kWidens ? v[i] : v[2 * i], b = K::kWidens ? v[i + 2] : v[2 * i + 1];
      const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
      const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xDD));
      float* const to = values + e + 2 * i * kLanes;
      store(to, _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xD8)));
      store(to + kLanes, _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xD8)));
    }
  }
}

template <class K>
void put_in_order(float* values, int64_t elements) {
  for (int64_t e = 0; e < elements; e += kInPairs) {
    F32 v[4];
    for (int i = 0; i < 4; ++i) v[i] = load(values + e + i * kLanes);
    for (int i = 0; i < 2; ++i) {
      const F32 low = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
      const F32 high = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
      float* const to = values + e + (K::kWidens ? i : 2 * i) * kLanes;
      store(to, _mm256_permute2f128_ps(low, high, 0x20));
      store(to + (K::kWidens ? 2 : 1) * kLanes, _mm256_permute2f128_ps(low, high, 0x31));
    }
  }
}

// What the look-ups of FP8 hold: the upper byte of the bfloat16 by sign and upper exponent bits,
// whose lower byte is the code's other four bits; and, of codes below 16, what differs from that.
struct Fp8Nibbles {
  uint8_t upper[16], upper_differs[16], lower_differs[16];

  constexpr Fp8Nibbles() : upper(), upper_differs(), lower_differs() {
    constexpr Fp8ToBF16<false> kWhole{};
    for (int i = 0; i < 16; ++i) {
      upper[i] = static_cast<uint8_t>((i & 8) << 4 | ((i & 7) + 60));
      upper_differs[i] = kWhole.high[i] ^ 60;
      lower_differs[i] = kWhole.low[i] ^ static_cast<uint8_t>(i << 4);
    }
  }
};

template <bool kFnuz>
struct Decode<PairsMultiplier, Fp8<kFnuz>> {
  static constexpr float kGain = kFnuz ? 0.5f : 1.0f;
};

// What widens FP8.
template <bool kFnuz>
struct Fp8Widening {
  alignas(16) static constexpr Fp8Nibbles kTable{};
  __m256i upper, upper_differs, lower_differs;
  __m256i magnitude, to_differs, nibble, mantissa, nan;

  static ROCM_KERNELS_VECTOR __m256i table(const uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static ROCM_KERNELS_VECTOR Fp8Widening make() {
    return {kept(table(kTable.upper)),         kept(table(kTable.upper_differs)),
            kept(table(kTable.lower_differs)), kept(_mm256_set1_epi8(0x7F)),
            kept(_mm256_set1_epi8(0x70)),      kept(_mm256_set1_epi8(0x0F)),
            kept(_mm256_set1_epi8(-16)),       kept(_mm256_set1_epi8(kFnuz ? -128 : 0x7F))};
  }

  // 32 codes as bfloat16: each look-up that a code of 16 or more makes for a difference finds 0.
  ROCM_KERNELS_VECTOR void widen(const Fp8<kFnuz>* p, BFloat16* to) const {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i magnitudes = _mm256_and_si256(codes, magnitude);
    const __m256i differs = _mm256_add_epi8(magnitudes, to_differs);
    const __m256i nibbles = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    __m256i high = _mm256_xor_si256(_mm256_shuffle_epi8(upper, nibbles),
                                    _mm256_shuffle_epi8(upper_differs, differs));
    __m256i low = _mm256_xor_si256(_mm256_and_si256(_mm256_slli_epi16(codes, 4), mantissa),
                                   _mm256_shuffle_epi8(lower_differs, differs));
    const __m256i nans = _mm256_cmpeq_epi8(kFnuz ? codes : magnitudes, nan);
    high = _mm256_or_si256(high, nans);
    if (kFnuz) low = _mm256_or_si256(low, nans);
    __m256i* const pairs = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(pairs, _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256(pairs + 1, _mm256_unpackhi_epi8(low, high));
  }
};

// `count` rows as bfloat16, `stride` elements apart; and where they are, the last for all from
// there to `pointers`.
template <bool kFnuz, class Next>
void widen_rows(const Rows<Fp8<kFnuz>>& rows, int64_t count, int64_t pointers, int64_t elements,
                BFloat16* to, int64_t stride, const BFloat16** widened, Next& next) {
  constexpr int64_t kStep = 32, kLine = 64;
  const Fp8Widening<kFnuz> widening = Fp8Widening<kFnuz>::make();
  Next ahead = next;
  for (int64_t j = 0; j < count; ++j, to += stride) {
    const Fp8<kFnuz>* const from = rows.at(j, 0);
    widened[j] = to;
    int64_t e = 0;
    for (; e + kLine <= elements; e += kLine) {
      ahead.template fetch<kLine>(0, j, e);
      widening.widen(from + e, to + e);
      widening.widen(from + e + kStep, to + e + kStep);
    }
    if (e < elements) {
      Fp8<kFnuz> rest[kLine] = {};
      __builtin_memcpy(rest, from + e, elements - e);
      ahead.template fetch<kLine>(0, j, e);
      widening.widen(rest, to + e);
      widening.widen(rest + kStep, to + e + kStep);
    }
  }
  for (int64_t j = count; j < pointers; ++j) widened[j] = widened[count - 1];
  next = ahead;
}

#endif

template <class Multiplier, class Order, class Q>
void load_queries(const AttentionArgs& args, const AttentionTask& task,
                  typename Multiplier::Value* q) {
  const int64_t group = args.heads / args.kv_heads, stride = aligned_size(args.head_dim);
  const Q* data = static_cast<const Q*>(args.q.data);
  if (args.cu_seqlens_q == nullptr) data += task.sequence * args.q.batch_stride;
  for (int64_t r = 0; r < task.rows; ++r, q += stride) {
    const int64_t i = (task.row + r) / group, g = (task.row + r) % group;
    const Q* const from = data + (task.q_begin + i) * args.q.row_stride +
                          (task.kv_head * group + g) * args.q.head_stride;
    for (int64_t d = 0; d < stride; d += Multiplier::kChunk) {
      Order chunk[Multiplier::kChunk] = {};
      const int64_t elements = smaller(larger(args.head_dim - d, 0), Multiplier::kChunk);
      __builtin_memcpy(chunk, from + d, elements * sizeof(Q));
      typename Multiplier::Operand operands[Multiplier::kParts];
      Decode<Multiplier, Order>::chunk(chunk, operands);
      for (int part = 0; part < Multiplier::kParts; ++part) {
        Multiplier::store_operand(q + d + part * Multiplier::kWidth, operands[part]);
      }
    }
  }
}
