// What a layer does to whole rows beside its two products: x and h to FP8, and the sum of a token's
// slots.
#pragma once

#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/quantize.h"
#include "../../common/gpu/row.h"
#include "problem.h"

namespace rocm_kernels {

constexpr int kRowThreads = 256;

struct QuantizeProblem {
  const void* rows;  // [rows, columns], T
  int64_t stride;    // elements
  int32_t columns;
  bool aligned;              // whole vectors may be loaded
  const int32_t* row_count;  // where the device alone knows it; nullptr: the grid's
  const int32_t* ids;        // [rows]: those whose id is no expert's are left out; nullptr: none is
  int32_t experts;
  const int32_t*
      slot_rows;  // [rows, copies]: where each row's copies go; nullptr: to its own place
  int32_t copies;
  bool is_gate;   // lets the next kernel begin when all before this one is done, and no sooner
  Output output;  // kPerToken, or kPerGroup of 128
};

// Rows to FP8 with one scale a row or one for each 128 columns, or as they are; read once for all
// copies of them. A row that is scaled as a whole is read twice, the second time from cache. Grid:
// a block a row, as many as there can be.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) moe_quantize_kernel(const QuantizeProblem p) {
  constexpr int kCount = kVectorElements<T>;
  constexpr int kStep = kRowThreads * kCount;
  __shared__ TeamScratch scratch;
  int slot = 0;
  if (p.is_gate) {
    wait_for_previous_kernel();
    allow_next_kernel();
  } else {
    begin_after_previous_kernel();
  }
  const int row = static_cast<int>(blockIdx.x);
  if (p.row_count != nullptr && row >= *p.row_count) return;
  if (p.ids != nullptr && (p.ids[row] < 0 || p.ids[row] >= p.experts)) return;
  const T* source = static_cast<const T*>(p.rows) + row * p.stride;
  const int begin = static_cast<int>(threadIdx.x) * kCount;
  const auto values_of = [&](int column, float (&values)[kCount]) {
    unpack<T>(load_vector<Touch::kAgain, Fit::kRagged>(source, column, p.columns, p.aligned),
              values);
  };
  float inverse = 1.0f;
  if (p.output.scaling == Scaling::kPerToken) {
    float amax = 0.0f;
    for (int column = begin; column < p.columns; column += kStep) {
      float values[kCount];
      values_of(column, values);
      amax = amax_of(values, amax);
    }
    amax = reduce_team<RowTeam<kRowThreads, 1>>(amax, MaxMagnitude{}, scratch, slot);
    const float scale = scale_of_amax(amax, p.output);
    if (static_cast<int>(threadIdx.x) < p.copies) {
      const int to = p.slot_rows == nullptr ? row : p.slot_rows[row * p.copies + threadIdx.x];
      if (to >= 0) p.output.scales[to] = scale;
    }
    inverse = 1.0f / scale;
  }
  // All threads go on to the end: a group of columns is reduced over neighbouring lanes.
  for (int first = 0; first < p.columns; first += kStep) {
    float values[kCount] = {};
    if (first + begin < p.columns) values_of(first + begin, values);
    for (int copy = 0; copy < p.copies; ++copy) {
      const int to = p.slot_rows == nullptr ? row : p.slot_rows[row * p.copies + copy];
      if (to < 0) continue;
      store_output<T, Fit::kRagged>(values, inverse, to, first + begin, p.columns, p.output);
    }
  }
}

struct CombineProblem {
  const float* parts;  // [split_k][slots][hidden]
  int64_t slots;
  const float* weights;  // [tokens, k]
  const int32_t* ids;    // [tokens, k]
  int32_t split_k, k, experts, hidden;
  void* out;  // [tokens, hidden]
  int64_t out_stride;
  DType out_dtype;
};

// out[t] = sum over its slots, in order, of weight * (sum over the parts of K, in order); rounded
// once. Grid: tokens x blocks of kRowThreads columns.
__global__ void __launch_bounds__(kRowThreads) moe_combine_kernel(const CombineProblem p) {
  begin_after_previous_kernel();
  const int64_t token = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y) * kRowThreads + static_cast<int>(threadIdx.x);
  if (column >= p.hidden) return;
  float sum = 0.0f;
  for (int j = 0; j < p.k; ++j) {
    const int64_t slot = token * p.k + j;
    const int32_t id = p.ids[slot];
    if (id < 0 || id >= p.experts) continue;
    float value = 0.0f;
    for (int part = 0; part < p.split_k; ++part) {
      value += p.parts[(part * p.slots + slot) * p.hidden + column];
    }
    sum = fmaf(p.weights[slot], value, sum);
  }
  store_element(p.out, p.out_dtype, token * p.out_stride + column, sum);
}

}  // namespace rocm_kernels
