// The last step of a row kernel, or of a product with an FP8 output: float32 results to the
// output's type, with their scale.
#pragma once

#include <cfloat>

#include "../../../common/core/dtype.h"
#include "../../../common/core/scale_rounding.h"
#include "../../../common/gpu/launch.h"
#include "../../../common/gpu/reduce.h"
#include "../../../common/gpu/vector.h"

namespace rocm_kernels {

// Where results go and how they are quantised; built by the launcher, passed by value.
struct Output {
  void* data;          // [rows, columns]
  int64_t stride;      // elements between rows
  float* scales;       // [rows] or [rows, groups]; kPerToken and kPerGroup
  const float* scale;  // [1]; kStatic
  float fp8_max;       // 448 or 240
  float amax_bound;    // FLT_MAX, or the caller's scale_ub
  ScaleRounding scale_rounding;
  int32_t groups;       // a row
  int32_t group_shift;  // 1 << group_shift neighbouring lanes share a group
  Scaling scaling;
  int32_t fnuz;     // flags are words: scalar loads have no bytes
  int32_t aligned;  // whole vectors may be stored at once
};

// Groups are reduced across neighbouring lanes, so their size is the elements of 1, 2, 4, ... lanes
// within a row of 16 lanes (32 for float32).
constexpr int32_t kLargestGroup = 128;

// What make_output() asks for, where no op's arguments say so: an op's own have these names too.
struct OutputArgs {
  void* out;
  int64_t out_stride;
  DType out_dtype;
  Scaling scaling;
  float* scales;
  int32_t group_size;
  bool ue8m0;
  const float* static_scale = nullptr;
  float scale_ub = 0.0f;  // none
};

// From a launcher's arguments; `lane_elements`: of a vector.
template <typename Args>
Output make_output(const Args& args, int64_t columns, int32_t lane_elements) {
  Output output{};
  output.data = args.out;
  output.stride = static_cast<int32_t>(args.out_stride);
  output.scales = args.scales;
  output.scale = args.static_scale;
  output.fp8_max = fp8_max(args.out_dtype);
  output.amax_bound = args.scale_ub > 0.0f ? args.scale_ub : FLT_MAX;
  output.scale_rounding = ScaleRounding::of(args.ue8m0);
  if (args.scaling == Scaling::kPerGroup) {
    output.groups = static_cast<int32_t>((columns + args.group_size - 1) / args.group_size);
    // A row that is one short group takes no more lanes than it has: its team may have no others.
    const int64_t span = columns < args.group_size ? columns : args.group_size;
    while (lane_elements << output.group_shift < span) ++output.group_shift;
  }
  output.scaling = args.scaling;
  output.fnuz = args.out_dtype == DType::kFloat8E4M3FNUZ;
  output.aligned =
      !kNeedsAlignedVectors || rows_aligned(args.out, args.out_stride, size_of(args.out_dtype),
                                            lane_elements * size_of(args.out_dtype));
  return output;
}

// Host: whether kernels of Fit::kWhole may write this output. They know the dialect that the target
// prefers and no other, which keeps a software conversion out of the code that matters.
inline bool fits(const Output& output, const DeviceFacts& facts) {
  return output.aligned && (output.scaling == Scaling::kNone || output.fnuz == facts.fnuz);
}

ROCM_KERNELS_DEVICE float scale_of_amax(float amax, const Output& output) {
  return output.scale_rounding(fmaxf(fminf(amax, output.amax_bound) / output.fp8_max, kMinScale));
}

// Largest magnitude of a lane's values and `amax`; NaN is ignored.
template <int kCount>
ROCM_KERNELS_DEVICE float amax_of(const float (&y)[kCount], float amax) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(y[i]));
  return amax;
}

// Over the 1 << shift neighbouring lanes that share a group.
ROCM_KERNELS_DEVICE float reduce_group(float amax, int shift) {
  const MaxMagnitude op;
  if (shift >= 1) amax = op(amax, other_half<1>(amax));
  if (shift >= 2) amax = op(amax, other_half<2>(amax));
  if (shift >= 3) amax = op(amax, other_half<4>(amax));
  if (shift >= 4) amax = op(amax, other_half<8>(amax));
  if (shift >= 5) amax = op(amax, other_half<16>(amax));
  return amax;
}

// y * inverse as FP8.
template <Fit kFit, int kCount>
ROCM_KERNELS_DEVICE void fp8_codes(const float (&y)[kCount], float inverse, const Output& output,
                                   uint32_t (&codes)[kCount / 4]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float a = y[i] * inverse, b = y[i + 1] * inverse;
    const float c = y[i + 2] * inverse, d = y[i + 3] * inverse;
    // Rows that fit come in the target's own dialect: see `fits`.
    const bool fnuz = kFit == Fit::kWhole ? kPreferredFnuz : output.fnuz;
    codes[i / 4] = fnuz ? fp8x4_from_float<true>(a, b, c, d) : fp8x4_from_float<false>(a, b, c, d);
  }
}

// Stores codes of a lane's vector.
template <Fit kFit, int kWords>
ROCM_KERNELS_DEVICE void store_codes(const uint32_t (&codes)[kWords], int row, int column,
                                     int columns, const Output& output) {
  store_words<1, kFit>(static_cast<uint8_t*>(output.data) + int64_t{row} * output.stride, column,
                       columns, output.aligned, codes);
}

// Stores y * inverse as FP8.
template <Fit kFit, int kCount>
ROCM_KERNELS_DEVICE void store_fp8(const float (&y)[kCount], float inverse, int row, int column,
                                   int columns, const Output& output) {
  uint32_t codes[kCount / 4];
  fp8_codes<kFit>(y, inverse, output, codes);
  store_codes<kFit>(codes, row, column, columns, output);
}

// The scale of the group of columns that a lane's vector is in, and its number, -1 in all but the
// group's first lane. All lanes of a wave take part; those beyond the row have columns <= column.
struct GroupScale {
  float scale;
  int group;
};
template <typename T>
ROCM_KERNELS_DEVICE GroupScale group_scale(const float (&y)[kVectorElements<T>], int column,
                                           int columns, const Output& output) {
  const float amax = reduce_group(column < columns ? amax_of(y, 0.0f) : 0.0f, output.group_shift);
  const int vector = column / kVectorElements<T>;
  const int group = vector >> output.group_shift;
  const bool is_first = column < columns && group << output.group_shift == vector;
  return {scale_of_amax(amax, output), is_first ? group : -1};
}

// Stores a lane's values of one vector with every scaling that needs no other thread's values than
// its group's: `inverse` is the reciprocal of the scale for kStatic and kPerToken. All lanes of a
// wave take part; those beyond the row have columns <= column.
template <typename T, Fit kFit>
ROCM_KERNELS_DEVICE void store_output(const float (&y)[kVectorElements<T>], float inverse, int row,
                                      int column, int columns, const Output& output) {
  if (output.scaling == Scaling::kNone) {
    store_words<sizeof(T), kFit>(static_cast<T*>(output.data) + int64_t{row} * output.stride,
                                 column, columns, output.aligned, pack<T>(y).word);
    return;
  }
  if (output.scaling == Scaling::kPerGroup) {
    const GroupScale of_group = group_scale<T>(y, column, columns, output);
    inverse = 1.0f / of_group.scale;
    if (of_group.group >= 0) {
      output.scales[int64_t{row} * output.groups + of_group.group] = of_group.scale;
    }
  }
  store_fp8<kFit>(y, inverse, row, column, columns, output);
}

}  // namespace rocm_kernels
