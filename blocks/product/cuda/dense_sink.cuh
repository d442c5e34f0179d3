// The Sink (sink.h) of one matrix product: scales, bias, one rounding, the store to rows of out.
//
// A warp finishes its sums in steps of up to 32 columns. Where out takes 16-byte stores of 16-bit
// elements, a step goes through the warp's own place in shared memory. From there TMA
// stores boxes while the next tile is multiplied: stored by lanes, the end of 256 x 96 took 2.8 us
// of a tile's 9.2 at K = 1536, for all SMs write at once. Lanes store rows of tiles that are shared
// or cut by an edge, and where w is the rows operand. Else each lane stores its elements, which
// takes several times as long.
#pragma once

#include "../sink.h"
#include "partial_sums.cuh"

namespace rocm_kernels {
namespace cuda {

// Sums of 16-bit elements, pair by pair, each rounded as torch rounds it: float32 holds them
// exactly or far from a tie.
__device__ __forceinline__ uint32_t add_pair(DType dtype, uint32_t x, uint32_t y) {
  if (dtype == DType::kFloat16) {
    const __half2 sum =
        __hadd2_rn(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
    return *reinterpret_cast<const uint32_t*>(&sum);
  }
  const __nv_bfloat162 sum = __hadd2_rn(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                        *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&sum);
}
__device__ __forceinline__ uint4 add_vectors(DType dtype, uint4 x, uint4 y) {
  return {add_pair(dtype, x.x, y.x), add_pair(dtype, x.y, y.y), add_pair(dtype, x.z, y.z),
          add_pair(dtype, x.w, y.w)};
}

// Where a warp's steps go by way of its staging, computed once a tile.
template <class Tile>
struct StagedStores {
  static constexpr int kPitch = Tile::kSwapAb ? 48 : 80;  // bytes; no bank is met twice
  static constexpr int kVectors = Tile::kSwapAb ? 2 : Tile::kStepTiles;  // in a row of the staging
  static constexpr int kStagedRows = Tile::kSwapAb ? Tile::kStepTiles * 8 : 16;
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
    write_at = base + (Tile::kSwapAb ? (matrix / 2 * 8 + lane % 8) * kPitch + half * 16
                                     : (half * 8 + lane % 8) * kPitch + matrix / 2 * 16);
    read_at = base + lane / kVectors * kPitch + lane % kVectors * 16;
    const int m = (Tile::kSwapAb ? first_column : first_row) + lane / kVectors;
    const int n = (Tile::kSwapAb ? first_row : first_column) + lane % kVectors * 8;
    out = static_cast<uint16_t*>(p.out) + m * p.out_stride + n;
    m_own = (Tile::kSwapAb ? unit.own_column : unit.own_row) - m;
    n_own = (Tile::kSwapAb ? unit.own_row : unit.own_column) - n;
    m_left = (Tile::kSwapAb ? p.columns : p.rows) - m;
    n_left = (Tile::kSwapAb ? p.rows : p.columns) - n;
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
      store_matrices<Tile::kSwapAb>(write_at + (Tile::kSwapAb ? i * 8 * kPitch : i * 16),
                                    pack_pair(dtype, values[i][0], values[i][1]),
                                    pack_pair(dtype, values[i][2], values[i][3]),
                                    pack_pair(dtype, values[i + 1][0], values[i + 1][1]),
                                    pack_pair(dtype, values[i + 1][2], values[i + 1][3]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (kItems + 31) / 32; ++i) {
      const int m = (Tile::kSwapAb ? first_tile * 8 : wave * kWgmmaRows) + i * kRowsAtOnce;
      const int n = Tile::kSwapAb ? wave * kWgmmaRows : first_tile * 8;
      uint4 vector = load_shared(read_at + i * kRowsAtOnce * kPitch);
      if ((kItems >= 32 || has_item) && m >= m_own && m < m_left && n >= n_own && n < n_left) {
        uint4* const at = reinterpret_cast<uint4*>(out + m * p.out_stride + n);
        if (p.adds) vector = add_vectors(dtype, *at, vector);
        *at = vector;
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
    if (!Tile::kSwapAb) bias = *reinterpret_cast<const float2*>(unit.bias + column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + half * 8;
      const float of_row = unit.row_factor[row];
      if (Tile::kSwapAb) bias.x = bias.y = unit.bias[row];
      values[i][half * 2] = sums[i][half * 2] * of_row * of_columns.x + bias.x;
      values[i][half * 2 + 1] = sums[i][half * 2 + 1] * of_row * of_columns.y + bias.y;
    }
  }
}

// A tile's outputs by TMA. `warp_row`: the first of the warp's, within the tile.
template <class Tile>
__device__ __forceinline__ void store_boxes(
    const WarpgroupProblem& p, const UnitInfo& unit, int warp_row, int lane, uint8_t* staging,
    const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLine = Tile::kBoxSteps * 64;  // bytes of a row of a box
  constexpr int kBoxBytes = kStagedRows * kLine;
  constexpr int kBoxes = Tile::kSteps / Tile::kBoxSteps, kOfWave = kBoxes / Tile::kWaves;
  // A lane gives stmatrix row `row` of two columns of 16 bytes; `swizzle` is what TMA
  // makes of the first column, and of those further by their exclusive or.
  const int row = lane / 8 % 2 * 8 + lane % 8;
  const int swizzle = (lane / 16) ^ (kLine == 128 ? row % 8 : row / 2 % 4);
  const uint32_t base = shared_address(staging);
  const uint32_t write_at = base + row * kLine;
  const DType dtype = Tile::kOutIsKnown ? Tile::kKnownOut : p.out_dtype;
  for_each_step<kBoxes>([&](auto constant) {
    constexpr int box = decltype(constant)::value, wave = box / kOfWave;
    constexpr int place = box % Tile::kStagedBoxes, buffer = place * kBoxBytes;
    // How many boxes ago its place was stored from: in this tile, or in one stored like it.
    constexpr int ago =
        box >= Tile::kStagedBoxes
            ? Tile::kStagedBoxes
            : box + kBoxes -
                  (place + (kBoxes - 1 - place) / Tile::kStagedBoxes * Tile::kStagedBoxes);
    if (lane == 0) wait_for_reads_of_stores<ago - 1>();
    __syncwarp();
#pragma unroll
    for (int step = 0; step < Tile::kBoxSteps; ++step) {
      const int first_tile = (box % kOfWave * Tile::kBoxSteps + step) * Tile::kStepTiles;
      float total[Tile::kStepTiles][4], values[Tile::kStepTiles][4];
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i][j] = sums[wave][first_tile + i][j];
      }
      apply_factors<Tile>(unit, warp_row + wave * kWgmmaRows + lane / 4, lane % 4, first_tile,
                          total, values);
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; i += 2) {
        store_matrices<false>(write_at + buffer + ((swizzle ^ (step * Tile::kStepTiles + i)) * 16),
                              pack_pair(dtype, values[i][0], values[i][1]),
                              pack_pair(dtype, values[i][2], values[i][3]),
                              pack_pair(dtype, values[i + 1][0], values[i + 1][1]),
                              pack_pair(dtype, values[i + 1][2], values[i + 1][3]));
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      const int first_row = unit.first_row + warp_row + wave * kWgmmaRows;
      if (p.adds) {
        const int first_column = unit.first_column + box % kOfWave * (kLine / 2);
        add_box_2d(p.out_map, first_column, first_row, base + buffer);
      } else {
        store_box_2d(p.out_map, unit.first_column * 2 + box % kOfWave * kLine, first_row,
                     base + buffer);
      }
      commit_stores();
    }
  });
#endif
}

// Stores the steps (bits) of this warpgroup's part of a tile. `thread` counts within the warpgroup;
// `staging` is its warp's own.
template <class Tile>
__device__ __forceinline__ void finish_sums(
    const WarpgroupProblem& p, const UnitInfo& unit, int rank, int group, int thread,
    uint8_t* staging, uint32_t steps, const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
  const int lane = thread % 32, quad = lane % 4;
  const int warp_row = group * Tile::kWaves * kWgmmaRows + thread / 32 * 16;  // within the tile
  if constexpr (!Tile::kSwapAb) {
    if (p.wide_stores && unit.contributors == 1 && unit.own_row == unit.first_row &&
        unit.own_column == unit.first_column) {
      return store_boxes<Tile>(p, unit, warp_row, lane, staging, sums);
    }
#if __CUDA_ARCH__ >= 900
    if (lane == 0) wait_for_reads_of_stores<0>();
    __syncwarp();
#endif
  }
  const StagedStores<Tile> stores(p, unit, warp_row, lane, staging);
  if (Tile::kSwapAb && p.wide_stores && unit.contributors == 1) {
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
    if (p.wide_stores) {
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
        const int64_t at = Tile::kSwapAb ? c * p.out_stride + r : r * p.out_stride + c;
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

template <class Tile>
class DenseSink {
 public:
  static constexpr int kPlaces = 0;  // rows of out are the tile's own
  struct Shared {};
  __device__ __forceinline__ static void init(Shared&) {}
  __device__ __forceinline__ static int warp_staging(const WarpgroupProblem&) {
    return Tile::kWarpStaging;
  }

  __device__ __forceinline__ DenseSink(const WarpgroupProblem& p, int rank, Shared&)
      : p_(p), rank_(rank) {}

  __device__ __forceinline__ void finish(
      const UnitPart& part, const float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) const {
    const UnitInfo& unit = part.unit;
    uint32_t steps = ~0u;
    if (unit.contributors > 1) {
      steps = publish_sums<Tile>(p_, unit, rank_, part.group, part.thread, part.shared_word, sums);
    }
    finish_sums<Tile>(p_, unit, rank_, part.group, part.thread, part.staging, steps, sums);
  }
  // TMA has stored them.
  __device__ __forceinline__ void end() const {
#if __CUDA_ARCH__ >= 900
    if (!Tile::kSwapAb) wait_for_stores();
#endif
  }

 private:
  const WarpgroupProblem& p_;
  const int rank_;
};

}  // namespace cuda
}  // namespace rocm_kernels
