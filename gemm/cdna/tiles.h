// The tiles that the AMD gemm exists for. Dispatch, checks, candidates and tools/resources.py go by
// this table. No HIP header.
#pragma once

#include <cstddef>

#include "../../blocks/product/cdna/tile.h"

namespace rocm_kernels::cdna {

// Block scales need a second set of sums, so a wave has at most 64 x 64 there: 128 x 64 fills the
// 256 registers that a wave gets where two share a SIMD.
constexpr GemmTile kGemmTiles[] = {
    {256, 256, 2, 4, 256, false, 1}, {256, 128, 4, 2, 256, true, 2}, {128, 128, 2, 2, 256, true, 2},
    {128, 64, 2, 2, 192, true, 2},   {64, 128, 2, 2, 192, true, 2},  {64, 64, 2, 2, 128, true, 2},
};
constexpr size_t kGemmTileCount = sizeof(kGemmTiles) / sizeof(kGemmTiles[0]);

// A tile of the table as a template argument. In large ones block scales take the registers of a
// second line.
template <int kTile, bool kBlockScales>
struct GemmTileAt {
  static constexpr GemmTile shape() {
    GemmTile tile = kGemmTiles[kTile];
    if (kBlockScales && tile.wave_m() * tile.wave_n() > 64 * 32) tile.lines_ahead = 1;
    return tile;
  }
  static constexpr GemmTile kShape = shape();
};

// The tile's number in the table, or -1.
constexpr int find_gemm_tile(int32_t block_m, int32_t block_n, bool block_scaled) {
  for (size_t i = 0; i < kGemmTileCount; ++i) {
    const GemmTile& tile = kGemmTiles[i];
    if (tile.block_m == block_m && tile.block_n == block_n &&
        (!block_scaled || tile.block_scales)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace rocm_kernels::cdna
