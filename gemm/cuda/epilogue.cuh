// The end of a tile: scales, bias, one rounding, the store.
//
// A warp finishes its sums in steps of up to 32 columns. Where out takes 16-byte stores of 16-bit
// elements, a step goes through the warp's own place in shared memory, so that lanes store rows;
// else each lane stores its elements, which takes several times as long.
#pragma once

#include "partial_sums.cuh"

namespace rocm_kernels {
namespace cuda {

// Four 8 x 8 matrices of 16-bit elements as mma leaves them, to rows of 16 bytes of shared memory:
// lanes 8 * x to 8 * x + 7 give the rows of matrix x, whose columns they are if kTransposed.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  }
}

// Where a warp's steps go by way of its staging, computed once a tile.
template <class Tile>
struct StagedStores {
  static constexpr int kPitch = Tile::kSwapped ? 48 : 80;  // bytes; no bank is met twice
  static constexpr int kVectors = Tile::kSwapped ? 2 : Tile::kStepTiles;  // in a row of the staging
  static constexpr int kStagedRows = Tile::kSwapped ? Tile::kStepTiles * 8 : 16;
  static constexpr int kItems = kStagedRows * kVectors;
  static constexpr int kRowsAtOnce = 32 / kVectors;
  uint32_t write_at, read_at;
  uint16_t* out;
  int m_own, n_own, m_left, n_left;  // from the lane's first vector to what is stored, its end
  bool is_half, has_item;

  __device__ __forceinline__ StagedStores(const WarpgroupProblem& p, const UnitInfo& unit,
                                          int warp_row, int lane, uint8_t* staging) {
    const int first_row = unit.first_row + warp_row, first_column = unit.first_column;
    const int matrix = lane / 8, half = matrix % 2;
    const uint32_t base = shared_address(staging);
    write_at = base + (Tile::kSwapped ? (matrix / 2 * 8 + lane % 8) * kPitch + half * 16
                                      : (half * 8 + lane % 8) * kPitch + matrix / 2 * 16);
    read_at = base + lane / kVectors * kPitch + lane % kVectors * 16;
    const int m = (Tile::kSwapped ? first_column : first_row) + lane / kVectors;
    const int n = (Tile::kSwapped ? first_row : first_column) + lane % kVectors * 8;
    out = static_cast<uint16_t*>(p.out) + m * p.out_stride + n;
    m_own = (Tile::kSwapped ? unit.own_column : unit.own_row) - m;
    n_own = (Tile::kSwapped ? unit.own_row : unit.own_column) - n;
    m_left = (Tile::kSwapped ? p.columns : p.rows) - m;
    n_left = (Tile::kSwapped ? p.rows : p.columns) - n;
    is_half = p.out_dtype == DType::kFloat16;
    has_item = lane < kItems;
  }

  // `values`: finished, of the step that begins at this wave and tile of columns.
  __device__ __forceinline__ void store(const WarpgroupProblem& p, int wave, int first_tile,
                                        const float (&values)[Tile::kStepTiles][4]) const {
    const DType dtype = is_half ? DType::kFloat16 : DType::kBFloat16;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Tile::kStepTiles; i += 2) {
      store_matrices<Tile::kSwapped>(write_at + (Tile::kSwapped ? i * 8 * kPitch : i * 16),
                                     pack_pair(dtype, values[i][0], values[i][1]),
                                     pack_pair(dtype, values[i][2], values[i][3]),
                                     pack_pair(dtype, values[i + 1][0], values[i + 1][1]),
                                     pack_pair(dtype, values[i + 1][2], values[i + 1][3]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (kItems + 31) / 32; ++i) {
      const int m = (Tile::kSwapped ? first_tile * 8 : wave * kWgmmaRows) + i * kRowsAtOnce;
      const int n = Tile::kSwapped ? wave * kWgmmaRows : first_tile * 8;
      const uint4 vector = load_shared(read_at + i * kRowsAtOnce * kPitch);
      if ((kItems >= 32 || has_item) && m >= m_own && m < m_left && n >= n_own && n < n_left) {
        *reinterpret_cast<uint4*>(out + m * p.out_stride + n) = vector;
      }
    }
  }
};

// Scales and bias of a step's sums. `lane_row`: the lane's first row, within the tile.
template <class Tile>
__device__ __forceinline__ void apply_factors(const UnitInfo& unit, int lane_row, int quad,
                                              int first_tile,
                                              const float (&sums)[Tile::kStepTiles][4],
                                              float (&values)[Tile::kStepTiles][4]) {
#pragma unroll
  for (int i = 0; i < Tile::kStepTiles; ++i) {
    const int column = (first_tile + i) * 8 + quad * 2;
    const float2 of_columns = *reinterpret_cast<const float2*>(unit.column_factor + column);
    float2 bias = make_float2(0.0f, 0.0f);
    if (!Tile::kSwapped) bias = *reinterpret_cast<const float2*>(unit.bias + column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + half * 8;
      const float of_row = unit.row_factor[row];
      if (Tile::kSwapped) bias.x = bias.y = unit.bias[row];
      values[i][half * 2] = sums[i][half * 2] * of_row * of_columns.x + bias.x;
      values[i][half * 2 + 1] = sums[i][half * 2 + 1] * of_row * of_columns.y + bias.y;
    }
  }
}

// Stores the steps (bits) of this warpgroup's part of a tile. `thread` counts within the warpgroup;
// `staging` is its warp's own.
template <class Tile>
__device__ __forceinline__ void finish_sums(
    const WarpgroupProblem& p, const UnitInfo& unit, int rank, int group, int thread,
    uint8_t* staging, uint32_t steps, const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
  const int lane = thread % 32, quad = lane % 4;
  const int warp_row = group * Tile::kWaves * kWgmmaRows + thread / 32 * 16;  // within the tile
  const bool by_vectors = p.wide_stores && p.out_dtype != DType::kFloat32;
  const StagedStores<Tile> stores(p, unit, warp_row, lane, staging);
  if (by_vectors && unit.contributors == 1) {
    for_each_step<Tile::kSteps>([&](auto constant) {
      constexpr int step = decltype(constant)::value;
      constexpr int wave = step / Tile::kColumnSteps;
      constexpr int first_tile = step % Tile::kColumnSteps * Tile::kStepTiles;
      float total[Tile::kStepTiles][4], values[Tile::kStepTiles][4];
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i][j] = sums[wave][first_tile + i][j];
      }
      apply_factors<Tile>(unit, warp_row + wave * kWgmmaRows + lane / 4, quad, first_tile, total,
                          values);
      stores.store(p, wave, first_tile, values);
    });
    return;
  }
  for_each_step<Tile::kSteps>([&](auto constant) {
    constexpr int step = decltype(constant)::value;
    constexpr int wave = step / Tile::kColumnSteps;
    constexpr int first_tile = step % Tile::kColumnSteps * Tile::kStepTiles;
    if (!(steps >> step & 1)) return;
    float total[Tile::kStepTiles][4], values[Tile::kStepTiles][4];
    if (unit.contributors > 1) {
      add_up_step<Tile, step>(p, unit, rank, group, thread, sums, total);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i][j] = sums[wave][first_tile + i][j];
      }
    }
    const int lane_row = warp_row + wave * kWgmmaRows + lane / 4;
    apply_factors<Tile>(unit, lane_row, quad, first_tile, total, values);
    if (by_vectors) {
      stores.store(p, wave, first_tile, values);
      return;
    }
    const int own_row = unit.own_row - unit.first_row, last_row = p.rows - unit.first_row;
    const int own_column = unit.own_column - unit.first_column;
    const int last_column = p.columns - unit.first_column;
#pragma unroll
    for (int i = 0; i < Tile::kStepTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = lane_row + j / 2 * 8, column = (first_tile + i) * 8 + quad * 2 + j % 2;
        if (row < own_row || row >= last_row) continue;
        if (column < own_column || column >= last_column) continue;
        const int64_t r = unit.first_row + row, c = unit.first_column + column;
        const int64_t at = Tile::kSwapped ? c * p.out_stride + r : r * p.out_stride + c;
        if (p.out_dtype == DType::kFloat32) {
          static_cast<float*>(p.out)[at] = values[i][j];
        } else {
          static_cast<uint16_t*>(p.out)[at] =
              static_cast<uint16_t>(pack_pair(p.out_dtype, values[i][j], 0.0f));
        }
      }
    }
  });
}

}  // namespace cuda
}  // namespace rocm_kernels
