// Keys, values and queries as operands of 16 x 16 matrix instructions, for a step of 32 keys:
//
//   S^T [32 keys, 16 rows]  = K [32, D] Q^T        two instructions high: key tiles t = 0, 1
//   O^T [D, 16 rows]       += V^T [D, 32] P^T
//
// Lane 16 g + i. Operands have 8 elements a lane (gfx942 takes them four by four):
//
//   K     row 16 t + i of the step, elements 8 g .. 8 g + 7 of each 32 (FP8: 16 of each 64)
//   Q^T   row i of q, the same elements
//   S^T   register r of tile t: key 16 t + 4 g + r, row i of q
//   P^T   slot 4 t + r of a lane: key 16 t + 4 g + r, row i: the registers of S^T as they are
//   V^T   slot 4 t + r: the same key, of a column; a lane has kColumns neighbours of 8 keys, which
//         is a load of whole rows: no register crosses lanes, v_perm_b32 alone transposes 2 x 2 of
//         them
//   O^T   register r of accumulator kColumns p + c: column 16 kColumns p + kColumns (4 g + r) + c
//
// An instruction does not care how k is permuted as long as both operands are alike: so P^T needs
// no exchange of registers, and V follows it.
#pragma once

#include <type_traits>

#include "../../common/cdna/mfma.h"
#include "../../common/gpu/lanes.h"
#include "../gpu/problem.h"
#include "tiles.h"

namespace rocm_kernels::cdna {

template <typename Type, bool kIsFp8, int kDim>
struct HeadShape {
  using Q = Type;
  static constexpr bool kBFloat = std::is_same_v<Q, bfloat16>, kFp8 = kIsFp8;
  static constexpr bool kWideLoads = kFp8;  // two fragments in a load of k
  static constexpr int kD = kDim;
  static constexpr int kFragments = kD / 32;                  // of a row of q or k
  static constexpr int kLoads = kFragments / (kFp8 ? 2 : 1);  // of 16 bytes, of a row of k
  static constexpr int kColumns = kD % 128 == 0 ? 8 : 4;      // of v, side by side in a lane
  static constexpr int kPieces = kD / (16 * kColumns);        // of a row of v
  static constexpr int kVWords = kColumns / (kFp8 ? 4 : 2);   // of a load of v
};

#if ROCM_KERNELS_CDNA

// Where the keys of a step lie. Each lane looks one up, of key lane % 32; page numbers are asked
// for a step before they are used. Keys outside of [begin, end) stand for the nearest inside.
class StepPlaces {
 public:
  ROCM_KERNELS_DEVICE StepPlaces(const AttentionArgs& args, const Sequence& s, KeyRange keys,
                                 uint32_t magic)
      : args_(args), s_(s), keys_(keys), magic_(magic) {}

  ROCM_KERNELS_DEVICE void look_up(int first_key, int lane) {
    int key = first_key + lane % kStepKeys;
    key = min(max(key, keys_.begin), keys_.end - 1);
    row_ = static_cast<int>(s_.k_begin) + key;
    if (s_.pages != nullptr) {
      const int at = magic_ == 0 ? key : static_cast<int>(__umulhi(key, magic_));
      row_ = key - at * static_cast<int>(args_.page_size);
      page_ = s_.pages[at];
    }
  }

  // Elements from the first key of the first page, of a step that was looked up.
  ROCM_KERNELS_DEVICE int64_t k_offset() const {
    return page_ * args_.k.batch_stride + row_ * args_.k.row_stride;
  }
  ROCM_KERNELS_DEVICE int64_t v_offset() const {
    return page_ * args_.v.batch_stride + row_ * args_.v.row_stride;
  }

 private:
  const AttentionArgs& args_;
  const Sequence& s_;
  const KeyRange keys_;
  const uint32_t magic_;
  int row_ = 0;
  int64_t page_ = 0;
};

ROCM_KERNELS_DEVICE int64_t of_lane64(int64_t value, int lane) {
  const uint32_t low = of_lane(static_cast<int>(value), lane);
  return static_cast<int64_t>(of_lane(static_cast<int>(value >> 32), lane)) << 32 | low;
}

// ---- K -----------------------------------------------------------------------------------------

template <class Shape>
struct KeyTile {  // 16 keys
  Words words[Shape::kLoads];

  // `row`: the lane's own row of k, of `row_bytes`; what is beyond is the row's last, and meets
  // zeros of q.
  ROCM_KERNELS_DEVICE void load(const uint8_t* row, int row_bytes, int group) {
#pragma unroll
    for (int i = 0; i < Shape::kLoads; ++i) {
      const auto loaded = rocm_kernels::load<Touch::kAgain, Vec<uint32_t, 4>>(
          row + min(64 * i + 16 * group, row_bytes - 16));
      words[i] = __builtin_bit_cast(Words, loaded);
    }
  }
  ROCM_KERNELS_DEVICE Words fragment(int i) const {
    if constexpr (Shape::kFp8) {
      const Words both = words[i / 2];
      return detail::decode8<Shape::kBFloat>(i % 2 == 0 ? detail::low(both) : detail::high(both));
    } else {
      return words[i];
    }
  }
};

// ---- Q -----------------------------------------------------------------------------------------

// `row`: the lane's own row of q.
template <class Shape>
ROCM_KERNELS_DEVICE void load_query(Words (&q)[Shape::kFragments], const typename Shape::Q* row,
                                    int head_dim, int group) {
#pragma unroll
  for (int i = 0; i < Shape::kFragments; ++i) {
    const int at = Shape::kWideLoads ? 64 * (i / 2) + 16 * group + 8 * (i % 2) : 32 * i + 8 * group;
    const auto loaded =
        rocm_kernels::load<Touch::kAgain, Vec<uint32_t, 4>>(row + min(at, head_dim - 8));
    q[i] = at < head_dim ? __builtin_bit_cast(Words, loaded) : Words{0, 0, 0, 0};
  }
}

// ---- V -----------------------------------------------------------------------------------------

template <class Shape>
struct ValueTile {                    // 16 keys, a piece of their columns
  uint32_t words[4][Shape::kVWords];  // [key 4 g + r][columns]

  // `row_bytes`: of a row of v; columns beyond are others', and go nowhere.
  ROCM_KERNELS_DEVICE void load(const uint8_t* row, int r, int row_bytes, int piece, int i) {
    constexpr int kBytes = 4 * Shape::kVWords;
    const auto loaded = rocm_kernels::load<Touch::kAgain, Vec<uint32_t, Shape::kVWords>>(
        row + min((16 * piece + i) * kBytes, row_bytes - kBytes));
#pragma unroll
    for (int w = 0; w < Shape::kVWords; ++w) words[r][w] = loaded[w];
  }
  // Column c of the lane's kColumns: four keys.
  ROCM_KERNELS_DEVICE detail::Words2 column(int c) const {
    if constexpr (Shape::kFp8) {
      const int w = c / 4;
      const uint32_t pick = c % 4 < 2 ? 0x05010400u : 0x07030602u;
      const uint32_t first = __builtin_amdgcn_perm(words[1][w], words[0][w], pick);
      const uint32_t second = __builtin_amdgcn_perm(words[3][w], words[2][w], pick);
      const uint32_t halves = c % 2 == 0 ? 0x05040100u : 0x07060302u;
      return detail::decode<Shape::kBFloat>(__builtin_amdgcn_perm(second, first, halves));
    } else {
      const int w = c / 2;
      const uint32_t halves = c % 2 == 0 ? 0x05040100u : 0x07060302u;
      return {__builtin_amdgcn_perm(words[1][w], words[0][w], halves),
              __builtin_amdgcn_perm(words[3][w], words[2][w], halves)};
    }
  }
};

ROCM_KERNELS_DEVICE Words join_words(detail::Words2 low, detail::Words2 high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3);
}

// ---- The softmax of a lane's row ---------------------------------------------------------------

// P, none of it negative or NaN of its own, to the nearest of the queries' type.
template <class Shape>
ROCM_KERNELS_DEVICE detail::Words2 round_p(Accumulator p) {
#if !defined(__gfx950__)
  if constexpr (Shape::kBFloat) {
    // gfx942 has no instruction for it. Half a unit is added and the rest cut off: two instructions
    // a pair and one for both, where ties to even, of which one number in 65,536 is, take nine.
    uint32_t bits[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float value = p[r];
      bits[r] = __builtin_bit_cast(uint32_t, value) + 0x8000u;
    }
    return {__builtin_amdgcn_perm(bits[1], bits[0], 0x07060302u),
            __builtin_amdgcn_perm(bits[3], bits[2], 0x07060302u)};
  }
#endif
  using Four = typename Shape::Q __attribute__((ext_vector_type(4)));
  return __builtin_bit_cast(detail::Words2, __builtin_convertvector(p, Four));
}

// Of a value over the four lanes that share a row of q.
template <class Reduce>
ROCM_KERNELS_DEVICE float over_groups(float value, int lane, const Reduce& reduce) {
#pragma unroll
  for (int step = 16; step <= 32; step *= 2) {
    value = reduce(value,
                   __builtin_bit_cast(float, of_lane(__builtin_bit_cast(int, value), lane ^ step)));
  }
  return value;
}

using Pair = float __attribute__((ext_vector_type(2)));  // whose arithmetic is one instruction

// A lane's row of q on the scale of a maximum, in log2.
struct RowState {
  float maximum = -kInfinity;
  Pair totals = {0, 0};  // of the lane's own keys, two halves
  KeyRange sees = {0, 0};

  ROCM_KERNELS_DEVICE float total(int lane) const {
    return over_groups(totals.x + totals.y, lane, [](float a, float b) { return a + b; });
  }
};

// What makes logarithms to the base of 2 of sums of products: cap * tanh(sum * scale) where there
// is a cap, else sum * scale. The scale is positive: queries bear its sign. 0 is one that rounds
// all differences off, and leaves -inf what it is.
struct ScoreScale {
  float scale, cap;
  bool flip;  // the sign of the queries

  ROCM_KERNELS_DEVICE ScoreScale(float factor, float softcap) {
    cap = softcap * kLog2E;
    factor *= softcap > 0 ? 1 / softcap : kLog2E;
    scale = fabsf(factor) < 1e-30f ? 1e-30f : fabsf(factor);  // a NaN stays one
    flip = factor < 0;
  }
  template <int kCount>
  ROCM_KERNELS_DEVICE void apply_sign(Words (&q)[kCount]) const {
    if (!flip) return;
#pragma unroll
    for (Words& words : q) words ^= 0x80008000u;
  }
};

// tanh to some 1e-6 of its value, without a branch.
ROCM_KERNELS_DEVICE float tanh_of(float x) {
  const float square = x * x;
  const float small = x - x * square * (1 / 3.0f - square * (2 / 15.0f - square * (17 / 315.0f)));
  const float large = 1 - 2 * fast_reciprocal(fast_exp2(2 * kLog2E * fabsf(x)) + 1);
  return square < 0.03f ? small : copysignf(large, x);
}

// Sums of products to exponentials. Sums of these are moved to a new maximum only where a score
// exceeds the old one by 8, so that most steps ask other lanes nothing but that.
template <int kRows, int kSums>
ROCM_KERNELS_DEVICE void to_exponentials(Accumulator (&scores)[2][kRows], RowState (&rows)[kRows],
                                         Accumulator (&out)[kRows][kSums], const ScoreScale& by,
                                         int first_key, bool all_seen, int lane) {
  float scale = by.scale;
  if (by.cap > 0) {
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) scores[t][n][r] = by.cap * tanh_of(scores[t][n][r] * scale);
      }
    }
    scale = 1;
  }
  if (!all_seen) {
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int key = first_key + 16 * t + lane / 16 * 4 + r;
          const bool seen = key >= rows[n].sees.begin && key < rows[n].sees.end;
          scores[t][n][r] = seen ? scores[t][n][r] : -kInfinity;
        }
      }
    }
  }
  bool grows = false;
  float highest[kRows];
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    highest[n] = scores[0][n][0];
#pragma unroll
    for (int at = 1; at < 8; ++at) highest[n] = fmaxf(highest[n], scores[at / 4][n][at % 4]);
    highest[n] *= scale;
    grows = grows || highest[n] > rows[n].maximum + 8;
  }
  if (ballot(grows) != 0) {
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      float most = fmaxf(rows[n].maximum, highest[n]);
      most = over_groups(most, lane, [](float a, float b) { return fmaxf(a, b); });
      const float down = most == -kInfinity ? 1.0f : fast_exp2(rows[n].maximum - most);
      rows[n].maximum = most;
      rows[n].totals *= down;
#pragma unroll
      for (int i = 0; i < kSums; ++i) out[n][i] *= down;
    }
  }
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    // A row that has seen nothing yet: of -inf - -inf.
    const float most = fmaxf(rows[n].maximum, -3e38f);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pair p = {scores[t][n][2 * half], scores[t][n][2 * half + 1]};
        p = __builtin_elementwise_fma(p, Pair{scale, scale}, Pair{-most, -most});
        p = {fast_exp2(p.x), fast_exp2(p.y)};
        rows[n].totals += p;
        scores[t][n][2 * half] = p.x;
        scores[t][n][2 * half + 1] = p.y;
      }
    }
  }
}

// P^T of a step as an operand: exponentials of the sums of products, rounded to the queries' type.
template <class Shape, int kRows, int kSums>
ROCM_KERNELS_DEVICE void to_operand(Accumulator (&scores)[2][kRows], RowState (&rows)[kRows],
                                    Accumulator (&out)[kRows][kSums], const ScoreScale& by,
                                    int first_key, const KeyRange& seen_by_all, int lane,
                                    Words (&p)[kRows]) {
  const bool all_seen = first_key >= seen_by_all.begin && first_key + kStepKeys <= seen_by_all.end;
  to_exponentials(scores, rows, out, by, first_key, all_seen, lane);
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    p[n] = join_words(round_p<Shape>(scores[0][n]), round_p<Shape>(scores[1][n]));
  }
}

#endif

}  // namespace rocm_kernels::cdna
