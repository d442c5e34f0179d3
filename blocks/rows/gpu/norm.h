// RMSNorm of rows that teams of threads hold in registers: its parameters, its arithmetic, and what
// follows the sum of squares.
#pragma once

#include "../../../common/gpu/math.h"
#include "../norm_args.h"
#include "quantize.h"
#include "row.h"

namespace rocm_kernels {
namespace {

template <typename T>
struct RmsnormParams {
  int32_t rows;
  const T* x;          // [rows, hidden]
  T* residual;         // [rows, hidden] or nullptr; written
  const T* addend;     // [rows, hidden]; residual itself, or what is read in its place
  const void* weight;  // [hidden], T or float
  int32_t x_stride;
  int32_t residual_stride;
  int32_t addend_stride;
  int32_t hidden;
  float inverse_hidden;
  float eps;
  float weight_offset;  // -0 where there is none: w + -0 is w for every w
  // Flags are words: scalar loads have no bytes.
  int32_t float_weight;  // T is a 16-bit type and the weight is float32
  int32_t weight_is_settled;
  int32_t aligned;  // whole vectors may be loaded from x, residual, addend and weight
  Output output;
};

// The sum of squares of one vector of h; 0 beyond the row.
template <typename T>
ROCM_KERNELS_DEVICE float sum_of_squares(const Vector& h_vector, int column, int columns) {
  float h[kVectorElements<T>];
  unpack<T>(h_vector, h);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectorElements<T>; ++i) squares = fmaf(h[i], h[i], squares);
  return column < columns ? squares : 0.0f;
}

template <typename T>
ROCM_KERNELS_DEVICE Vector add(const Vector& a, const Vector& b) {
  Vector sum;
#pragma unroll
  for (int w = 0; w < 4; ++w) sum.word[w] = Word<T>::add(a.word[w], b.word[w]);
  return sum;
}

// h * rstd of one vector.
template <typename T, int kCount>
ROCM_KERNELS_DEVICE void normalize(const Vector& h, float rstd, float (&scaled)[kCount]) {
  float factors[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) factors[i] = rstd;
  multiply<T>(h, factors, scaled);
}

// y = scaled * (weight + offset).
template <typename T, int kCount>
ROCM_KERNELS_DEVICE void apply_weight(const Vector& weight, float offset,
                                      const float (&scaled)[kCount], float (&y)[kCount]) {
  float factors[kCount];
  plus<T>(weight, offset, factors);
#pragma unroll
  for (int i = 0; i < kCount; ++i) y[i] = scaled[i] * factors[i];
}

// From the sum of squares of a row on: the norm, its scale, the stores. By all threads of a team,
// for rows that fit in their registers. `inverse`: the reciprocal of the scale in force.
template <typename T, typename Team>
ROCM_KERNELS_DEVICE void store_norm(const Vector (&h)[Team::kVectors],
                                    Vector (&weight)[Team::kVectors], float sum, int row,
                                    int columns, const TeamThread<Team>& here,
                                    const RmsnormParams<T>& p, TeamScratch& scratch, int& slot,
                                    float& inverse) {
  constexpr int kVectors = Team::kVectors;
  constexpr int kCount = kVectorElements<T>;
  const auto column_of = [&](int v) { return here.template column<T>(v); };
  const float rstd = reciprocal_sqrt(sum * p.inverse_hidden + p.eps);

  // Here, lest they be converted before the loop, and wait for their load there.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) weight[v] = opaque(weight[v]);
  // Computed anew by each pass that wants it: that takes less than the registers to hold it.
  const auto y_of = [&](int v, float (&y)[kCount]) {
    float scaled[kCount];
    normalize<T>(h[v], rstd, scaled);
    apply_weight<T>(weight[v], p.weight_offset, scaled, y);
  };
  if (p.output.scaling == Scaling::kPerToken) {
    float amax = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float y[kCount];
      y_of(v, y);
      amax = column_of(v) < columns ? amax_of(y, amax) : amax;
    }
    amax = reduce_team<Team>(amax, MaxMagnitude{}, scratch, slot);
    const float scale = scale_of_amax(amax, p.output);
    inverse = opaque(1.0f / scale);
    if (here.thread == 0 && columns > 0) p.output.scales[row] = scale;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float y[kCount];
    y_of(v, y);
    store_output<T, Fit::kWhole>(y, inverse, row, column_of(v), columns, p.output);
  }
}

// Host: from a launcher's arguments.
template <typename T>
RmsnormParams<T> make_norm_params(const RmsnormFp8Args& args) {
  constexpr int kCount = kVectorElements<T>;
  RmsnormParams<T> p{};
  p.rows = static_cast<int32_t>(args.rows);
  p.x = static_cast<const T*>(args.x);
  p.residual = static_cast<T*>(args.residual);
  p.addend = static_cast<const T*>(args.addend != nullptr ? args.addend : args.residual);
  p.weight = args.weight;
  p.weight_is_settled = args.weight_is_settled;
  p.x_stride = static_cast<int32_t>(args.x_stride);
  p.residual_stride = static_cast<int32_t>(args.residual_stride);
  p.addend_stride =
      static_cast<int32_t>(args.addend != nullptr ? args.addend_stride : args.residual_stride);
  p.hidden = static_cast<int32_t>(args.hidden);
  p.inverse_hidden = 1.0f / static_cast<float>(args.hidden);
  p.eps = args.eps;
  p.weight_offset = args.weight_offset == 0.0f ? -0.0f : args.weight_offset;
  p.float_weight = args.weight_dtype != args.x_dtype;
  p.aligned = !kNeedsAlignedVectors ||
              (rows_aligned(args.x, args.x_stride, sizeof(T), sizeof(Vector)) &&
               rows_aligned(args.residual, args.residual_stride, sizeof(T), sizeof(Vector)) &&
               rows_aligned(args.addend, args.addend_stride, sizeof(T), sizeof(Vector)) &&
               rows_aligned(args.weight, 0, sizeof(T), sizeof(Vector)));
  p.output = make_output(args, args.hidden, kCount);
  return p;
}

}  // namespace
}  // namespace rocm_kernels
