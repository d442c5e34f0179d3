// The tiles that the AMD gemm exists for, and what one costs: registers and LDS. Dispatch, checks,
// candidates and tools/resources.py go by this table. No HIP header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../common/cdna/operands.h"

namespace rocm_kernels::cdna {

// K is walked in lines: 128 bytes of each row of both operands, 128 elements of FP8 or 64 of 16
// bits. FP8 weights of a 16-bit a are decoded on their way to LDS, and so have 64 elements a line.
constexpr int kLine = 128;
constexpr int32_t line_elements(MmaKind kind) { return kLine / a_bytes(kind); }

struct GemmTile {
  int32_t block_m, block_n;
  int32_t waves_m, waves_n;  // of the workgroup, side by side
  int32_t vgprs;             // that no kernel of the tile exceeds
  bool block_scales;         // served with them, too
  int32_t lines_ahead = 1;   // that are on their way to registers

  constexpr int32_t waves() const { return waves_m * waves_n; }
  constexpr int32_t threads() const { return waves() * 64; }
  constexpr int32_t lds_bytes() const { return (block_m + block_n) * kLine; }
  constexpr int32_t wave_m() const { return block_m / waves_m; }
  constexpr int32_t wave_n() const { return block_n / waves_n; }
};

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
