// The products of queries with keys and of exponentials with values; part of attention_body.h, so
// no include guard.
//
// Scores are dot products along the elements, with their sums across the lanes at the end; the
// product with values has the elements of out in its lanes. Queries of bfloat16 meet pairs of
// bfloat16 where the machine multiplies these, and so do their exponentials; all other products are
// of floats.

#include "../../blocks/product/cpu/operands.h"
#include "rows_body.h"

// ---- How elements are multiplied ---------------------------------------------------------------

// For queries Q and keys and values T: the multiplier of scores and the order that it wants queries
// in; what decoded keys are stored as; of values, how many keys it adds at once, to how many
// vectors of a chunk.
template <class Q, class T>
struct Kind {
  using Multiplier = F32Multiplier;
  using Stored = float;
  using Order = Q;
  using Weight = float;
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
    Decode<F32Multiplier, T>::chunk(rows.at(0, e), v);
  } else {
    decode_rest<F32Multiplier, T>(rows.at(0, e), count, v);
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
  using Order = OrderOfQueries;
  using Weight = BFloat16;
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
    for (int64_t d = 0; d < args.head_dim; d += Multiplier::kChunk) {
      Order chunk[Multiplier::kChunk] = {};
      __builtin_memcpy(chunk, from + d, smaller(args.head_dim - d, Multiplier::kChunk) * sizeof(Q));
      typename Multiplier::Operand operands[Multiplier::kParts];
      Decode<Multiplier, Order>::chunk(chunk, operands);
      for (int part = 0; part < Multiplier::kParts; ++part) {
        Multiplier::store_operand(q + d + part * Multiplier::kWidth, operands[part]);
      }
    }
  }
}

// ---- Packed blocks -----------------------------------------------------------------------------

// Many rows meet keys and values that were decoded once for all of them.
constexpr int64_t kFewRows = 4;

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// Operands of kPairs rows of values, as decode_values gives them, side by side.
template <class K>
struct PackedValue {
  typename K::Multiplier::Value value;
};

template <class T>
constexpr bool kPacked = false;
template <class K>
constexpr bool kPacked<PackedValue<K>> = true;

template <class K, bool kWhole, class T>
ROCM_KERNELS_VECTOR void load_values(const Rows<T>& rows, int64_t e, int64_t count,
                                     typename K::Multiplier::Operand* v) {
  if constexpr (kPacked<T>) {
    const typename K::Multiplier::Value* const from = &rows.rows[0]->value + e * K::kPairs;
    for (int part = 0; part < K::kParts; ++part) {
      v[part] = K::Multiplier::load_operand(from + part * K::Multiplier::kWidth);
    }
  } else {
    decode_values<K, kWhole>(rows, e, count, v);
  }
}

inline int64_t rounded_up(int64_t elements, int64_t chunk) {
  return (elements + chunk - 1) / chunk * chunk;
}

// `count` keys, `stride` elements apart, with zeros to the end of a chunk; and where they are, the
// last for all from there to `pointers`.
template <class K, class T, class Next>
void pack_keys(const Rows<T>& rows, int64_t count, int64_t pointers, int64_t elements,
               typename K::Multiplier::Value* to, int64_t stride, const typename K::Stored** packed,
               const Next& next) {
  using Multiplier = typename K::Multiplier;
  for (int64_t j = 0; j < pointers; ++j) {
    packed[j] = reinterpret_cast<const typename K::Stored*>(to + smaller(j, count - 1) * stride);
  }
  for (int64_t j = 0; j < count; ++j, to += stride) {
    for (int64_t d = 0; d < elements; d += Multiplier::kChunk) {
      typename Multiplier::Operand k[Multiplier::kParts];
      next.template fetch<Multiplier::kChunk>(j, d);
      if (d + Multiplier::kChunk <= elements) {
        Decode<Multiplier, T>::chunk(rows.at(j, d), k);
      } else {
        decode_rest<Multiplier, T>(rows.at(j, d), elements - d, k);
      }
      for (int part = 0; part < Multiplier::kParts; ++part) {
        Multiplier::store_operand(to + d + part * Multiplier::kWidth, k[part]);
      }
    }
  }
}

template <class K, class T, class Next>
void pack_values(const Rows<T>& rows, int64_t count, int64_t elements, PackedValue<K>* to,
                 int64_t stride, const PackedValue<K>** packed, const Next& next) {
  using Multiplier = typename K::Multiplier;
  for (int64_t j = 0; j < count; j += K::kPairs, to += K::kPairs * stride) {
    packed[j] = to;
    for (int64_t e = 0; e < elements; e += K::kChunk) {
      typename Multiplier::Operand v[K::kParts];
      for (int i = 0; i < K::kPairs; ++i) next.template fetch<K::kChunk>(j + i, e);
      if (e + K::kChunk <= elements) {
        decode_values<K, true>(rows.from(j), e, K::kChunk, v);
      } else {
        decode_values<K, false>(rows.from(j), e, elements - e, v);
      }
      for (int part = 0; part < K::kParts; ++part) {
        Multiplier::store_operand(&to->value + e * K::kPairs + part * Multiplier::kWidth, v[part]);
      }
    }
  }
}

// ---- Scores ------------------------------------------------------------------------------------

// Sums of a tile: as many as registers hold beside the operands.
#if ROCM_KERNELS_CPU_AVX512 || ROCM_KERNELS_CPU_NEON
constexpr int kTileSums = 16;
#else
constexpr int kTileSums = 8;
#endif

// Each sum's total across its lanes.
ROCM_KERNELS_VECTOR void total_lanes(const F32Multiplier::Sum* sums, float* totals) {
#if ROCM_KERNELS_CPU_AVX512
  // Pairs of vectors become one of half as many lanes each: 45 operations for 16 sums of 16 lanes.
  F32 quads[4];  // [4 lanes' sum of vectors i to i + 3] four times
  for (int i = 0; i < 4; ++i) {
    const F32* const s = sums + 4 * i;
    const __m512d low =
        _mm512_castps_pd(_mm512_unpacklo_ps(s[0], s[1]) + _mm512_unpackhi_ps(s[0], s[1]));
    const __m512d high =
        _mm512_castps_pd(_mm512_unpacklo_ps(s[2], s[3]) + _mm512_unpackhi_ps(s[2], s[3]));
    quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)) +
               _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  }
  F32 halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x44) +
                _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xEE);
  }
  store(totals, _mm512_shuffle_f32x4(halves[0], halves[1], 0x88) +
                    _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
#elif ROCM_KERNELS_CPU_AVX2
  // Neighbours become one: 21 operations for 8 sums of 8 lanes.
  F32 halves[2];  // [4 lanes' sum of vectors i to i + 3] twice
  for (int i = 0; i < 2; ++i) {
    const F32* const s = sums + 4 * i;
    halves[i] = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
  }
  store(totals, _mm256_permute2f128_ps(halves[0], halves[1], 0x20) +
                    _mm256_permute2f128_ps(halves[0], halves[1], 0x31));
#else
  for (int i = 0; i < kTileSums; ++i) totals[i] = F32Multiplier::total(sums[i]);
#endif
}

template <class Multiplier, int kRows, int kKeys, bool kWhole, class T, class Next>
ROCM_KERNELS_VECTOR void score_chunk(const typename Multiplier::Value* q, int64_t q_stride,
                                     const Rows<T>& keys, int64_t d, int64_t elements,
                                     typename Multiplier::Sum* sums, const Next& next) {
  constexpr int kParts = Multiplier::kParts;
  typename Multiplier::Operand a[kRows][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int part = 0; part < kParts; ++part) {
      a[r][part] = Multiplier::load_operand(q + r * q_stride + d + part * Multiplier::kWidth);
    }
  }
  for (int j = 0; j < kKeys; ++j) {
    next.template fetch<Multiplier::kChunk>(j, d);
    typename Multiplier::Operand k[kParts];
    if (kWhole) {
      Decode<Multiplier, T>::chunk(keys.at(j, d), k);
    } else {
      decode_rest<Multiplier, T>(keys.at(j, d), elements - d, k);
    }
    for (int part = 0; part < kParts; ++part) {
      for (int r = 0; r < kRows; ++r) {
        typename Multiplier::Sum& sum = sums[r * kKeys + j];
        sum = Multiplier::dot(sum, a[r][part], k[part]);
      }
    }
  }
}

// Dot products of kRows queries with `count` keys, rounded up to whole tiles, for which there are
// pointers too: scores[r * kKeyBlock + j]. Meanwhile what is `next` is fetched.
template <class Multiplier, int kRows, class T, class Next>
void score_rows(const typename Multiplier::Value* q, int64_t q_stride, const Rows<T>& keys,
                int64_t count, int64_t elements, float* scores, const Next& next) {
  constexpr int kChunk = Multiplier::kChunk;
  constexpr int kKeys = kTileSums / (kRows == 3 ? 4 : kRows);
  for (int64_t j = 0; j < count; j += kKeys) {
    typename Multiplier::Sum sums[kTileSums];
    for (int i = 0; i < kTileSums; ++i) sums[i] = Multiplier::zero();
    int64_t d = 0;
    for (; d + kChunk <= elements; d += kChunk) {
      score_chunk<Multiplier, kRows, kKeys, true>(q, q_stride, keys.from(j), d, elements, sums,
                                                  next.from(j));
    }
    if (d < elements) {
      score_chunk<Multiplier, kRows, kKeys, false>(q, q_stride, keys.from(j), d, elements, sums,
                                                   next.from(j));
    }
    alignas(64) float totals[kTileSums];
    total_lanes(sums, totals);
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(scores + r * kKeyBlock + j, totals + r * kKeys, kKeys * sizeof(float));
    }
  }
}

template <class Multiplier, class T, class Next>
void score_some(const typename Multiplier::Value* q, int64_t rows, int64_t q_stride,
                const Rows<T>& keys, int64_t count, int64_t elements, float* scores,
                const Next& next) {
  if (rows >= 4) score_rows<Multiplier, 4>(q, q_stride, keys, count, elements, scores, next);
  if (rows == 3) score_rows<Multiplier, 3>(q, q_stride, keys, count, elements, scores, next);
  if (rows == 2) score_rows<Multiplier, 2>(q, q_stride, keys, count, elements, scores, next);
  if (rows == 1) score_rows<Multiplier, 1>(q, q_stride, keys, count, elements, scores, next);
}

template <class Multiplier, class T, class Next>
void score_all(const typename Multiplier::Value* q, int64_t rows, int64_t q_stride,
               const Rows<T>& keys, int64_t count, int64_t elements, float* scores,
               const Next& next) {
  score_some<Multiplier>(q, rows, q_stride, keys, count, elements, scores, next);
  constexpr Nothing nothing;
  for (int64_t r = 4; r < rows; r += 4) {
    score_some<Multiplier>(q + r * q_stride, rows - r, q_stride, keys, count, elements,
                           scores + r * kKeyBlock, nothing);
  }
}

// Dot products of queries with `count` keys: scores[r * kKeyBlock + j].
template <class K, class T, class Next>
void score(const typename K::Multiplier::Value* q, int64_t rows, int64_t q_stride,
           const Rows<T>& keys, int64_t count, int64_t elements, float* scores,
           typename K::Multiplier::Value* packed, const Next& next) {
  using Multiplier = typename K::Multiplier;
  if (rows > kFewRows && !kSame<T, typename K::Stored>) {
    const typename K::Stored* packed_keys[kKeyBlock];
    pack_keys<K>(keys, count, kKeyBlock, elements, packed, q_stride, packed_keys, next);
    score_all<Multiplier>(q, rows, q_stride, Rows<typename K::Stored>{packed_keys, 0}, count,
                          rounded_up(elements, Multiplier::kChunk), scores, next);
  } else {
    score_all<Multiplier>(q, rows, q_stride, keys, count, elements, scores, next);
  }
}

// ---- Values ------------------------------------------------------------------------------------

// Exponentials of a row lie where its scores did.
template <class K>
constexpr int64_t kWeightStride = kKeyBlock * sizeof(float) / sizeof(typename K::Weight);

// Adds p times the values of `count` keys to kChunks chunks of kRows rows.
template <class K, int kRows, int kChunks, bool kWhole, class T, class Next>
ROCM_KERNELS_VECTOR void add_chunks(const typename K::Weight* p, const Rows<T>& rows, int64_t count,
                                    int64_t e, int64_t elements, float* values, int64_t stride,
                                    const Next& next) {
  using Multiplier = typename K::Multiplier;
  constexpr int kParts = K::kParts, kChunk = K::kChunk, kWidth = kChunk / kParts;
  typename Multiplier::Sum sums[kRows][kChunks][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChunks; ++c) {
      for (int part = 0; part < kParts; ++part) {
        sums[r][c][part] =
            Multiplier::load_sum(values + r * stride + e + c * kChunk + part * kWidth);
      }
    }
  }
  for (int64_t j = 0; j < count; j += K::kPairs) {
    for (int c = 0; c < kChunks; ++c) {
      for (int i = 0; i < K::kPairs; ++i) next.template fetch<kChunk>(j + i, e + c * kChunk);
      typename Multiplier::Operand v[kParts];
      load_values<K, kWhole>(rows.from(j), e + c * kChunk, elements - e, v);
      for (int r = 0; r < kRows; ++r) {
        for (int part = 0; part < kParts; ++part) {
          typename Multiplier::Sum& sum = sums[r][c][part];
          sum = add_weighted(sum, v[part], p + r * kWeightStride<K> + j);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChunks; ++c) {
      for (int part = 0; part < kParts; ++part) {
        Multiplier::store_sum(values + r * stride + e + c * kChunk + part * kWidth,
                              sums[r][c][part]);
      }
    }
  }
}

template <class K, int kRows, class T, class Next>
void add_rows(const typename K::Weight* p, const Rows<T>& rows, int64_t count, int64_t elements,
              float* values, int64_t stride, const Next& next) {
  constexpr int kChunk = K::kChunk;
  constexpr int kFit = kTileSums / (kRows == 3 ? 4 : kRows) / K::kParts;
  constexpr int kMost = kFit > 1 ? kFit : 1;
  constexpr int kChunks = kMost > 4 ? 4 : kMost;
  int64_t e = 0;
  for (; e + kChunks * kChunk <= elements; e += kChunks * kChunk) {
    add_chunks<K, kRows, kChunks, true>(p, rows, count, e, elements, values, stride, next);
  }
  for (; e + kChunk <= elements; e += kChunk) {
    add_chunks<K, kRows, 1, true>(p, rows, count, e, elements, values, stride, next);
  }
  if (e < elements) {
    add_chunks<K, kRows, 1, false>(p, rows, count, e, elements, values, stride, next);
  }
}

template <class K, class T, class Next>
void add_some(const typename K::Weight* p, int64_t rows, const Rows<T>& value_rows, int64_t count,
              int64_t elements, float* values, int64_t stride, const Next& next) {
  if (rows >= 4) add_rows<K, 4>(p, value_rows, count, elements, values, stride, next);
  if (rows == 3) add_rows<K, 3>(p, value_rows, count, elements, values, stride, next);
  if (rows == 2) add_rows<K, 2>(p, value_rows, count, elements, values, stride, next);
  if (rows == 1) add_rows<K, 1>(p, value_rows, count, elements, values, stride, next);
}

// There are pointers for whole pairs of keys.
template <class K, class T, class Next>
void add_values(const typename K::Weight* p, int64_t rows, const Rows<T>& value_rows, int64_t count,
                int64_t elements, float* values, int64_t stride, const Next& next) {
  add_some<K>(p, rows, value_rows, count, elements, values, stride, next);
  constexpr Nothing nothing;
  for (int64_t r = 4; r < rows; r += 4) {
    add_some<K>(p + r * kWeightStride<K>, rows - r, value_rows, count, elements,
                values + r * stride, stride, nothing);
  }
}
