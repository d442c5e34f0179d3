// The softmax of a consumer's tile in prefill.cuh: running maxima and sums, P in the place of S.
#pragma once

#include "../../common/gpu/math.h"
#include "prefill_shape.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The running maximum and sum of a thread's two rows, on the scale of log2.
struct PrefillRows {
  float maximum[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0, 0};  // of this thread's columns
  float factor[2];        // that S is multiplied by
  KeyRange sees[2];
};

// S as it is counted: capped, its sign changed where the factor is negative, -inf where it is not
// seen. Returns what it is then multiplied by.
template <int kColumnTiles>
__device__ __forceinline__ float2 settle_scores(float (&scores)[kColumnTiles][4],
                                                const PrefillRows& rows, int first_key,
                                                bool all_seen, float cap) {
  const int quad = static_cast<int>(threadIdx.x) % 4;
  float factor[2] = {rows.factor[0], rows.factor[1]};
  if (cap > 0) {
    // cap * tanh(x), of 2^(2 x log2 e).
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float power = fast_exp2(scores[t][i] * factor[i / 2]);
        scores[t][i] = cap - 2 * cap * fast_reciprocal(power + 1);
      }
    }
    factor[0] = factor[1] = 1;
  } else if (factor[0] < 0) {
    factor[0] = -factor[0], factor[1] = -factor[1];
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][i] = -scores[t][i];
    }
  }
  if (!all_seen) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + 8 * t + 2 * quad + i % 2;
        if (key < rows.sees[i / 2].begin || key >= rows.sees[i / 2].end) {
          scores[t][i] = -kInfinity;
        }
      }
    }
  }
  const auto positive = [](float value) {  // not 0 * -inf; a NaN stays one
    return value < 1e-30f ? 1e-30f : value;
  };
  return make_float2(positive(factor[0]), positive(factor[1]));
}

// Raises the rows' maxima to `most` of their threads; what is on their scale is multiplied by `by`.
__device__ __forceinline__ void raise_maxima(const float (&most)[2], float2 factor,
                                             PrefillRows& rows, float (&by)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float all = most[r];
    all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
    all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
    all = fmaxf(all * (r == 0 ? factor.x : factor.y), rows.maximum[r]);
    by[r] = all == -kInfinity ? 1.0f : fast_exp2(rows.maximum[r] - all);
    rows.maximum[r] = all;
    rows.sum[r] *= by[r];
  }
}
template <int kColumnTiles>
__device__ __forceinline__ void raise_maxima(const float (&scores)[kColumnTiles][4], float2 factor,
                                             PrefillRows& rows, float (&by)[2]) {
  float most[2] = {-kInfinity, -kInfinity};
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i / 2] = fmaxf(most[i / 2], scores[t][i]);
  }
  raise_maxima(most, factor, rows, by);
}

// P of a tile from its S, which is overwritten by exp2(S - maximum). Returns whether O must be
// multiplied by `by` first: where a maximum of the warp has grown by 2^8 since it was last set.
template <int kColumnTiles>
__device__ __forceinline__ bool softmax_tile(float (&scores)[kColumnTiles][4], PrefillRows& rows,
                                             int first_key, bool all_seen, float cap,
                                             float (&by)[2]) {
  const float2 factor = settle_scores(scores, rows, first_key, all_seen, cap);
  float most[2] = {-kInfinity, -kInfinity};
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i / 2] = fmaxf(most[i / 2], scores[t][i]);
  }
  const bool grows =
      most[0] * factor.x > rows.maximum[0] + 8 || most[1] * factor.y > rows.maximum[1] + 8;
  const bool rescale = __any_sync(~0u, grows);
  if (rescale) raise_maxima(most, factor, rows, by);
  // A row that has seen nothing yet: of -inf - -inf.
  const float from[2] = {fmaxf(rows.maximum[0], -3e38f), fmaxf(rows.maximum[1], -3e38f)};
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[t][i] = fast_exp2(fmaf(scores[t][i], i / 2 == 0 ? factor.x : factor.y, -from[i / 2]));
      rows.sum[i / 2] += scores[t][i];
    }
  }
  return rescale;
}

// The same without looking for the tile's maxima, which costs 5 to 10 % of the whole: they are
// those of earlier tiles, which are seldom smaller. Where P becomes so large that its sums tell (a
// thread's of 2^13, which float16 still holds), it is divided by a power of two. Where it leaves
// the range in which that is exact, S, gone by then, is had `again`, and the maxima are raised
// first; so they are where a row of the warp has seen nothing yet.
template <int kColumnTiles, typename Again>
__device__ __forceinline__ bool softmax_tile(float (&scores)[kColumnTiles][4], PrefillRows& rows,
                                             int first_key, bool all_seen, float cap,
                                             float (&by)[2], const Again& again) {
  constexpr float kLarge = 0x1p13f, kTooLarge = 0x1p100f;
  float2 factor = settle_scores(scores, rows, first_key, all_seen, cap);
  bool raise = __any_sync(~0u, fminf(rows.maximum[0], rows.maximum[1]) == -kInfinity);
  bool rescale = false;
  float sum[2];
#pragma unroll 1
  for (;;) {
    if (raise) {
      raise_maxima(scores, factor, rows, by);
      rescale = true;
    }
    // A row that has seen nothing yet: of -inf - -inf.
    const float from[2] = {fmaxf(rows.maximum[0], -3e38f), fmaxf(rows.maximum[1], -3e38f)};
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[t][i] =
            fast_exp2(fmaf(scores[t][i], i / 2 == 0 ? factor.x : factor.y, -from[i / 2]));
        sum[i / 2] += scores[t][i];
      }
    }
    const float larger = fmaxf(sum[0], sum[1]);
    if (raise || !__any_sync(~0u, larger > kLarge)) break;
    if (!__any_sync(~0u, larger > kTooLarge)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float all = sum[r];
        all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
        all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
        const int power = all > kLarge ? static_cast<int>(__float_as_uint(all) >> 23) - 126 : 0;
        by[r] = __uint_as_float(static_cast<uint32_t>(127 - power) << 23);
        rows.maximum[r] += static_cast<float>(power);
        rows.sum[r] *= by[r];
        sum[r] *= by[r];
      }
#pragma unroll
      for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[t][i] *= by[i / 2];
      }
      rescale = true;
      break;
    }
    again();
    factor = settle_scores(scores, rows, first_key, all_seen, cap);
    raise = true;
  }
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
  return rescale;
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
