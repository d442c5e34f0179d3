// Scales of blocks of 128 for gemm's warpgroup kernel (warpgroup.cuh).
//
// The warps that multiply fetch them for themselves, a run of four chunks of K at a time and one
// run ahead: lane i has rows i / 4, i / 4 + 8, ... and chunk i % 4. When a run begins they write
// the products with w's to a table in shared memory, from where a thread reads those of its sums.
// Rows of a that are rows belong to one warp, which has a table of its own. Rows of a that are
// columns are a warpgroup's, so its four warps fetch a quarter each; a barrier a run, and two
// tables in turn, keep them together.
//
// A warp that fetched for all, with barriers for full and empty buffers, cost a thread that
// multiplies 33 instructions a chunk of 128 x 128 x 128, and the tensor cores wait for those
// (docs/kernels/gemm_journal.md).
#pragma once

#include "problem.cuh"

namespace rocm_kernels {
namespace cuda {

// In its place where no scale is a block's.
struct NoBlockScales {
  __device__ __forceinline__ NoBlockScales(int, int, float*) {}
  template <class Tiles>
  __device__ __forceinline__ void begin(const Tiles&, const UnitInfo&) {}
};

template <class Tile>
class BlockScales {
 public:
  static constexpr int kGroups = Tile::kWScales;

  // For warp `warp` of those that multiply. `tables`: Tile::kWarpScaleBytes for each of these.
  __device__ __forceinline__ BlockScales(int warp, int lane, float* tables)
      : table_(tables + warp / kSharers * kSharers * (Tile::kWarpScaleBytes / 4)),
        warp_(warp),
        lane_(lane) {}

  // From here on the chunks of `unit`.
  template <class Tiles>
  __device__ __forceinline__ void begin(const Tiles& tiles, const UnitInfo& unit) {
    const ScaleView& a = tiles.scale_a();
    const ScaleView& w = tiles.blocks_of_w();
    const int group = warp_ / 4, chunk = lane_ % kScaleRun;
    const int64_t block = (unit.first_chunk + chunk) / Tile::kChunksOfBlock;
    const int row = Tile::kSwapAb
                        ? unit.first_column + own_row()
                        : unit.first_row + group * Tile::kGroupRows + warp_ % 4 * 16 + own_row();
    rows_ = a.is_blocked() ? (Tile::kSwapAb ? unit.end_column : unit.end_row) - row : 0;
    a_ = a.data + row * a.row_stride + block * a.block_stride;
    const int first_group = Tile::kSwapAb ? group * Tile::kGroupRows / Tile::kWGroup : 0;
    w_ = unit.w_scales[first_group + min(lane_ / kScaleRun, kGroups - 1)] + block * w.block_stride;
    left_ = unit.chunks - chunk;
    in_run_ = 0;
    // What is no block's scale counts as 1 here, and is applied at the end.
#pragma unroll
    for (float& value : next_a_) value = 1.0f;
    next_w_ = 1.0f;
    fetch(tiles);
  }

  // To chunk kChunk of the kLoopChunks that the caller's loop goes by.
  template <int kChunk, int kLoopChunks, class Tiles>
  __device__ __forceinline__ void advance(const Tiles& tiles) {
    if constexpr (kChunk == 0) {
      if (in_run_ == 0) begin_run(tiles);
      now_ = table_ + (turn_ * kScaleRun + in_run_) * kChunkScales;
      in_run_ = (in_run_ + kLoopChunks) % kScaleRun;
    } else {
      now_ += kChunkScales;
    }
  }

  // Of the thread's two rows of wave `wave`, with each group of columns of w.
  __device__ __forceinline__ void read_rows(int wave, float (&low)[kGroups],
                                            float (&high)[kGroups]) const {
    read_row(wave * 2, low);
    read_row(wave * 2 + 1, high);
  }
  // Of the thread's two tokens of 8 columns, where rows are w's; with group `group` of these.
  __device__ __forceinline__ float2 read_columns(int tile, int group) const {
    return *reinterpret_cast<const float2*>(now_ + group * kRows + tile * 8 + lane_ % 4 * 2);
  }

 private:
  static constexpr int kSharers = Tile::kSwapAb ? 4 : 1;  // warps that have a table together
  static constexpr int kTurns = Tile::kSwapAb ? 2 : 1;
  static constexpr int kRows = scale_rows(Tile::kRows, Tile::kColumns, Tile::kSwapAb);
  static constexpr int kLaneRows = kRows / 8 / kSharers;
  static constexpr int kPadded = Tile::kSwapAb ? 1 : padded_groups(kGroups);
  static constexpr int kChunkScales = kRows * (Tile::kSwapAb ? kGroups : kPadded) + kScaleSkew;
  static_assert(kTurns * kScaleRun * kChunkScales * 4 == kSharers * Tile::kWarpScaleBytes, "");

  // The first row of the lane's, of kRows.
  __device__ __forceinline__ int own_row() const {
    return (Tile::kSwapAb ? warp_ % kSharers * 8 : 0) + lane_ / kScaleRun;
  }

  __device__ __forceinline__ void read_row(int i, float (&scales)[kGroups]) const {
    const float* const from = now_ + (i * 8 + lane_ / kScaleRun) * kPadded;
    if constexpr (kGroups == 1) {
      scales[0] = from[0];
    } else if constexpr (kGroups == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(from);
      scales[0] = pair.x, scales[1] = pair.y;
    } else {
#pragma unroll
      for (int j = 0; j < kGroups; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + j);
        const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int k = 0; k < 4 && j + k < kGroups; ++k) scales[j + k] = values[k];
      }
    }
  }

  template <class Tiles>
  __device__ __forceinline__ void begin_run(const Tiles& tiles) {
    float w[kGroups];
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      w[j] = __shfl_sync(~0u, next_w_, j * kScaleRun + lane_ % kScaleRun);
    }
    if constexpr (Tile::kSwapAb) {
      turn_ ^= 1;  // a warp that is late still reads the last run's
    } else {
      __syncwarp();  // every lane has read the last run's
    }
    float* const to = table_ + (turn_ * kScaleRun + lane_ % kScaleRun) * kChunkScales;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = own_row() + i * 8 * kSharers;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        to[Tile::kSwapAb ? j * kRows + row : row * kPadded + j] = next_a_[i] * w[j];
      }
    }
    if constexpr (Tile::kSwapAb) {
      named_barrier(1 + warp_ / 4, 128);
    } else {
      __syncwarp();
    }
    fetch(tiles);
  }

  // Of the run that comes next, if the unit has it.
  template <class Tiles>
  __device__ __forceinline__ void fetch(const Tiles& tiles) {
    const ScaleView& a = tiles.scale_a();
    const ScaleView& w = tiles.blocks_of_w();
    const int rows = left_ > 0 ? rows_ : 0;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = Tile::kSwapAb ? i * 8 * kSharers : i / 2 * kWgmmaRows + i % 2 * 8;
      if (row < rows) next_a_[i] = a_[row * a.row_stride];
    }
    if (left_ > 0 && w.is_blocked()) next_w_ = *w_;
    left_ -= kScaleRun;
    constexpr int kBlocks = kScaleRun / Tile::kChunksOfBlock;
    a_ += kBlocks * a.block_stride;
    w_ += kBlocks * w.block_stride;
  }

  // [kTurns][kScaleRun], then [kRows][kPadded] or [kGroups][kRows], and kScaleSkew
  float* const table_;
  const float* now_;  // the chunk's part of it
  const float *a_, *w_;
  int rows_;  // of a from the lane's first one on
  int left_;  // chunks that await fetching, from the lane's on
  const int warp_, lane_;
  uint32_t in_run_ = 0, turn_ = 0;
  float next_a_[kLaneRows], next_w_;
};

}  // namespace cuda
}  // namespace rocm_kernels
