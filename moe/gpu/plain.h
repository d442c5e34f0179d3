// Grouped products for everything that no matrix instruction takes: any types, strides and
// alignment, any GPU. A wave makes 8 rows of a times one row of w, or its gate and its up, in
// float32; lanes stride over K one element at a time, and their sums are added in a fixed order.
#pragma once

#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "../../common/gpu/reduce.h"
#include "problem.h"

namespace rocm_kernels {

constexpr int kPlainRows = 8;   // of a, that a wave serves: block_m
constexpr int kPlainWaves = 4;  // of a block, one column of out each

namespace detail {

// Element k of row `row` of an expert's w, with the scales that change along K.
ROCM_KERNELS_DEVICE float scaled_weight(const ExpertWeights& w, const ScaleView& scale, int expert,
                                        int64_t row, int k) {
  const int64_t start = expert * w.expert_stride + row * w.row_stride;
  if (w.dtype == DType::kFloat4E2M1x2) {
    const uint8_t* exponents = w.mx_scales + expert * w.mx_expert_stride + row * w.mx_row_stride;
    return load_element(w.data, w.dtype, 2 * start + k) *
           load_exponent(exponents + k / kMxScaleBlock);
  }
  return load_element(w.data, w.dtype, start + k) * scale.block(row / kScaleBlock, k / kScaleBlock);
}

// `rows` products of one row of w, whole in every lane.
ROCM_KERNELS_DEVICE void plain_sums(const GroupedProblem& p, const RowTile& tile, int w_row,
                                    float (&sums)[kPlainRows]) {
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const ScaleView scale = p.w.scale_of(tile.expert);
  const int rows = tile.end - tile.begin;
#pragma unroll
  for (int i = 0; i < kPlainRows; ++i) sums[i] = 0.0f;
  for (int k = lane; k < p.k; k += kWaveSize) {
    const float w = scaled_weight(p.w, scale, tile.expert, w_row, k);
    for (int i = 0; i < kPlainRows && i < rows; ++i) {
      const int64_t row = p.a_row(tile.begin + i);
      const float a = load_element(p.a, p.a_dtype, row * p.a_stride + k) *
                      p.scale_a.block(row, k / kScaleBlock);
      sums[i] = fmaf(a, w, sums[i]);
    }
  }
  for (int i = 0; i < kPlainRows && i < rows; ++i) {
    sums[i] = reduce_lanes<kWaveSize>(sums[i], Sum{});
    sums[i] *= p.scale_a.outer(p.a_row(tile.begin + i)) * scale.outer(w_row);
    sums[i] += p.bias(tile.expert, w_row);
  }
}

}  // namespace detail

// Grid: most_row_tiles() x blocks of columns, whose waves take columns in turn.
template <GroupedEnd kEnd>
__global__ void __launch_bounds__(kPlainWaves * 64) moe_plain_kernel(const GroupedProblem p) {
  begin_after_previous_kernel();
  if (static_cast<int>(blockIdx.x) >= *p.tile_count) return;
  const RowTile tile = p.tiles[blockIdx.x];
  const int wave = static_cast<int>(threadIdx.x) / kWaveSize;
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int columns = kEnd == GroupedEnd::kGateUp ? p.n / 2 : p.n;
  for (int column = static_cast<int>(blockIdx.y) * kPlainWaves + wave; column < columns;
       column += static_cast<int>(gridDim.y) * kPlainWaves) {
    float values[kPlainRows];
    if constexpr (kEnd == GroupedEnd::kGateUp) {
      float up[kPlainRows];
      const int gate_row = p.interleaved ? 2 * column : column;
      detail::plain_sums(p, tile, gate_row, values);
      detail::plain_sums(p, tile, p.interleaved ? gate_row + 1 : columns + column, up);
#pragma unroll
      for (int i = 0; i < kPlainRows; ++i) {
        values[i] = gated(p.activation, p.limit, values[i], up[i]);
      }
    } else {
      detail::plain_sums(p, tile, column, values);
    }
    for (int i = 0; i < kPlainRows && tile.begin + i < tile.end; ++i) {
      if (lane == 0) {
        store_element(p.out, p.out_dtype, p.out_row(tile.begin + i, 0) + column, values[i]);
      }
    }
  }
}

// Host.
inline Status launch_plain_grouped(GroupedEnd end, const GroupedProblem& p, int64_t most_tiles,
                                   const DeviceFacts& facts, Stream stream) {
  const int64_t columns = end == GroupedEnd::kGateUp ? p.n / 2 : p.n;
  const int64_t blocks = (columns + kPlainWaves - 1) / kPlainWaves;
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(most_tiles),
                     static_cast<unsigned>(blocks < 65535 ? blocks : 65535));
  launch.block = kPlainWaves * facts.wave_size;
  launch.stream = stream;
  launch.early = facts.is_hopper_or_later();
  switch (end) {
    case GroupedEnd::kGateUp:
      return launch_kernel(moe_plain_kernel<GroupedEnd::kGateUp>, launch, p);
    case GroupedEnd::kDown:
      return launch_kernel(moe_plain_kernel<GroupedEnd::kDown>, launch, p);
    case GroupedEnd::kGrouped:
      return launch_kernel(moe_plain_kernel<GroupedEnd::kGrouped>, launch, p);
  }
  return nullptr;
}

}  // namespace rocm_kernels
