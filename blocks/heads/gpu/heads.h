// Device code for heads of new tokens on both GPU families: what a lane knows, loads, rotates and
// stores of one. The maths: rope_and_cache/rope_and_cache.h.
//
// Halves: piece p has elements 8 p .. 8 p + 7 and those half a rotation on. Neighbours, and what
// does not rotate: 16 elements side by side. So no lane asks another but for the norm, and every
// access is 16 bytes.
#pragma once

#include "../../../common/gpu/device.h"
#include "../../../common/gpu/math.h"
#include "../../../common/gpu/reduce.h"
#include "../../../common/gpu/vector.h"
#include "../args.h"

namespace rocm_kernels {

constexpr int kPiece = 16;  // elements of a lane

// ---- A head ------------------------------------------------------------------------------------

enum class HeadKind { kQuery, kKey, kValue, kNone };

// What a head of a token reads and writes; nullptr: not.
struct Head {
  HeadKind kind = HeadKind::kNone;
  int64_t from = 0;              // its first element in q, k or v
  const void* data = nullptr;    // q, k or v
  const void* weight = nullptr;  // of its norm
  void* out = nullptr;           // of the inputs' dtype
  int64_t out_at = 0;
  void* cache = nullptr;
  int64_t cache_at = 0;
  float inverse_scale = 1.0f;  // of an FP8 cache
  int elements = 0;
};

ROCM_KERNELS_DEVICE int64_t at_head(const HeadRows& rows, int64_t b, int64_t row, int64_t head) {
  return b * rows.batch_stride + row * rows.row_stride + head * rows.head_stride;
}

// A head that knows what it reads, for which no memory is asked.
ROCM_KERNELS_DEVICE Head source_of(const RopeAndCacheArgs& args, int b, int row, int index) {
  Head head;
  const int heads = static_cast<int>(args.heads), kv_heads = static_cast<int>(args.kv_heads);
  if (index < heads) {
    head.kind = HeadKind::kQuery;
    head.data = args.q.data;
    head.from = at_head(args.q, b, row, index);
    head.weight = args.q_weight;
    head.elements = static_cast<int>(args.head_dim);
  } else if (index < heads + kv_heads) {
    head.kind = HeadKind::kKey;
    head.data = args.k.data;
    head.from = at_head(args.k, b, row, index - heads);
    head.weight = args.k_weight;
    head.elements = static_cast<int>(args.head_dim);
  } else if (index < heads + 2 * kv_heads && args.v_cache.data != nullptr) {
    head.kind = HeadKind::kValue;
    head.data = args.v.data;
    head.from = at_head(args.v, b, row, index - heads - kv_heads);
    head.elements = static_cast<int>(args.head_dim_v);
  }
  return head;
}

// Where key or value number `kv` goes.
ROCM_KERNELS_DEVICE void send_new(const RopeAndCacheArgs& args, int b, int row,
                                  const CachePlace& place, bool is_key, int kv, Head& head) {
  if (is_key) {
    head.out = args.k_out.data;
    head.out_at = at_head(args.k_out, b, row, kv);
  }
  if (place.page < 0) return;
  const HeadRows& cache = is_key ? args.k_cache : args.v_cache;
  head.cache = cache.data;
  head.cache_at = at_head(cache, place.page, place.row, kv);
  const float* scales = is_key ? args.k_scale : args.v_scale;
  const int64_t at = is_key ? b * args.k_scale_batch_stride + kv * args.k_scale_head_stride
                            : b * args.v_scale_batch_stride + kv * args.v_scale_head_stride;
  if (scales != nullptr) head.inverse_scale = 1.0f / scales[at];
}

ROCM_KERNELS_DEVICE Head head_of(const RopeAndCacheArgs& args, int b, int row,
                                 const CachePlace& place, int index) {
  Head head = source_of(args, b, row, index);
  if (head.kind == HeadKind::kNone) return head;
  if (head.kind == HeadKind::kQuery) {
    head.out = args.out.data;
    head.out_at = at_head(args.out, b, row, index);
    return head;
  }
  const bool is_key = head.kind == HeadKind::kKey;
  const int kv = index - static_cast<int>(is_key ? args.heads : args.heads + args.kv_heads);
  send_new(args, b, row, place, is_key, kv, head);
  return head;
}

// Where the angles of a token lie.
struct AnglesAt {
  int64_t cos = 0, sin = 0;
  bool exist = true;
};

ROCM_KERNELS_DEVICE AnglesAt angles_at(const RopeAndCacheArgs& args, int b, int row) {
  AnglesAt angles;
  int64_t of_batch = b, of_row = row;
  if (args.positions.data != nullptr) {
    of_batch = 0;
    of_row = position_of(args, b, row);
    angles.exist = of_row >= 0 && of_row < args.max_positions;
    if (!angles.exist) of_row = 0;
  }
  angles.cos = of_batch * args.cos_batch_stride + of_row * args.cos_row_stride;
  angles.sin = of_batch * args.sin_batch_stride + of_row * args.sin_row_stride;
  return angles;
}

ROCM_KERNELS_DEVICE float rstd_of(float squares, const RopeAndCacheArgs& args) {
  return reciprocal_sqrt(squares / static_cast<float>(args.head_dim) + args.eps);
}

// ---- Whole pieces ------------------------------------------------------------------------------

// Eight elements that lie side by side, as float32.
template <typename T>
ROCM_KERNELS_DEVICE void load_eight(const T* from, float (&values)[8]) {
  constexpr int kCount = kVectorElements<T>;
#pragma unroll
  for (int i = 0; i < 8; i += kCount) {
    float part[kCount];
    unpack<T>(load<Touch::kAgain, Vector>(from + i), part);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[i + j] = part[j];
  }
}

ROCM_KERNELS_DEVICE void load_eight(const void* data, DType dtype, int64_t at, float (&values)[8]) {
  if (dtype == DType::kFloat32) {
    load_eight(static_cast<const float*>(data) + at, values);
  } else if (dtype == DType::kFloat16) {
    load_eight(static_cast<const float16*>(data) + at, values);
  } else {
    load_eight(static_cast<const bfloat16*>(data) + at, values);
  }
}

// Eight numbers of cos or sin as they lie in memory: what is not looked at is not waited for.
struct EightAngles {
  Vector low, high;

  ROCM_KERNELS_DEVICE void ask(const void* table, DType dtype, int64_t at) {
    if (dtype == DType::kFloat32) {
      const float* const from = static_cast<const float*>(table) + at;
      low = load<Touch::kAgain, Vector>(from);
      high = load<Touch::kAgain, Vector>(from + 4);
    } else {
      low = load<Touch::kAgain, Vector>(static_cast<const uint16_t*>(table) + at);
    }
  }
  ROCM_KERNELS_DEVICE void look(DType dtype, float (&values)[8]) const {
    if (dtype == DType::kFloat32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Word<float>::unpack(low.word[i], values + i);
        Word<float>::unpack(high.word[i], values + 4 + i);
      }
    } else if (dtype == DType::kFloat16) {
      unpack<float16>(low, values);
    } else {
      unpack<bfloat16>(low, values);
    }
  }
};

// Eight elements of a head, likewise.
template <typename T>
struct EightElements {
  static constexpr int kCount = kVectorElements<T>;
  Vector vector[8 / kCount];

  ROCM_KERNELS_DEVICE void ask(bool there, const T* from) {
#pragma unroll
    for (int i = 0; i < 8 / kCount; ++i) {
      vector[i] = load_if<Touch::kAgain, Vector>(there, from + i * kCount);
    }
  }
  ROCM_KERNELS_DEVICE void look(float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 8 / kCount; ++i) {
      float part[kCount];
      unpack<T>(vector[i], part);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[i * kCount + j] = part[j];
    }
  }
};

template <typename T>
ROCM_KERNELS_DEVICE void store_eight(T* to, const float (&values)[8]) {
  constexpr int kCount = kVectorElements<T>;
#pragma unroll
  for (int i = 0; i < 8; i += kCount) {
    float part[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) part[j] = values[i + j];
    store<Touch::kAgain>(to + i, pack<T>(part));
  }
}

struct EightCodes {
  uint32_t word[2];
};

template <bool kFnuz>
ROCM_KERNELS_DEVICE EightCodes eight_codes(float inverse, const float (&z)[8]) {
  EightCodes codes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    codes.word[i] = fp8x4_from_float<kFnuz>(z[4 * i] * inverse, z[4 * i + 1] * inverse,
                                            z[4 * i + 2] * inverse, z[4 * i + 3] * inverse);
  }
  return codes;
}

template <typename T>
ROCM_KERNELS_DEVICE void store_eight(const RopeAndCacheArgs& args, const Head& head, int at,
                                     const float (&z)[8]) {
  if (head.out != nullptr) store_eight(static_cast<T*>(head.out) + head.out_at + at, z);
  if (head.cache == nullptr) return;
  if (args.cache_dtype == DType::kFloat8E4M3FN) {
    store<Touch::kAgain>(static_cast<uint8_t*>(head.cache) + head.cache_at + at,
                         eight_codes<false>(head.inverse_scale, z));
  } else if (args.cache_dtype == DType::kFloat8E4M3FNUZ) {
    store<Touch::kAgain>(static_cast<uint8_t*>(head.cache) + head.cache_at + at,
                         eight_codes<true>(head.inverse_scale, z));
  } else {
    store_eight(static_cast<T*>(head.cache) + head.cache_at + at, z);
  }
}

// Where the two times eight elements of a piece of a head begin, and whether they rotate.
struct PieceAt {
  int first, second;
  bool rotates, halves;

  ROCM_KERNELS_DEVICE static PieceAt of(const RopeAndCacheArgs& args, int piece, bool may_rotate) {
    const bool rotates = may_rotate && piece * kPiece < args.rotary_dim;
    if (rotates && !args.interleaved) {
      return {piece * 8, piece * 8 + static_cast<int>(args.rotary_dim) / 2, true, true};
    }
    return {piece * kPiece, piece * kPiece + 8, rotates, false};
  }
};

// A head's norm: its pieces are those of a team of 1 << shift lanes. All lanes of the wave ask,
// whatever their heads are; those of none have zeros.
ROCM_KERNELS_DEVICE void normalise_piece(const RopeAndCacheArgs& args, const void* weight,
                                         const PieceAt& at, int shift, float (&x)[8],
                                         float (&y)[8]) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += x[i] * x[i] + y[i] * y[i];
  const Sum sum;
  if (shift >= 1) squares = sum(squares, other_half<1>(squares));
  if (shift >= 2) squares = sum(squares, other_half<2>(squares));
  if (shift >= 3) squares = sum(squares, other_half<4>(squares));
  if (shift >= 4) squares = sum(squares, other_half<8>(squares));
  if (shift >= 5) squares = sum(squares, other_half<16>(squares));
  if (weight == nullptr) return;
  const float rstd = rstd_of(squares, args);
  float factor[8];
  load_eight(weight, args.weight_dtype, at.first, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = x[i] * rstd * (factor[i] + args.weight_offset);
  load_eight(weight, args.weight_dtype, at.second, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = y[i] * rstd * (factor[i] + args.weight_offset);
}

ROCM_KERNELS_DEVICE void rotate_piece(const PieceAt& at, const float (&cos)[8],
                                      const float (&sin)[8], float (&x)[8], float (&y)[8]) {
  if (at.halves) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = x[i], c = y[i];
      x[i] = a * cos[i] - c * sin[i];
      y[i] = c * cos[i] + a * sin[i];
    }
  } else if (at.rotates) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = x[2 * i], c = x[2 * i + 1];
      x[2 * i] = a * cos[i] - c * sin[i];
      x[2 * i + 1] = c * cos[i] + a * sin[i];
      const float d = y[2 * i], e = y[2 * i + 1];
      y[2 * i] = d * cos[4 + i] - e * sin[4 + i];
      y[2 * i + 1] = e * cos[4 + i] + d * sin[4 + i];
    }
  }
}

// ---- Host: which heads are whole pieces ---------------------------------------------------------

// Whether every head begins at a multiple of `bytes`.
inline bool heads_aligned(const HeadRows& rows, int64_t element_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 &&
         rows.batch_stride * element_bytes % bytes == 0 &&
         rows.row_stride * element_bytes % bytes == 0 &&
         rows.head_stride * element_bytes % bytes == 0;
}

inline bool is_whole_pieces(const RopeAndCacheArgs& args) {
  if (args.head_dim % kPiece != 0 || args.rotary_dim % kPiece != 0) return false;
  if (args.v.data != nullptr && args.head_dim_v % kPiece != 0) return false;
  if (!kNeedsAlignedVectors) return true;
  const int64_t bytes = size_of(args.dtype), cache_bytes = size_of(args.cache_dtype);
  const int64_t table_bytes = size_of(args.table_dtype);
  const HeadRows cos{const_cast<void*>(args.cos), args.cos_batch_stride, args.cos_row_stride, 0};
  const HeadRows sin{const_cast<void*>(args.sin), args.sin_batch_stride, args.sin_row_stride, 0};
  const int64_t cache_vector = is_fp8(args.cache_dtype) ? 8 : 16;
  return heads_aligned(args.q, bytes, 16) && heads_aligned(args.k, bytes, 16) &&
         heads_aligned(args.v, bytes, 16) && heads_aligned(args.out, bytes, 16) &&
         heads_aligned(args.k_out, bytes, 16) && heads_aligned(cos, table_bytes, 16) &&
         heads_aligned(sin, table_bytes, 16) &&
         heads_aligned(args.k_cache, cache_bytes, cache_vector) &&
         heads_aligned(args.v_cache, cache_bytes, cache_vector) &&
         reinterpret_cast<uintptr_t>(args.q_weight) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(args.k_weight) % 16 == 0;
}

}  // namespace rocm_kernels
