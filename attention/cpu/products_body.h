// The products of queries with keys and of exponentials with values; part of attention_body.h, so
// no include guard.
//
// Scores are dot products along the elements, with their sums across the lanes at the end; the
// product with values has the elements of out in its lanes.

#include "kinds_body.h"

// ---- Packed blocks -----------------------------------------------------------------------------

// What keys and values are before they meet rows: widened for all rows of a kind that wants it,
// then, for many rows, decoded once for all of them.
template <class K>
struct Scratch {
  static constexpr int64_t kElements = kKeyBlock * aligned_size(kMaxHeadDim);
  alignas(64) typename K::Multiplier::Value packed[kElements];
  alignas(64) BFloat16 widened[K::kWidens ? kElements : 1];
};

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
               Next& next) {
  using Multiplier = typename K::Multiplier;
  for (int64_t j = 0; j < pointers; ++j) {
    packed[j] = reinterpret_cast<const typename K::Stored*>(to + smaller(j, count - 1) * stride);
  }
  Next ahead = next;
  for (int64_t j = 0; j < count; ++j, to += stride) {
    for (int64_t d = 0; d < elements; d += Multiplier::kChunk) {
      typename Multiplier::Operand k[Multiplier::kParts];
      ahead.template fetch<Multiplier::kChunk>(0, j, d);
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
  next = ahead;
}

template <class K, class T, class Next>
void pack_values(const Rows<T>& rows, int64_t count, int64_t elements, PackedValue<K>* to,
                 int64_t stride, const PackedValue<K>** packed, Next& next) {
  using Multiplier = typename K::Multiplier;
  Next ahead = next;
  for (int64_t j = 0; j < count; j += K::kPairs, to += K::kPairs * stride) {
    packed[j] = to;
    for (int64_t e = 0; e < elements; e += K::kChunk) {
      typename Multiplier::Operand v[K::kParts];
      for (int i = 0; i < K::kPairs; ++i) ahead.template fetch<K::kChunk>(0, j + i, e);
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
  next = ahead;
}

// ---- Scores ------------------------------------------------------------------------------------

// Sums of a tile: as many as registers hold beside the operands.
#if ROCM_KERNELS_CPU_AVX512 || ROCM_KERNELS_CPU_NEON
constexpr int kTileSums = 16;
#else
constexpr int kTileSums = 8;
#endif

#if ROCM_KERNELS_CPU_AVX2
// Two vectors become one of half as many lanes each: 21 operations for 8 sums of 8 lanes, of which
// 8 shuffle.
ROCM_KERNELS_VECTOR F32 add_halves(F32 a, F32 b) {
  return _mm256_permute2f128_ps(a, b, 0x21) + _mm256_blend_ps(a, b, 0xF0);
}
ROCM_KERNELS_VECTOR F32 add_pairs(F32 a, F32 b) {
  return _mm256_shuffle_ps(a, b, 0x4E) + _mm256_blend_ps(a, b, 0xCC);
}
ROCM_KERNELS_VECTOR F32 add_neighbours(F32 a, F32 b) {
  return _mm256_shuffle_ps(a, b, 0x88) + _mm256_shuffle_ps(a, b, 0xDD);
}
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
  F32 halves[4];
  for (int i = 0; i < 4; ++i) halves[i] = add_halves(sums[i], sums[i + 4]);
  store(totals, add_neighbours(add_pairs(halves[0], halves[1]), add_pairs(halves[2], halves[3])));
#else
  for (int i = 0; i < kTileSums; ++i) totals[i] = F32Multiplier::total(sums[i]);
#endif
}

// Adds a chunk of elements of kKeys keys, the first of which is key `begin` of those of `next`.
template <class Multiplier, int kRows, int kKeys, bool kWhole, class T, class Next>
ROCM_KERNELS_VECTOR void score_chunk(const typename Multiplier::Value* q, int64_t q_stride,
                                     const Rows<T>& keys, int64_t begin, int64_t d,
                                     int64_t elements, typename Multiplier::Sum* sums, Next& next) {
  constexpr int kParts = Multiplier::kParts, kWidth = Multiplier::kWidth;
  constexpr bool kHoldsKeys = kKeys < kRows;  // what is fewer stays in registers
  typename Multiplier::Operand a[kRows][kParts], k[kKeys][kParts];
  for (int r = 0; !kHoldsKeys && r < kRows; ++r) {
    for (int part = 0; part < kParts; ++part) {
      a[r][part] = Multiplier::load_operand(q + r * q_stride + d + part * kWidth);
    }
  }
  for (int j = 0; j < kKeys; ++j) {
    next.template fetch<Multiplier::kChunk>(begin, j, d);
    if (kWhole) {
      Decode<Multiplier, T>::chunk(keys.at(j, d), k[j]);
    } else {
      decode_rest<Multiplier, T>(keys.at(j, d), elements - d, k[j]);
    }
    for (int part = 0; !kHoldsKeys && part < kParts; ++part) {
      for (int r = 0; r < kRows; ++r) {
        typename Multiplier::Sum& sum = sums[r * kKeys + j];
        sum = Multiplier::dot(sum, a[r][part], k[j][part]);
      }
    }
  }
  for (int part = 0; kHoldsKeys && part < kParts; ++part) {
    for (int r = 0; r < kRows; ++r) {
      const typename Multiplier::Operand once =
          kept(Multiplier::load_operand(q + r * q_stride + d + part * kWidth));
      for (int j = 0; j < kKeys; ++j) {
        typename Multiplier::Sum& sum = sums[r * kKeys + j];
        sum = Multiplier::dot(sum, once, k[j][part]);
      }
    }
  }
}

// Dot products of kRows queries with `count` keys, rounded up to whole tiles, for which there are
// pointers too: scores[r * kKeyBlock + j]. Meanwhile what is `next` is fetched.
template <class Multiplier, int kRows, class T, class Next>
void score_rows(const typename Multiplier::Value* q, int64_t q_stride, const Rows<T>& keys,
                int64_t count, int64_t elements, float* scores, Next& next) {
  constexpr int kChunk = Multiplier::kChunk;
  constexpr int kKeys = kTileSums / (kRows == 3 ? 4 : kRows);
  Next ahead = next;
  for (int64_t j = 0; j < count; j += kKeys) {
    typename Multiplier::Sum sums[kTileSums];
    for (int i = 0; i < kTileSums; ++i) sums[i] = Multiplier::zero();
    int64_t d = 0;
    for (; d + kChunk <= elements; d += kChunk) {
      score_chunk<Multiplier, kRows, kKeys, true>(q, q_stride, keys.from(j), j, d, elements, sums,
                                                  ahead);
    }
    if (d < elements) {
      score_chunk<Multiplier, kRows, kKeys, false>(q, q_stride, keys.from(j), j, d, elements, sums,
                                                   ahead);
    }
    alignas(64) float totals[kTileSums];
    total_lanes(sums, totals);
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(scores + r * kKeyBlock + j, totals + r * kKeys, kKeys * sizeof(float));
    }
  }
  next = ahead;
}

template <class Multiplier, class T, class Next>
void score_some(const typename Multiplier::Value* q, int64_t rows, int64_t q_stride,
                const Rows<T>& keys, int64_t count, int64_t elements, float* scores, Next& next) {
  if (rows >= 4) score_rows<Multiplier, 4>(q, q_stride, keys, count, elements, scores, next);
  if (rows == 3) score_rows<Multiplier, 3>(q, q_stride, keys, count, elements, scores, next);
  if (rows == 2) score_rows<Multiplier, 2>(q, q_stride, keys, count, elements, scores, next);
  if (rows == 1) score_rows<Multiplier, 1>(q, q_stride, keys, count, elements, scores, next);
}

template <class Multiplier, class T, class Next>
void score_all(const typename Multiplier::Value* q, int64_t rows, int64_t q_stride,
               const Rows<T>& keys, int64_t count, int64_t elements, float* scores, Next& next) {
  score_some<Multiplier>(q, rows, q_stride, keys, count, elements, scores, next);
  Nothing nothing;
  for (int64_t r = 4; r < rows; r += 4) {
    score_some<Multiplier>(q + r * q_stride, rows - r, q_stride, keys, count, elements,
                           scores + r * kKeyBlock, nothing);
  }
}

// Dot products of queries with `count` keys: scores[r * kKeyBlock + j].
template <class K, class T, class Next>
void score(const typename K::Multiplier::Value* q, int64_t rows, int64_t q_stride,
           const Rows<T>& keys, int64_t count, int64_t elements, float* scores, Scratch<K>& scratch,
           Next& next) {
  using Multiplier = typename K::Multiplier;
  if constexpr (K::kWidens && !kSame<T, BFloat16>) {
    const BFloat16* widened[kKeyBlock];
    Nothing nothing;
    widen_rows(keys, count, rounded_up(count, kTileSums), elements, scratch.widened, q_stride,
               widened, next);
    score<K>(q, rows, q_stride, Rows<BFloat16>{widened, 0}, count, rounded_up(elements, kInPairs),
             scores, scratch, nothing);
  } else if (rows > K::kFewRows && !kSame<T, typename K::Stored>) {
    const typename K::Stored* packed_keys[kKeyBlock];
    pack_keys<K>(keys, count, rounded_up(count, kTileSums), elements, scratch.packed, q_stride,
                 packed_keys, next);
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

// Adds p times the values of kPairs keys, the i-th from key j on and its next, to kChunks chunks of
// kRows rows.
template <class K, int kRows, int kChunks, bool kWhole, class T, class Next>
ROCM_KERNELS_VECTOR void add_pair(const typename K::Weight* p, const Rows<T>& rows, int64_t j,
                                  int64_t i, int64_t e, int64_t elements,
                                  typename K::Multiplier::Sum (*sums)[kChunks][K::kParts],
                                  Next& next) {
  constexpr int kParts = K::kParts, kChunk = K::kChunk;
  for (int c = 0; c < kChunks; ++c) {
    for (int of = 0; of < K::kPairs; ++of) {
      next.template fetch<kChunk>(j, i + of, e + c * kChunk);
    }
    typename K::Multiplier::Operand v[kParts];
    load_values<K, kWhole>(rows.from(j + i), e + c * kChunk, elements - e, v);
    for (int r = 0; r < kRows; ++r) {
      for (int part = 0; part < kParts; ++part) {
        typename K::Multiplier::Sum& sum = sums[r][c][part];
        sum = add_weighted(sum, v[part], p + r * kWeightStride<K> + j + i);
      }
    }
  }
}

// Adds p times the values of `count` keys to kChunks chunks of kRows rows.
template <class K, int kRows, int kChunks, bool kWhole, class T, class Next>
ROCM_KERNELS_VECTOR void add_chunks(const typename K::Weight* p, const Rows<T>& rows, int64_t count,
                                    int64_t e, int64_t elements, float* values, int64_t stride,
                                    Next& next) {
  using Multiplier = typename K::Multiplier;
  constexpr int kParts = K::kParts, kChunk = K::kChunk, kWidth = kChunk / kParts;
  constexpr int kStep = Next::template kCalls<kChunk> * K::kPairs;
  typename Multiplier::Sum sums[kRows][kChunks][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChunks; ++c) {
      for (int part = 0; part < kParts; ++part) {
        sums[r][c][part] =
            Multiplier::load_sum(values + r * stride + e + c * kChunk + part * kWidth);
      }
    }
  }
  Next ahead = next;
  int64_t j = 0;
  for (; kStep > K::kPairs && j + kStep <= count; j += kStep) {
    for (int i = 0; i < kStep; i += K::kPairs) {
      add_pair<K, kRows, kChunks, kWhole>(p, rows, j, i, e, elements, sums, ahead);
    }
  }
  for (; j < count; j += K::kPairs) {
    add_pair<K, kRows, kChunks, kWhole>(p, rows, j, 0, e, elements, sums, ahead);
  }
  next = ahead;
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
              float* values, int64_t stride, Next& next) {
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
              int64_t elements, float* values, int64_t stride, Next& next) {
  if (rows >= 4) add_rows<K, 4>(p, value_rows, count, elements, values, stride, next);
  if (rows == 3) add_rows<K, 3>(p, value_rows, count, elements, values, stride, next);
  if (rows == 2) add_rows<K, 2>(p, value_rows, count, elements, values, stride, next);
  if (rows == 1) add_rows<K, 1>(p, value_rows, count, elements, values, stride, next);
}

template <class K, class T, class Next>
void add_all(const typename K::Weight* p, int64_t rows, const Rows<T>& value_rows, int64_t count,
             int64_t elements, float* values, int64_t stride, Next& next) {
  add_some<K>(p, rows, value_rows, count, elements, values, stride, next);
  Nothing nothing;
  for (int64_t r = 4; r < rows; r += 4) {
    add_some<K>(p + r * kWeightStride<K>, rows - r, value_rows, count, elements,
                values + r * stride, stride, nothing);
  }
}

// Adds p times the values of `count` keys to those of `rows` rows. There are pointers for whole
// pairs of keys.
template <class K, class T, class Next>
void add_values(const typename K::Weight* p, int64_t rows, const Rows<T>& value_rows, int64_t count,
                int64_t elements, float* values, int64_t stride, Scratch<K>& scratch, Next& next) {
  if constexpr (K::kWidens && !kSame<T, BFloat16>) {
    const BFloat16* widened[kKeyBlock];
    Nothing nothing;
    widen_rows(value_rows, count, count, elements, scratch.widened, stride, widened, next);
    add_values<K>(p, rows, Rows<BFloat16>{widened, 0}, count, rounded_up(elements, kInPairs),
                  values, stride, scratch, nothing);
  } else if (rows > K::kFewRows && K::kPacks) {
    const PackedValue<K>* packed[kKeyBlock];
    Nothing nothing;
    pack_values<K>(value_rows, count, elements, reinterpret_cast<PackedValue<K>*>(scratch.packed),
                   stride, packed, next);
    add_all<K>(p, rows, Rows<PackedValue<K>>{packed, 0}, count, rounded_up(elements, K::kChunk),
               values, stride, nothing);
  } else {
    add_all<K>(p, rows, value_rows, count, elements, values, stride, next);
  }
}
