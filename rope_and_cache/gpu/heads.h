// Device code and launcher of rope_and_cache for both GPU families; see rope_and_cache.h for the
// maths.
//
//   block (token t, group of heads)
//     all lanes     place of the token in the caches, row of its angles      (the same for a block)
//     team of lanes a head: q heads first, then k, then v
//       lane        a piece: 16 elements, 8 pairs, in registers; cos and sin of its 8 pairs
//       norm        squares summed over the team
//       turn        within the lane: both of a pair are in one piece
//       store       rounded once: q to out; k to k_out and the cache; v to the cache
//
// Halves: piece p has elements 8 p .. 8 p + 7 and those half a rotation on. Neighbours, and what
// does not turn: 16 elements side by side. So no lane asks another but for the norm, every access
// is 16 bytes, and a step of one token with 48 heads of 128 is one block of 384 threads whose loads
// are all under way at once. Bytes bound it: what is read once, and written once.
//
// Heads that are no whole pieces, misaligned ones, and rotations of no whole pieces take
// rope_and_cache_any_kernel: a wave a head, a lane a pair or a lone element at a time.
#pragma once

#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/element.h"
#include "../../common/gpu/launch.h"
#include "../../common/gpu/math.h"
#include "../../common/gpu/reduce.h"
#include "../../common/gpu/vector.h"
#include "../rope_and_cache.h"

namespace rocm_kernels {
namespace {

constexpr int kPiece = 16;  // elements of a lane
constexpr int kRopeBlock = 512;
// Threads that a compute unit is to hold at once: with twice as many NVIDIA's compiler spills.
constexpr int kRopeResident = kNvidia ? 512 : 1024;

// ---- A head ------------------------------------------------------------------------------------

enum class HeadKind { kQuery, kKey, kValue, kNone };

// What a head of a token reads and writes; nullptr: not.
struct Head {
  HeadKind kind;
  int64_t from;        // its first element in q, k or v
  const void* data;    // q, k or v
  const void* weight;  // of its norm
  void* out;           // of the inputs' dtype
  int64_t out_at;
  void* cache;
  int64_t cache_at;
  float inverse_scale;  // of an FP8 cache
  int elements;
};

ROCM_KERNELS_DEVICE int64_t at_head(const HeadRows& rows, int64_t b, int64_t row, int64_t head) {
  return b * rows.batch_stride + row * rows.row_stride + head * rows.head_stride;
}

ROCM_KERNELS_DEVICE Head head_of(const RopeAndCacheArgs& args, int b, int row,
                                 const CachePlace& place, int index) {
  Head head{HeadKind::kNone, 0, nullptr, nullptr, nullptr, 0, nullptr, 0, 1.0f, 0};
  const int heads = static_cast<int>(args.heads), kv_heads = static_cast<int>(args.kv_heads);
  if (index < heads) {
    head.kind = HeadKind::kQuery;
    head.data = args.q.data;
    head.from = at_head(args.q, b, row, index);
    head.weight = args.q_weight;
    head.out = args.out.data;
    head.out_at = at_head(args.out, b, row, index);
    head.elements = static_cast<int>(args.head_dim);
    return head;
  }
  const bool is_key = index < heads + kv_heads;
  const int kv = index - heads - (is_key ? 0 : kv_heads);
  if (kv >= kv_heads || (!is_key && place.page < 0)) return head;
  const HeadRows& cache = is_key ? args.k_cache : args.v_cache;
  if (is_key) {
    head.kind = HeadKind::kKey;
    head.data = args.k.data;
    head.from = at_head(args.k, b, row, kv);
    head.weight = args.k_weight;
    head.out = args.k_out.data;
    head.out_at = at_head(args.k_out, b, row, kv);
    head.elements = static_cast<int>(args.head_dim);
  } else {
    head.kind = HeadKind::kValue;
    head.data = args.v.data;
    head.from = at_head(args.v, b, row, kv);
    head.elements = static_cast<int>(args.head_dim_v);
  }
  if (place.page >= 0) {
    head.cache = cache.data;
    head.cache_at = at_head(cache, place.page, place.row, kv);
    const float* scales = is_key ? args.k_scale : args.v_scale;
    const int64_t at = is_key ? b * args.k_scale_batch_stride + kv * args.k_scale_head_stride
                              : b * args.v_scale_batch_stride + kv * args.v_scale_head_stride;
    if (scales != nullptr) head.inverse_scale = 1.0f / scales[at];
  }
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
ROCM_KERNELS_DEVICE void store_eight_fp8(uint8_t* to, float inverse, const float (&z)[8]) {
  EightCodes codes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    codes.word[i] = fp8x4_from_float<kFnuz>(z[4 * i] * inverse, z[4 * i + 1] * inverse,
                                            z[4 * i + 2] * inverse, z[4 * i + 3] * inverse);
  }
  store<Touch::kAgain>(to, codes);
}

template <typename T>
ROCM_KERNELS_DEVICE void store_eight(const RopeAndCacheArgs& args, const Head& head, int at,
                                     const float (&z)[8]) {
  if (head.out != nullptr) store_eight(static_cast<T*>(head.out) + head.out_at + at, z);
  if (head.cache == nullptr) return;
  if (args.cache_dtype == DType::kFloat8E4M3FN) {
    store_eight_fp8<false>(static_cast<uint8_t*>(head.cache) + head.cache_at + at,
                           head.inverse_scale, z);
  } else if (args.cache_dtype == DType::kFloat8E4M3FNUZ) {
    store_eight_fp8<true>(static_cast<uint8_t*>(head.cache) + head.cache_at + at,
                          head.inverse_scale, z);
  } else {
    store_eight(static_cast<T*>(head.cache) + head.cache_at + at, z);
  }
}

// Grid: tokens x groups of heads; a team of 1 << shift lanes has a head.
template <typename T>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(kRopeBlock, kRopeResident)
    rope_and_cache_kernel(const RopeAndCacheArgs args, const int shift) {
  begin_after_previous_kernel();
  const int token = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int b = token / static_cast<int>(args.rows), row = token - b * static_cast<int>(args.rows);
  const int piece = thread & ((1 << shift) - 1);
  const int index =
      static_cast<int>(blockIdx.y) * (static_cast<int>(blockDim.x) >> shift) + (thread >> shift);
  const Head head = head_of(args, b, row, place_of(args, b, row), index);
  const bool works = piece * kPiece < head.elements;

  const int half = static_cast<int>(args.rotary_dim) / 2;
  const bool turns = works && head.kind != HeadKind::kValue && piece * kPiece < args.rotary_dim;
  const bool halves = turns && !args.interleaved;
  const int first = halves ? piece * 8 : piece * kPiece;
  const int second = halves ? piece * 8 + half : piece * kPiece + 8;

  float x[8] = {}, y[8] = {}, cos[8] = {}, sin[8] = {};
  if (works) {
    const T* from = static_cast<const T*>(head.data) + head.from;
    load_eight(from + first, x);
    load_eight(from + second, y);
  }
  if (turns) {
    const AnglesAt angles = angles_at(args, b, row);
    load_eight(args.cos, args.table_dtype, angles.cos + piece * 8, cos);
    load_eight(args.sin, args.table_dtype, angles.sin + piece * 8, sin);
    if (!angles.exist) {
#pragma unroll
      for (float& value : cos) value = __builtin_nanf("");
    }
  }
  if (args.q_weight != nullptr || args.k_weight != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i] + y[i] * y[i];
    // All lanes of the wave, whatever their heads are.
    const Sum sum;
    if (shift >= 1) squares = sum(squares, other_half<1>(squares));
    if (shift >= 2) squares = sum(squares, other_half<2>(squares));
    if (shift >= 3) squares = sum(squares, other_half<4>(squares));
    if (shift >= 4) squares = sum(squares, other_half<8>(squares));
    if (shift >= 5) squares = sum(squares, other_half<16>(squares));
    if (works && head.weight != nullptr) {
      const float rstd = rstd_of(squares, args);
      float weight[8];
      load_eight(head.weight, args.weight_dtype, first, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = x[i] * rstd * (weight[i] + args.weight_offset);
      load_eight(head.weight, args.weight_dtype, second, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = y[i] * rstd * (weight[i] + args.weight_offset);
    }
  }
  if (!works) return;
  if (halves) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = x[i], c = y[i];
      x[i] = a * cos[i] - c * sin[i];
      y[i] = c * cos[i] + a * sin[i];
    }
  } else if (turns) {
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
  store_eight<T>(args, head, first, x);
  store_eight<T>(args, head, second, y);
}

// ---- Anything else -----------------------------------------------------------------------------

constexpr int kAnyBlock = 256;

ROCM_KERNELS_DEVICE void store_one(const RopeAndCacheArgs& args, const Head& head, int at,
                                   float z) {
  if (head.out != nullptr) store_element(head.out, args.dtype, head.out_at + at, z);
  if (head.cache == nullptr) return;
  uint8_t* const codes = static_cast<uint8_t*>(head.cache);
  if (args.cache_dtype == DType::kFloat8E4M3FN) {
    codes[head.cache_at + at] = fp8_from_float<false>(z * head.inverse_scale);
  } else if (args.cache_dtype == DType::kFloat8E4M3FNUZ) {
    codes[head.cache_at + at] = fp8_from_float<true>(z * head.inverse_scale);
  } else {
    store_element(head.cache, args.dtype, head.cache_at + at, z);
  }
}

// Grid: tokens x groups of heads; a wave has a head.
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(kAnyBlock, 1024)
    rope_and_cache_any_kernel(const RopeAndCacheArgs args) {
  begin_after_previous_kernel();
  constexpr int kWaves = kAnyBlock / kWaveSize;
  const int token = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int b = token / static_cast<int>(args.rows), row = token - b * static_cast<int>(args.rows);
  const int lane = thread % kWaveSize;
  const int index = static_cast<int>(blockIdx.y) * kWaves + thread / kWaveSize;
  const Head head = head_of(args, b, row, place_of(args, b, row), index);
  if (head.kind == HeadKind::kNone) return;  // a whole wave

  float rstd = 1.0f;
  if (head.weight != nullptr) {
    float squares = 0.0f;
    for (int at = lane; at < head.elements; at += kWaveSize) {
      const float x = load_element(head.data, args.dtype, head.from + at);
      squares += x * x;
    }
    rstd = rstd_of(reduce_lanes<kWaveSize>(squares, Sum{}), args);
  }
  const auto normalised = [&](int at) {
    const float x = load_element(head.data, args.dtype, head.from + at);
    if (head.weight == nullptr) return x;
    return x * rstd * (load_element(head.weight, args.weight_dtype, at) + args.weight_offset);
  };
  const int rotary = head.kind == HeadKind::kValue ? 0 : static_cast<int>(args.rotary_dim);
  const AnglesAt angles = rotary > 0 ? angles_at(args, b, row) : AnglesAt{};
  for (int i = lane; i < rotary / 2; i += kWaveSize) {
    float cos = load_element(args.cos, args.table_dtype, angles.cos + i);
    const float sin = load_element(args.sin, args.table_dtype, angles.sin + i);
    if (!angles.exist) cos = __builtin_nanf("");
    const int first = args.interleaved ? 2 * i : i;
    const int second = args.interleaved ? 2 * i + 1 : i + rotary / 2;
    const float a = normalised(first), c = normalised(second);
    store_one(args, head, first, a * cos - c * sin);
    store_one(args, head, second, c * cos + a * sin);
  }
  for (int at = rotary + lane; at < head.elements; at += kWaveSize) {
    store_one(args, head, at, normalised(at));
  }
}

// ---- Launcher ----------------------------------------------------------------------------------

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

}  // namespace

Status launch_rope_and_cache(const RopeAndCacheArgs& args, const Context& context) {
  const int64_t tokens = args.batch * args.rows, heads = args.heads + 2 * args.kv_heads;
  if (tokens == 0 || heads == 0) return nullptr;
  if (tokens >= int64_t{1} << 31) return "tokens must be less than 2^31; divide the call";
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  Launch launch;
  launch.stream = stream_of(context);
  launch.early = facts.is_hopper_or_later();

  const bool whole = is_whole_pieces(args);
  int shift = 0;
  const int64_t elements = args.head_dim > args.head_dim_v ? args.head_dim : args.head_dim_v;
  while ((int64_t{kPiece} << shift) < elements) ++shift;
  int64_t in_block = kAnyBlock / facts.wave_size;
  launch.block = kAnyBlock;
  if (whole) {
    // One block for a token's heads where they fit; else blocks of 256, so that few lanes idle.
    const int64_t wave = facts.wave_size, lanes = (heads << shift) + wave - 1;
    launch.block = static_cast<int>(lanes / wave * wave <= kRopeBlock ? lanes / wave * wave : 256);
    in_block = launch.block >> shift;
  }
  const int64_t groups = (heads + in_block - 1) / in_block;
  if (groups > 65535) return "too many heads for one call; divide them";
  launch.grid = dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(groups));
  if (!whole) return launch_kernel(rope_and_cache_any_kernel, launch, args);
  switch (args.dtype) {
    case DType::kFloat32:
      return launch_kernel(rope_and_cache_kernel<float>, launch, args, shift);
    case DType::kFloat16:
      return launch_kernel(rope_and_cache_kernel<float16>, launch, args, shift);
    default:
      return launch_kernel(rope_and_cache_kernel<bfloat16>, launch, args, shift);
  }
}

}  // namespace rocm_kernels
