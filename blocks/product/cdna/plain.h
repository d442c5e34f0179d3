// Products without matrix instructions: for GPUs that have none that these kernels know
// (CDNA2, RDNA), in either FP8 dialect.
//
// A wave makes 8 rows of a times one row of w: lanes stride over K in chunks of 8 elements,
// multiply in float32, and sum across the wave in a fixed order. w is read once for every 8 rows of
// a.
#pragma once

#include <type_traits>

#include "../../../common/gpu/launch.h"
#include "../../../common/gpu/reduce.h"
#include "problem.h"

namespace rocm_kernels::cdna {

constexpr int kPlainRows = 8;   // rows of a that a wave serves
constexpr int kPlainWaves = 4;  // of a workgroup, one row of w each

namespace detail {

constexpr int kChunk = 8;  // elements of K

// Elements [k, k + 8) of a row as float, zeros from `end` on.
template <DType kDType>
ROCM_KERNELS_DEVICE void load_chunk(const uint8_t* row, int k, int end, float (&values)[kChunk]) {
  if constexpr (is_fp8(kDType)) {
    constexpr bool kFnuz = kDType == DType::kFloat8E4M3FNUZ;
    if (k + kChunk <= end) {
      const auto codes = load<Touch::kAgain, Vec<uint32_t, 2>>(row + k);
      for (int half = 0; half < 2; ++half) {
        float four[4];
        fp8x4_to_float<kFnuz>(codes[half], four);
        for (int i = 0; i < 4; ++i) values[4 * half + i] = four[i];
      }
    } else {
      for (int i = 0; i < kChunk; ++i) {
        values[i] = k + i < end ? fp8_to_float<kFnuz>(row[k + i]) : 0.0f;
      }
    }
  } else {
    using T = std::conditional_t<kDType == DType::kFloat16, float16, bfloat16>;
    const T* source = reinterpret_cast<const T*>(row) + k;
    if (k + kChunk <= end) {
      const auto elements = load<Touch::kAgain, Vec<T, kChunk>>(source);
      for (int i = 0; i < kChunk; ++i) values[i] = to_float(elements[i]);
    } else {
      for (int i = 0; i < kChunk; ++i) values[i] = k + i < end ? to_float(source[i]) : 0.0f;
    }
  }
}

ROCM_KERNELS_DEVICE float load_element(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kFloat16) return to_float(static_cast<const float16*>(data)[i]);
  return to_float(static_cast<const bfloat16*>(data)[i]);
}
ROCM_KERNELS_DEVICE void store_element(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else if (dtype == DType::kFloat16) {
    static_cast<float16*>(data)[i] = from_float<float16>(value);
  } else {
    static_cast<bfloat16*>(data)[i] = from_float<bfloat16>(value);
  }
}

}  // namespace detail

template <DType kDTypeA, DType kDTypeW>
__global__ void __launch_bounds__(256) gemm_plain(const GemmProblem p) {
  const int wave = static_cast<int>(threadIdx.x) / kWaveSize;
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int column = blockIdx.x * kPlainWaves + wave;  // of out: a row of w
  const int row_begin = blockIdx.y * kPlainRows;
  if (column >= p.n) return;

  const uint8_t* w = p.w + column * p.w_stride;
  float sums[kPlainRows] = {};
  for (int k = lane * detail::kChunk; k < p.k; k += kWaveSize * detail::kChunk) {
    float w_values[detail::kChunk];
    detail::load_chunk<kDTypeW>(w, k, p.k, w_values);
    const float w_scale = p.scale_w.block(column / kScaleBlock, k / kScaleBlock);
    for (int i = 0; i < kPlainRows; ++i) {
      const int row = row_begin + i;
      if (row >= p.m) break;
      float a_values[detail::kChunk], sum = 0.0f;
      detail::load_chunk<kDTypeA>(p.a + row * p.a_stride, k, p.k, a_values);
      for (int j = 0; j < detail::kChunk; ++j) sum += a_values[j] * w_values[j];
      sums[i] += sum * (p.scale_a.block(row, k / kScaleBlock) * w_scale);
    }
  }
  for (int i = 0; i < kPlainRows; ++i) {
    const int row = row_begin + i;
    if (row >= p.m) break;
    float value = reduce_lanes<kWaveSize>(sums[i], Sum{});
    if (lane != 0) continue;
    value *= p.scale_a.outer(row);
    value *= p.scale_w.outer(column);
    if (p.bias != nullptr) value += detail::load_element(p.bias, p.bias_dtype, column);
    detail::store_element(p.out, p.out_dtype, row * p.out_stride + column, value);
  }
}

}  // namespace rocm_kernels::cdna
