// Device code and launcher of rope_and_cache for both GPU families; see rope_and_cache.h for the
// maths.
//
//   block (token t, group of heads)
//     team of lanes a head, or two: q heads first, then k, then v
//       lane        a piece: 16 elements, 8 pairs, asked for; cos and sin of its 8 pairs
//                   place of the token in the caches                       (the same for a block)
//       norm        squares summed over the team
//       rotate      within the lane: both of a pair are in one piece
//       store       rounded once: q to out; k to k_out and the cache; v to the cache
//
// Which elements are a piece: blocks/heads/gpu/heads.h. A step of one token with 48 heads of 128 is
// one block of 384 threads whose loads are all under way at once. Bytes bound it: what is read
// once, and written once.
//
// Heads that are no whole pieces, misaligned ones, and rotations of no whole pieces take
// rope_and_cache_any_kernel: a wave a head, a lane a pair or a lone element at a time.
#pragma once

#include "../../blocks/heads/gpu/heads.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/element.h"
#include "../../common/gpu/launch.h"
#include "../../common/gpu/reduce.h"
#include "../rope_and_cache.h"

namespace rocm_kernels {
namespace {

constexpr int kRopeBlock = 512;
// Threads that a compute unit is to hold at once: with twice as many NVIDIA's compiler spills.
constexpr int kRopeResident = kNvidia ? 512 : 1024;
// Lanes of one head that one of NVIDIA's multiprocessors holds at once. Tokens that need more have
// lanes of two heads, which share the way to a token's place and angles, and have twice the loads
// under way; of fewer tokens a lane's own time is what counts.
constexpr int64_t kRopeHeld = 896;

// Grid: tokens x groups of heads; a team of 1 << shift lanes has kHeads heads.
template <typename T, int kHeads>
__global__ void ROCM_KERNELS_LAUNCH_BOUNDS(kRopeBlock, kRopeResident)
    rope_and_cache_kernel(const RopeAndCacheArgs args, const int shift) {
  begin_after_previous_kernel();
  const int token = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int b = token / static_cast<int>(args.rows), row = token - b * static_cast<int>(args.rows);
  const int piece = thread & ((1 << shift) - 1), teams = static_cast<int>(blockDim.x) >> shift;
  const int first = static_cast<int>(blockIdx.y) * teams * kHeads + (thread >> shift);

  EightElements<T> asked_x[kHeads], asked_y[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const Head head = source_of(args, b, row, first + h * teams);
    const bool works = piece * kPiece < head.elements;
    const PieceAt at = PieceAt::of(args, piece, head.kind != HeadKind::kValue);
    const T* from = static_cast<const T*>(head.data) + head.from;
    asked_x[h].ask(works, from + at.first);
    asked_y[h].ask(works, from + at.second);
  }
  const bool rotates = piece * kPiece < args.rotary_dim && first < args.heads + args.kv_heads;
  AnglesAt angles;
  EightAngles asked_cos = {}, asked_sin = {};
  if (rotates) {
    angles = angles_at(args, b, row);
    asked_cos.ask(args.cos, args.table_dtype, angles.cos + piece * 8);
    asked_sin.ask(args.sin, args.table_dtype, angles.sin + piece * 8);
  }
  const CachePlace place = place_of(args, b, row);

  float cos[8], sin[8];
  asked_cos.look(args.table_dtype, cos);
  asked_sin.look(args.table_dtype, sin);
  if (!angles.exist) {
#pragma unroll
    for (float& value : cos) value = __builtin_nanf("");
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const Head head = head_of(args, b, row, place, first + h * teams);
    const bool works = piece * kPiece < head.elements;
    const PieceAt at = PieceAt::of(args, piece, works && head.kind != HeadKind::kValue);
    float x[8], y[8];
    asked_x[h].look(x);
    asked_y[h].look(y);
    if (args.q_weight != nullptr || args.k_weight != nullptr) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = works ? x[i] : 0.0f, y[i] = works ? y[i] : 0.0f;
      normalise_piece(args, works ? head.weight : nullptr, at, shift, x, y);
    }
    if (!works) continue;
    rotate_piece(at, cos, sin, x, y);
    store_eight<T>(args, head, at.first, x);
    store_eight<T>(args, head, at.second, y);
  }
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

template <typename T>
Status launch_heads(bool pairs, const Launch& launch, const RopeAndCacheArgs& args, int shift) {
  if constexpr (kNvidia) {
    if (pairs) return launch_kernel(rope_and_cache_kernel<T, 2>, launch, args, shift);
  }
  return launch_kernel(rope_and_cache_kernel<T, 1>, launch, args, shift);
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
  bool pairs = false;
  int shift = 0;
  const int64_t elements = args.head_dim > args.head_dim_v ? args.head_dim : args.head_dim_v;
  while ((int64_t{kPiece} << shift) < elements) ++shift;
  int64_t in_block = kAnyBlock / facts.wave_size;
  launch.block = kAnyBlock;
  if (whole) {
    const int64_t wave = facts.wave_size;
    const auto lanes_of = [&](int64_t teams) {
      return ((teams << shift) + wave - 1) / wave * wave;
    };
    int64_t lanes = lanes_of(heads);
    pairs = kNvidia && lanes > wave && tokens * lanes > facts.compute_units * kRopeHeld;
    if (pairs) lanes = lanes_of((heads + 1) / 2);
    // One block for a token's heads where they fit; else blocks of 256, so that few lanes idle.
    launch.block = static_cast<int>(lanes <= kRopeBlock ? lanes : 256);
    in_block = (launch.block >> shift) * (pairs ? 2 : 1);
  }
  const int64_t groups = (heads + in_block - 1) / in_block;
  if (groups > 65535) return "too many heads for one call; divide them";
  launch.grid = dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(groups));
  if (!whole) return launch_kernel(rope_and_cache_any_kernel, launch, args);
  switch (args.dtype) {
    case DType::kFloat32:
      return launch_heads<float>(pairs, launch, args, shift);
    case DType::kFloat16:
      return launch_heads<float16>(pairs, launch, args, shift);
    default:
      return launch_heads<bfloat16>(pairs, launch, args, shift);
  }
}

}  // namespace rocm_kernels
