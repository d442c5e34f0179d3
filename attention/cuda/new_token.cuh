// A sequence's new token in the decode kernel (decode.cuh), where it is not in the cache yet: each
// warp rotates its block's queries itself, in a stage that is not filled yet, and the warp whose
// tile the new key lies in makes key and value, writes them to the cache and puts them into the
// tile. Bits are those of rope_and_cache, whose functions these are (blocks/heads/gpu/heads.h).
#pragma once

#include "../../blocks/heads/gpu/heads.h"
#include "../../common/cuda/shared_memory.cuh"
#include "decode_warp.cuh"

namespace rocm_kernels {
namespace cuda {

template <class Shape, bool kHasNew = Shape::kHasNew>
class NewToken {
  using T = typename Shape::Q;

  static constexpr int shift_of(int pieces) {
    int shift = 0;
    while (1 << shift < pieces) ++shift;
    return shift;
  }
  static constexpr int kShift = shift_of(Shape::kD / kPiece);  // a team of 1 << kShift has a head
  static constexpr int kTeam = 1 << kShift, kHeads = 32 / kTeam;
  static constexpr int kWords = Shape::kFp8 ? 4 : 8;  // of a piece in the cache
  static constexpr int kQPitch = 2 * Shape::kD + 16;  // bytes of a row of rotated queries
  static_assert(Shape::kRows * kQPitch <= 2 * Shape::kTileBytes, "queries fit a stage");
  static_assert(kHeads >= 2, "key and value are a warp's");

 public:
  __device__ __forceinline__ explicit NewToken(const RopeAndCacheArgs& args) : args_(args) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
    piece_ = lane_ % kTeam;
    at_ = PieceAt::of(args, piece_, true);
  }

  // Asks for all that is needed.
  __device__ __forceinline__ void ask(const DecodeRows& rows) {
    key_ = static_cast<int>(max(min(args_.places.at(rows.b, 0), int64_t{1} << 30), int64_t{-1}));
    if (at_.rotates) {
      const AnglesAt angles = angles_at(args_, rows.b, 0);
      exist_ = angles.exist;
      cos_.ask(args_.cos, args_.table_dtype, angles.cos + piece_ * 8);
      sin_.ask(args_.sin, args_.table_dtype, angles.sin + piece_ * 8);
    }
    ask_queries(rows, 0);
    if (has_new()) {
      const HeadRows& from = is_key() ? args_.k : args_.v;
      ask_piece(from, at_head(from, rows.b, 0, rows.head), at_new(), new_);
    }
  }

  // Turns the queries, and leaves them at `to`: rows of kQPitch bytes.
  __device__ __forceinline__ void rotate_queries(const DecodeRows& rows, char* to) {
    cos_.look(args_.table_dtype, cos), sin_.look(args_.table_dtype, sin);
    if (!exist_) {
#pragma unroll
      for (float& value : cos) value = __builtin_nanf("");
    }
    const int count = rows.last - rows.first + 1;
#pragma unroll 1
    for (int first = 0; first < count; first += kHeads) {
      if (first > 0) ask_queries(rows, first);
      float x[8], y[8];
      unpack<T>(q_[0], x), unpack<T>(q_[1], y);
      if (args_.q_weight != nullptr) {
        normalise_piece(args_, works() ? args_.q_weight : nullptr, at_, kShift, x, y);
      }
      rotate_piece(at_, cos, sin, x, y);
      const int row = first + lane_ / kTeam;
      if (row < count && works()) {
        T* const of_row = reinterpret_cast<T*>(to + row * kQPitch);
        store_eight(of_row + at_.first, x);
        store_eight(of_row + at_.second, y);
      }
    }
    __syncwarp();
  }
  // Of them, as an operand.
  __device__ __forceinline__ void load_rotated(
      const DecodeGrid& grid, const DecodeRows& rows, const char* from, int group, int quad,
      uint32_t (&q)[Shape::kHeld][Shape::kSteps][2]) const {
    AttentionArgs rotated;
    rotated.head_dim = args_.head_dim;
    rotated.q = {from, 0, 0, kQPitch / static_cast<int>(sizeof(T))};
    DecodeRows own = rows;
    own.b = own.head = own.first = own.s.q_begin = 0;
    own.last = rows.last - rows.first;
    load_queries<Shape>(rotated, grid.rows, own, 0, group, quad, q);
    __syncwarp();
  }

  // The tile that the warp is to put key and value into, of those it has: -1 for none.
  __device__ __forceinline__ int make(const DecodeGrid& grid, const DecodePart& its, int part,
                                      int row_block) {
    const int tile = key_ / Shape::kKeys, warp = static_cast<int>(threadIdx.x) / 32;
    const bool seen = key_ >= its.keys.begin && key_ < its.keys.end;
    const bool here =
        seen && tile >= its.begin && tile < its.end && (tile - its.begin) % Shape::kWarps == warp;
    // What no query sees is the last part's.
    const bool writes = here || (!seen && part == grid.parts - 1 && warp == 0);
    if (key_ < 0 || !writes) return -1;
    const CachePlace place = place_of(args_, its.rows.b, 0);
    if (place.page < 0) return -1;
    const PieceAt at = at_new();
    Head head;
    send_new(args_, its.rows.b, 0, place, is_key(), its.rows.head, head);
    if (row_block > 0) head.cache = nullptr;
    float x[8], y[8];
    unpack<T>(new_[0], x), unpack<T>(new_[1], y);
    if (args_.k_weight != nullptr) {
      normalise_piece(args_, is_key() && has_new() ? args_.k_weight : nullptr, at, kShift, x, y);
    }
    rotate_piece(at, cos, sin, x, y);
    if (has_new()) {
      store_eight<T>(args_, head, at.first, x);
      store_eight<T>(args_, head, at.second, y);
    }
    if constexpr (Shape::kFp8) {
      const EightCodes low = eight_codes<false>(head.inverse_scale, x);
      const EightCodes high = eight_codes<false>(head.inverse_scale, y);
#pragma unroll
      for (int i = 0; i < 2; ++i) words_[i] = low.word[i], words_[2 + i] = high.word[i];
    } else {
      const Vector low = rocm_kernels::pack<T>(x), high = rocm_kernels::pack<T>(y);
#pragma unroll
      for (int i = 0; i < 4; ++i) words_[i] = low.word[i], words_[4 + i] = high.word[i];
    }
    return here ? tile : -1;
  }

  // Puts them into that tile, whose copies have landed.
  __device__ __forceinline__ void put(uint32_t k_stage, uint32_t v_stage) const {
    if (has_new()) {
      constexpr int kHalf = kWords / 2;
      const PieceAt at = at_new();
      const uint32_t to = is_key() ? k_stage : v_stage;
      const auto place = [&](int byte) {
        const int vector = Shape::Lines::at(key_ % Shape::kKeys, byte / 16);
        return to + static_cast<uint32_t>(vector + byte % 16);
      };
#pragma unroll
      for (int i = 0; i < kHalf; i += 2) {
        store_shared(place(at.first * Shape::kBytes + 4 * i), make_uint2(words_[i], words_[i + 1]));
        store_shared(place(at.second * Shape::kBytes + 4 * i),
                     make_uint2(words_[kHalf + i], words_[kHalf + i + 1]));
      }
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ bool works() const { return piece_ * kPiece < args_.head_dim; }
  // Of key and value the first team has the key, the second the value.
  __device__ __forceinline__ bool is_key() const { return lane_ < kTeam; }
  __device__ __forceinline__ bool has_new() const {
    return lane_ < 2 * kTeam && piece_ * kPiece < (is_key() ? args_.head_dim : args_.head_dim_v);
  }
  __device__ __forceinline__ PieceAt at_new() const {
    return is_key() ? at_ : PieceAt::of(args_, piece_, false);
  }

  __device__ __forceinline__ void ask_piece(const HeadRows& rows, int64_t head, const PieceAt& at,
                                            Vector (&piece)[2]) const {
    const T* const from = static_cast<const T*>(rows.data) + head;
    piece[0] = load<Touch::kAgain, Vector>(from + at.first);
    piece[1] = load<Touch::kAgain, Vector>(from + at.second);
  }
  __device__ __forceinline__ void ask_queries(const DecodeRows& rows, int first) {
    const int row = min(rows.first + first + lane_ / kTeam, rows.last);
    const int heads = static_cast<int>(args_.heads / args_.kv_heads);
    if (works()) ask_piece(args_.q, at_head(args_.q, rows.b, 0, rows.head * heads + row), at_, q_);
  }

  const RopeAndCacheArgs& args_;
  int lane_, piece_;
  PieceAt at_;
  int key_ = -1;  // its place in the sequence
  bool exist_ = true;
  EightAngles cos_ = {}, sin_ = {};
  Vector q_[2] = {}, new_[2] = {};
  float cos[8], sin[8];
  uint32_t words_[kWords];
};

template <class Shape>
struct NewToken<Shape, false> {
  __device__ __forceinline__ explicit NewToken(const NoTokens&) {}
};

}  // namespace cuda
}  // namespace rocm_kernels
