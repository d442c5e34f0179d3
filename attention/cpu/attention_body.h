// Attention of one task; compiled once for each instruction set (common/cpu/isa.h).
//
// Keys are taken kKeyBlock at a time: scores of all rows, their softmax with a running maximum, and
// the product with the values. Scores are dot products along the elements, with their sums across
// the lanes at the end; the product with values has the elements of out in its lanes. Queries of
// bfloat16 meet pairs of bfloat16 where the machine multiplies these, and so do their exponentials;
// all other products are of floats.

#include "../../blocks/product/cpu/operands.h"
#include "../../blocks/rows/cpu/activation.h"

static_assert(kKeyBlock % kBlock == 0, "");

// The score of a key that a row does not see, and the least that counts as a score: the exponential
// of their difference is 0, and so is that of a row that has seen nothing.
constexpr float kUnseen = -3e38f;
constexpr float kLeast = -1e38f;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- Vectors -----------------------------------------------------------------------------------

ROCM_KERNELS_VECTOR F32 larger_of(F32 a, F32 b) { return where_negative(a - b, b, a); }

ROCM_KERNELS_VECTOR float largest_value(const Block& a) {
  return largest(larger_of(larger_of(a.v[0], a.v[1]), larger_of(a.v[2], a.v[3])));
}

// e^v for v <= 0: 0 below -86, and NaN for NaN.
ROCM_KERNELS_VECTOR Block exp_of_negative(const Block& v) {
  const Block power = fma(v, all(0.0f), exp(v));
  return where_negative(v + all(86.0f), all(0.0f), power);
}

// tanh to 2e-7: near 0 an odd polynomial, since 1 - 2 / (e^2x + 1) cancels.
ROCM_KERNELS_VECTOR Block tanh(const Block& x) {
  const Block magnitude = where_negative(x, -x, x);
  const Block square = x * x;
  Block p = all(0.00205446454f);
  p = fma(p, square, all(-0.00807907525f));
  p = fma(p, square, all(0.0216602553f));
  p = fma(p, square, all(-0.0539392456f));
  p = fma(p, square, all(0.133331448f));
  p = fma(p, square, all(-0.333333284f));
  const Block near = fma(p * square, magnitude, magnitude);
  const Block far = all(1.0f) - all(2.0f) / (exp(magnitude + magnitude) + all(1.0f));
  const Block result = where_negative(magnitude - all(0.65f), near, far);
  return where_negative(x, -result, result);
}

// ---- Rows in memory ----------------------------------------------------------------------------

// Rows of a sequence's keys or values of one head.
template <class T>
struct KeyRows {
  const T* data;
  int64_t row_stride;
  int64_t page_stride;
  const int32_t* pages;  // nullptr: the rows follow each other
  int64_t page_size;

  static KeyRows of(const AttentionArgs& args, const AttentionRows& rows,
                    const AttentionTask& task) {
    const T* data = static_cast<const T*>(rows.data) + task.kv_head * rows.head_stride;
    const int32_t* pages = nullptr;
    if (args.block_table != nullptr) {
      pages = args.block_table + task.sequence * args.block_table_stride;
    } else if (args.cu_seqlens_k == nullptr) {
      data += task.sequence * rows.batch_stride;
    }
    return {data + task.k_begin * rows.row_stride, rows.row_stride, rows.batch_stride, pages,
            args.page_size};
  }

  // Where rows [begin, begin + count) lie.
  void find(int64_t begin, int64_t count, const T** rows) const {
    if (pages == nullptr) {
      for (int64_t j = 0; j < count; ++j) rows[j] = data + (begin + j) * row_stride;
      return;
    }
    int64_t page = begin / page_size, row = begin % page_size;
    for (int64_t j = 0; j < count;) {
      const T* const in_page = data + pages[page++] * page_stride;
      for (; row < page_size && j < count; ++row, ++j) rows[j] = in_page + row * row_stride;
      row = 0;
    }
  }
};

// Rows that are read next. They lie apart from each other, so the machine does not foresee them.
template <class T>
struct Ahead {
  const T* const* rows;
  int64_t count;
  int64_t elements;

  // Elements [from, to) of rows [first, first + some).
  ROCM_KERNELS_VECTOR void fetch(int64_t first, int64_t some, int64_t from, int64_t to) const {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    to = smaller(to, elements);
    for (int64_t j = first; j < smaller(first + some, count); ++j) {
      for (int64_t at = from; at < to; at += kLine) __builtin_prefetch(rows[j] + at);
    }
  }
};

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
ROCM_KERNELS_VECTOR void decode_values(const T* const* rows, int64_t e, int64_t count,
                                       F32Multiplier::Operand* v) {
  if (kWhole) {
    Decode<F32Multiplier, T>::chunk(rows[0] + e, v);
  } else {
    decode_rest<F32Multiplier, T>(rows[0] + e, count, v);
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
ROCM_KERNELS_VECTOR void decode_values(const BFloat16* const* rows, int64_t e, int64_t count,
                                       __m512i* v) {
  const __m512i a = kWhole ? _mm512_loadu_si512(rows[0] + e) : load_bytes(rows[0] + e, 2 * count);
  const __m512i b = kWhole ? _mm512_loadu_si512(rows[1] + e) : load_bytes(rows[1] + e, 2 * count);
  v[0] = _mm512_unpacklo_epi16(a, b);
  v[1] = _mm512_unpackhi_epi16(a, b);
}

template <class K, bool kWhole, bool kFnuz>
ROCM_KERNELS_VECTOR void decode_values(const Fp8<kFnuz>* const* rows, int64_t e, int64_t count,
                                       __m512i* v) {
  __m512i a[2], b[2];
  if (kWhole) {
    Decode<BF16Multiplier, Fp8<kFnuz>>::chunk(rows[0] + e, a);
    Decode<BF16Multiplier, Fp8<kFnuz>>::chunk(rows[1] + e, b);
  } else {
    decode_rest<BF16Multiplier, Fp8<kFnuz>>(rows[0] + e, count, a);
    decode_rest<BF16Multiplier, Fp8<kFnuz>>(rows[1] + e, count, b);
  }
  for (int i = 0; i < 2; ++i) {
    v[2 * i] = _mm512_unpacklo_epi16(a[i], b[i]);
    v[2 * i + 1] = _mm512_unpackhi_epi16(a[i], b[i]);
  }
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
ROCM_KERNELS_VECTOR void load_values(const T* const* rows, int64_t e, int64_t count,
                                     typename K::Multiplier::Operand* v) {
  if constexpr (kPacked<T>) {
    const typename K::Multiplier::Value* const from = &rows[0]->value + e * K::kPairs;
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

// Keys, `stride` elements apart, with zeros to the end of a chunk; and where they are.
template <class K, class T>
void pack_keys(const T* const* rows, int64_t count, int64_t elements,
               typename K::Multiplier::Value* to, int64_t stride,
               const typename K::Stored** packed) {
  using Multiplier = typename K::Multiplier;
  for (int64_t j = 0; j < kKeyBlock; ++j) {
    packed[j] = reinterpret_cast<const typename K::Stored*>(to + smaller(j, count - 1) * stride);
  }
  for (int64_t j = 0; j < count; ++j, to += stride) {
    for (int64_t d = 0; d < elements; d += Multiplier::kChunk) {
      typename Multiplier::Operand k[Multiplier::kParts];
      if (d + Multiplier::kChunk <= elements) {
        Decode<Multiplier, T>::chunk(rows[j] + d, k);
      } else {
        decode_rest<Multiplier, T>(rows[j] + d, elements - d, k);
      }
      for (int part = 0; part < Multiplier::kParts; ++part) {
        Multiplier::store_operand(to + d + part * Multiplier::kWidth, k[part]);
      }
    }
  }
}

template <class K, class T>
void pack_values(const T* const* rows, int64_t count, int64_t elements, PackedValue<K>* to,
                 int64_t stride, const PackedValue<K>** packed) {
  using Multiplier = typename K::Multiplier;
  for (int64_t j = 0; j < count; j += K::kPairs, to += K::kPairs * stride) {
    packed[j] = to;
    for (int64_t e = 0; e < elements; e += K::kChunk) {
      typename Multiplier::Operand v[K::kParts];
      if (e + K::kChunk <= elements) {
        decode_values<K, true>(rows + j, e, K::kChunk, v);
      } else {
        decode_values<K, false>(rows + j, e, elements - e, v);
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
#else
  for (int i = 0; i < kTileSums; ++i) totals[i] = F32Multiplier::total(sums[i]);
#endif
}

template <class Multiplier, int kRows, int kKeys, bool kWhole, class T>
ROCM_KERNELS_VECTOR void score_chunk(const typename Multiplier::Value* q, int64_t q_stride,
                                     const T* const* keys, int64_t d, int64_t elements,
                                     typename Multiplier::Sum* sums) {
  constexpr int kParts = Multiplier::kParts;
  typename Multiplier::Operand a[kRows][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int part = 0; part < kParts; ++part) {
      a[r][part] = Multiplier::load_operand(q + r * q_stride + d + part * Multiplier::kWidth);
    }
  }
  for (int j = 0; j < kKeys; ++j) {
    typename Multiplier::Operand k[kParts];
    if (kWhole) {
      Decode<Multiplier, T>::chunk(keys[j] + d, k);
    } else {
      decode_rest<Multiplier, T>(keys[j] + d, elements - d, k);
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
// pointers too: scores[r * kKeyBlock + j]. Meanwhile rows `ahead` are on their way.
template <class Multiplier, int kRows, class T, class Next>
void score_rows(const typename Multiplier::Value* q, int64_t q_stride, const T* const* keys,
                int64_t count, int64_t elements, float* scores, Ahead<Next> ahead) {
  constexpr int kChunk = Multiplier::kChunk;
  constexpr int kKeys = kTileSums / (kRows == 3 ? 4 : kRows);
  for (int64_t j = 0; j < count; j += kKeys) {
    ahead.fetch(j, kKeys, 0, ahead.elements);
    typename Multiplier::Sum sums[kTileSums];
    for (int i = 0; i < kTileSums; ++i) sums[i] = Multiplier::zero();
    int64_t d = 0;
    for (; d + kChunk <= elements; d += kChunk) {
      score_chunk<Multiplier, kRows, kKeys, true>(q, q_stride, keys + j, d, elements, sums);
    }
    if (d < elements) {
      score_chunk<Multiplier, kRows, kKeys, false>(q, q_stride, keys + j, d, elements, sums);
    }
    alignas(64) float totals[kTileSums];
    total_lanes(sums, totals);
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(scores + r * kKeyBlock + j, totals + r * kKeys, kKeys * sizeof(float));
    }
  }
}

template <class Multiplier, class T, class Next>
void score(const typename Multiplier::Value* q, int64_t rows, int64_t q_stride,
           const T* const* keys, int64_t count, int64_t elements, float* scores,
           Ahead<Next> ahead) {
  for (int64_t r = 0; r < rows; r += 4) {
    const typename Multiplier::Value* const from = q + r * q_stride;
    float* const to = scores + r * kKeyBlock;
    const int64_t left = rows - r;
    if (left >= 4) score_rows<Multiplier, 4>(from, q_stride, keys, count, elements, to, ahead);
    if (left == 3) score_rows<Multiplier, 3>(from, q_stride, keys, count, elements, to, ahead);
    if (left == 2) score_rows<Multiplier, 2>(from, q_stride, keys, count, elements, to, ahead);
    if (left == 1) score_rows<Multiplier, 1>(from, q_stride, keys, count, elements, to, ahead);
    ahead.count = 0;
  }
}

// ---- Softmax -----------------------------------------------------------------------------------

// Which keys rows see, and what becomes of a score.
struct Sight {
  int64_t group, offset;  // row i * group + g stands at key i + offset
  int64_t left, right;
  float factor, softcap;
};

// Makes exponentials of the scores of keys [first, first + count), as Weight in the same rows of
// memory, and rescales what there is.
template <class Weight>
void softmax(const Sight& sight, const AttentionTask& task, int64_t first, int64_t count,
             float* scores, AttentionState state, int64_t value_stride) {
  const Block factor = all(sight.factor);
  for (int64_t r = 0; r < task.rows; ++r, scores += kKeyBlock) {
    const int64_t position = (task.row + r) / sight.group + sight.offset - first;
    const int64_t begin = sight.left < 0 ? 0 : larger(position - sight.left, 0);
    const int64_t end = sight.right < 0 ? count : smaller(position + sight.right + 1, count);
    Block most = all(kUnseen);
    for (int64_t j = 0; j < kKeyBlock; j += kBlock) {
      Block s = load_block<float>(scores + j) * factor;
      if (sight.softcap > 0) s = tanh(s * all(1.0f / sight.softcap)) * all(sight.softcap);
      store_block<float>(scores + j, s);
    }
    for (int64_t j = 0; j < smaller(begin, kKeyBlock); ++j) scores[j] = kUnseen;
    for (int64_t j = larger(end, 0); j < kKeyBlock; ++j) scores[j] = kUnseen;
    for (int64_t j = 0; j < kKeyBlock; j += kBlock) {
      const Block s = load_block<float>(scores + j);
      for (int i = 0; i < kVectors; ++i) most.v[i] = larger_of(s.v[i], most.v[i]);
    }
    float now = largest_value(most);
    if (now < state.most[r]) now = state.most[r];
    const float base = now < kLeast ? kLeast : now;
    Block total = all(0.0f);
    for (int64_t j = 0; j < kKeyBlock; j += kBlock) {
      const Block p = exp_of_negative(load_block<float>(scores + j) - all(base));
      Weight* const weights = reinterpret_cast<Weight*>(scores) + j;
      for (int i = 0; i < kVectors; ++i) store(weights + i * kLanes, p.v[i]);
      total = total + p;
    }
    if (now != state.most[r]) {
      float by[kBlock];
      store_block<float>(by, exp_of_negative(all(state.most[r] - base)));
      state.most[r] = now;
      state.total[r] *= by[0];
      float* const values = state.values + r * value_stride;
      for (int64_t e = 0; e < value_stride; e += kLanes) {
        store(values + e, load(values + e) * set1(by[0]));
      }
    }
    state.total[r] += sum(total);
  }
}

// ---- Values ------------------------------------------------------------------------------------

// Exponentials of a row lie where its scores did.
template <class K>
constexpr int64_t kWeightStride = kKeyBlock * sizeof(float) / sizeof(typename K::Weight);

// Adds p times the values of `count` keys to kChunks chunks of kRows rows.
template <class K, int kRows, int kChunks, bool kWhole, class T, class Next>
ROCM_KERNELS_VECTOR void add_chunks(const typename K::Weight* p, const T* const* rows,
                                    int64_t count, int64_t e, int64_t elements, float* values,
                                    int64_t stride, Ahead<Next> ahead) {
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
    ahead.fetch(j, K::kPairs, e, e + kChunks * kChunk);
    for (int c = 0; c < kChunks; ++c) {
      typename Multiplier::Operand v[kParts];
      load_values<K, kWhole>(rows + j, e + c * kChunk, elements - e, v);
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
void add_rows(const typename K::Weight* p, const T* const* rows, int64_t count, int64_t elements,
              float* values, int64_t stride, Ahead<Next> ahead) {
  constexpr int kChunk = K::kChunk;
  constexpr int kFit = kTileSums / (kRows == 3 ? 4 : kRows) / K::kParts;
  constexpr int kMost = kFit > 1 ? kFit : 1;
  constexpr int kChunks = kMost > 4 ? 4 : kMost;
  int64_t e = 0;
  for (; e + kChunks * kChunk <= elements; e += kChunks * kChunk) {
    add_chunks<K, kRows, kChunks, true>(p, rows, count, e, elements, values, stride, ahead);
  }
  for (; e + kChunk <= elements; e += kChunk) {
    add_chunks<K, kRows, 1, true>(p, rows, count, e, elements, values, stride, ahead);
  }
  if (e < elements) {
    add_chunks<K, kRows, 1, false>(p, rows, count, e, elements, values, stride, ahead);
  }
}

// There are pointers for whole pairs of keys.
template <class K, class T, class Next>
void add_values(const typename K::Weight* p, int64_t rows, const T* const* value_rows,
                int64_t count, int64_t elements, float* values, int64_t stride, Ahead<Next> ahead) {
  for (int64_t r = 0; r < rows; r += 4) {
    const typename K::Weight* const from = p + r * kWeightStride<K>;
    float* const to = values + r * stride;
    const int64_t left = rows - r;
    if (left >= 4) add_rows<K, 4>(from, value_rows, count, elements, to, stride, ahead);
    if (left == 3) add_rows<K, 3>(from, value_rows, count, elements, to, stride, ahead);
    if (left == 2) add_rows<K, 2>(from, value_rows, count, elements, to, stride, ahead);
    if (left == 1) add_rows<K, 1>(from, value_rows, count, elements, to, stride, ahead);
    ahead.count = 0;
  }
}

// ---- States ------------------------------------------------------------------------------------

inline void clear(AttentionState state, int64_t rows, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    state.most[r] = kUnseen;
    state.total[r] = 0.0f;
  }
  for (int64_t e = 0; e < rows * stride; ++e) state.values[e] = 0.0f;
}

// state becomes that of its own keys and of those of `next`.
void join_states(AttentionState state, AttentionState next, int64_t rows, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const float most = state.most[r] < next.most[r] ? next.most[r] : state.most[r];
    const float base = most < kLeast ? kLeast : most;
    float by[kBlock], next_by[kBlock];
    store_block<float>(by, exp_of_negative(all(state.most[r] - base)));
    store_block<float>(next_by, exp_of_negative(all(next.most[r] - base)));
    state.most[r] = most;
    state.total[r] = state.total[r] * by[0] + next.total[r] * next_by[0];
    float* const values = state.values + r * stride;
    const float* const added = next.values + r * stride;
    for (int64_t e = 0; e < stride; e += kLanes) {
      store(values + e, fma(load(added + e), set1(next_by[0]), load(values + e) * set1(by[0])));
    }
  }
}

inline float sink_of(const AttentionArgs& args, int64_t head) {
  if (args.sink_dtype == DType::kFloat32) return static_cast<const float*>(args.sinks)[head];
  if (args.sink_dtype == DType::kFloat16) {
    return sum(load(static_cast<const Float16*>(args.sinks) + head, 1));
  }
  return sum(load(static_cast<const BFloat16*>(args.sinks) + head, 1));
}

// The values of a state, from the order of their kind.
template <class K>
void put_in_order(float* values, int64_t elements) {
  constexpr int kQuad = 4, kQuads = K::kChunk / kQuad;
  for (int64_t e = 0; e < elements; e += K::kChunk) {
    float chunk[K::kChunk];
    __builtin_memcpy(chunk, values + e, sizeof(chunk));
    for (int quad = 0; quad < kQuads; ++quad) {
      const int part = quad % K::kParts, lane = quad / K::kParts * kQuad;
      __builtin_memcpy(values + e + quad * kQuad, chunk + part * kLanes + lane,
                       kQuad * sizeof(float));
    }
  }
}

// Rows of out and lse.
template <class K, class Q>
void finish(const AttentionArgs& args, const AttentionTask& task, AttentionState state) {
  float gain = K::kGain;
  const int64_t group = args.heads / args.kv_heads, stride = aligned_size(args.head_dim_v);
  const bool ragged = args.cu_seqlens_q != nullptr;
  if (args.v_descale != nullptr) {
    gain *= args.v_descale[task.sequence * args.v_descale_batch_stride +
                           task.kv_head * args.v_descale_head_stride];
  }
  for (int64_t r = 0; r < task.rows; ++r) {
    const int64_t i = task.q_begin + (task.row + r) / group;
    const int64_t head = task.kv_head * group + (task.row + r) % group;
    float most = state.most[r], total = state.total[r], factor = 1.0f;
    if (args.sinks != nullptr) {
      const float sink = sink_of(args, head), both = sink < most ? most : sink;
      if (both >= kLeast) {
        float by[kBlock], of_sink[kBlock];
        store_block<float>(by, exp_of_negative(all(most - both)));
        store_block<float>(of_sink, exp_of_negative(all(sink - both)));
        factor = by[0];
        total = total * factor + of_sink[0];
        most = both;
      }
    }
    if (args.lse != nullptr) {
      args.lse[(ragged ? 0 : task.sequence * args.lse_batch_stride) + head * args.lse_head_stride +
               i] = total == 0.0f ? -__builtin_inff() : most + __builtin_logf(total);
    }
    factor = total == 0.0f ? 0.0f : factor / total * gain;
    Q* const out = static_cast<Q*>(args.out) +
                   (ragged ? 0 : task.sequence * args.out_batch_stride) + i * args.out_row_stride +
                   head * args.out_head_stride;
    float* const values = state.values + r * stride;
    if constexpr (!K::kInOrder) put_in_order<K>(values, args.head_dim_v);
    int64_t e = 0;
    for (; e + kLanes <= args.head_dim_v; e += kLanes) {
      store(out + e, load(values + e) * set1(factor));
    }
    if (e < args.head_dim_v) {
      store(out + e, load(values + e) * set1(factor), static_cast<int>(args.head_dim_v - e));
    }
  }
}

// ---- A task ------------------------------------------------------------------------------------

// Finds the keys from `begin` to the end of their block or `last`, with pointers for a whole block.
template <class T>
int64_t find_block(const KeyRows<T>& k, int64_t begin, int64_t last, const T** rows) {
  if (begin >= last) return 0;
  const int64_t count = smaller((begin / kKeyBlock + 1) * kKeyBlock, last) - begin;
  k.find(begin, count, rows);
  for (int64_t j = count; j < kKeyBlock; ++j) rows[j] = rows[count - 1];
  return count;
}

// The state of keys [first, last) of a split, from nothing.
template <class K, class T>
void attend_split(const AttentionArgs& args, const AttentionTask& task, const Sight& sight,
                  const typename K::Multiplier::Value* q, int64_t first, int64_t last,
                  AttentionState state) {
  alignas(64) float scores[kMaxTaskRows * kKeyBlock];
  const T* key_rows[kKeyBlock];
  const T* value_rows[kKeyBlock + 1];  // and one for a pair's second
  const KeyRows<T> k = KeyRows<T>::of(args, args.k, task), v = KeyRows<T>::of(args, args.v, task);
  const int64_t q_stride = aligned_size(args.head_dim), stride = aligned_size(args.head_dim_v);
  clear(state, task.rows, stride);
  using Multiplier = typename K::Multiplier;
  using Weight = typename K::Weight;
  alignas(64) typename Multiplier::Value packed[kKeyBlock * aligned_size(kMaxHeadDim)];
  const typename K::Stored* packed_keys[kKeyBlock];
  const PackedValue<K>* packed_values[kKeyBlock];
  const bool many = task.rows > kFewRows;
  const int64_t size = args.head_dim, size_v = args.head_dim_v;
  int64_t count = find_block(k, first, last, key_rows);
  for (int64_t begin = first; begin < last;) {
    v.find(begin, count, value_rows);
    value_rows[count] = value_rows[count - 1];
    const Ahead<T> values_ahead{value_rows, count, size_v};
    if (many && !kSame<T, typename K::Stored>) {
      pack_keys<K>(key_rows, count, size, packed, q_stride, packed_keys);
      score<Multiplier>(q, task.rows, q_stride, packed_keys, count,
                        rounded_up(size, Multiplier::kChunk), scores, values_ahead);
    } else {
      score<Multiplier>(q, task.rows, q_stride, key_rows, count, size, scores, values_ahead);
    }
    softmax<Weight>(sight, task, begin, count, scores, state, stride);
    const int64_t end = begin + count, next = find_block(k, end, last, key_rows);
    const Ahead<T> keys_ahead{key_rows, next, size};
    const Weight* const weights = reinterpret_cast<const Weight*>(scores);
    if (many && !kSame<T, float>) {
      pack_values<K>(value_rows, count, size_v, reinterpret_cast<PackedValue<K>*>(packed), stride,
                     packed_values);
      add_values<K>(weights, task.rows, packed_values, count, rounded_up(size_v, K::kChunk),
                    state.values, stride, keys_ahead);
    } else {
      add_values<K>(weights, task.rows, value_rows, count, size_v, state.values, stride,
                    keys_ahead);
    }
    begin = end;
    count = next;
  }
}

// Splits [first, last) of a task. Into `result`, or out where that has no memory.
template <class T, class Q>
void attend(const AttentionArgs& args, const AttentionTask& task, int64_t first, int64_t last,
            AttentionState result) {
  using K = Kind<Q, T>;
  using Multiplier = typename K::Multiplier;
  alignas(64) typename Multiplier::Value q[kMaxTaskElements];
  alignas(64) float own[kMaxTaskElements + 2 * kMaxTaskRows];
  alignas(64) float next[kMaxTaskElements + 2 * kMaxTaskRows];
  const int64_t group = args.heads / args.kv_heads, stride = aligned_size(args.head_dim_v);
  Sight sight{group,
              task.k_count - task.q_count,
              args.window_left,
              args.window_right,
              args.scale * Decode<Multiplier, T>::kGain,
              args.softcap};
  if (args.k_descale != nullptr) {
    sight.factor *= args.k_descale[task.sequence * args.k_descale_batch_stride +
                                   task.kv_head * args.k_descale_head_stride];
  }
  load_queries<Multiplier, typename K::Order, Q>(args, task, q);
  const bool ends = result.values == nullptr;
  const AttentionState state = ends ? AttentionState::at(own, task.rows) : result;
  if (first == last) clear(state, task.rows, stride);
  for (int64_t split = first; split < last; ++split) {
    const AttentionState into = split == first ? state : AttentionState::at(next, task.rows);
    attend_split<K, T>(args, task, sight, q, larger(split * kSplitKeys, task.first_key),
                       smaller((split + 1) * kSplitKeys, task.last_key), into);
    if (split != first) join_states(state, into, task.rows, stride);
  }
  if (ends) finish<K, Q>(args, task, state);
}

template <class Q>
void attend_keys(const AttentionArgs& args, const AttentionTask& task, int64_t first, int64_t last,
                 AttentionState result) {
  if (args.kv_dtype == DType::kFloat8E4M3FN) {
    return attend<Fp8<false>, Q>(args, task, first, last, result);
  }
  if (args.kv_dtype == DType::kFloat8E4M3FNUZ) {
    return attend<Fp8<true>, Q>(args, task, first, last, result);
  }
  return attend<Q, Q>(args, task, first, last, result);
}

inline void attend_task(const AttentionArgs& args, const AttentionTask& task, int64_t first,
                        int64_t last, AttentionState result) {
  if (args.q_dtype == DType::kFloat32) return attend_keys<float>(args, task, first, last, result);
  if (args.q_dtype == DType::kFloat16) return attend_keys<Float16>(args, task, first, last, result);
  return attend_keys<BFloat16>(args, task, first, last, result);
}

// Joins the states of a task's splits, which follow each other in memory, and ends the task.
template <class Q>
void join_keys(const AttentionArgs& args, const AttentionTask& task, float* states) {
  const int64_t stride = aligned_size(args.head_dim_v);
  const int64_t floats = AttentionState::floats(task.rows, args.head_dim_v);
  const AttentionState state = AttentionState::at(states, task.rows);
  for (int64_t split = 1; split < task.splits(); ++split) {
    join_states(state, AttentionState::at(states + split * floats, task.rows), task.rows, stride);
  }
  if (args.kv_dtype == DType::kFloat8E4M3FN) {
    return finish<Kind<Q, Fp8<false>>, Q>(args, task, state);
  }
  if (args.kv_dtype == DType::kFloat8E4M3FNUZ) {
    return finish<Kind<Q, Fp8<true>>, Q>(args, task, state);
  }
  return finish<Kind<Q, Q>, Q>(args, task, state);
}

inline void join_task(const AttentionArgs& args, const AttentionTask& task, float* states) {
  if (args.q_dtype == DType::kFloat32) return join_keys<float>(args, task, states);
  if (args.q_dtype == DType::kFloat16) return join_keys<Float16>(args, task, states);
  return join_keys<BFloat16>(args, task, states);
}
