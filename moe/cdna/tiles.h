// The tiles that grouped products with matrix instructions exist for on AMD GPUs. Dispatch, checks,
// candidates and tools/resources.py go by this table. No HIP header.
//
// A wave has two parts of 32 x 32 side by side along N: the gate and the up of 32 columns of h, so
// that the activation meets both in one lane. Where N is 256, a tile has whole groups of 128
// columns of h and quantises them.
#pragma once

#include "../../blocks/product/cdna/sink_lds.h"
#include "../../blocks/product/cdna/tile.h"

namespace rocm_kernels::cdna::moe {

constexpr GemmTile kMoeTiles[] = {
    {128, 256, 2, 4, 256, true},
    {128, 128, 2, 2, 256, true},
    {64, 128, 2, 2, 168, true},
    {32, 128, 1, 2, 176, true},
};
constexpr size_t kMoeTileCount = sizeof(kMoeTiles) / sizeof(kMoeTiles[0]);

// A tile of the table as a template argument.
template <int kTile>
struct MoeTileAt {
  static constexpr GemmTile kShape = kMoeTiles[kTile];
  static_assert(kShape.wave_n() == 64, "MoeTileAt: a wave has the gate and the up of 32 columns");
};

// The tile's number in the table, or -1.
constexpr int find_moe_tile(int32_t block_m, int32_t block_n) {
  for (size_t i = 0; i < kMoeTileCount; ++i) {
    if (kMoeTiles[i].block_m == block_m && kMoeTiles[i].block_n == block_n) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// ---- The streamed design ------------------------------------------------------------------------

constexpr int kStreamedWaves = 4;   // of a workgroup, at most
constexpr int kStreamedAtOnce = 2;  // waves of a SIMD, by registers

// Rows of a, and of w: one or two matrix instructions. The narrow tile gives a small product more
// workgroups, whose last round is shorter; 8 rows spare MXFP4, whose a is wide, half of a's loads.
struct StreamedTileShape {
  int32_t block_m, block_n;
  bool fp4, others;  // which weights have it
};
constexpr StreamedTileShape kStreamedTiles[] = {
    {8, 16, true, false}, {8, 32, true, false},  {16, 16, false, true},
    {16, 32, true, true}, {32, 32, false, true},
};

constexpr size_t kStreamedTileCount = sizeof(kStreamedTiles) / sizeof(kStreamedTiles[0]);

constexpr bool has_streamed_tile(int32_t block_m, int32_t block_n, bool fp4) {
  for (const StreamedTileShape& tile : kStreamedTiles) {
    if (tile.block_m == block_m && tile.block_n == block_n && (fp4 ? tile.fp4 : tile.others)) {
      return true;
    }
  }
  return false;
}

// Elements of K that are loaded and multiplied together: a line of FP8, or of MXFP4.
constexpr int streamed_k_block(bool fp4) { return fp4 ? 2 * kBlockK : kBlockK; }
// K blocks that a wave keeps in flight in registers, as skinny_gemm does.
constexpr int streamed_stages(MmaKind kind, int block_m) {
  return a_bytes(kind) == 1 && block_m == 16 ? 4 : block_m == 8 ? 3 : 2;
}
// Waves that share a tile's `k_blocks`, 4, 2 or 1: none has less than two.
constexpr int32_t streamed_waves(int32_t k_blocks) {
  return k_blocks >= 2 * kStreamedWaves ? kStreamedWaves : k_blocks >= 4 ? 2 : 1;
}
// LDS of a wave: its tiles pass through, then its sums lie there.
constexpr int32_t streamed_place_bytes(MmaKind kind, int32_t block_m, int32_t block_n) {
  const int32_t transposed = transpose_bytes(a_bytes(kind), w_bytes(kind));
  const int32_t added = block_m * (block_n + kSumPad) * 4;
  return transposed > added ? transposed : added;
}
// And what rows of w and of a are multiplied by, and the biases.
constexpr int32_t streamed_lds_bytes(MmaKind kind, int32_t block_m, int32_t block_n,
                                     int32_t waves) {
  return waves * streamed_place_bytes(kind, block_m, block_n) + 4 * (2 * block_n + block_m);
}

}  // namespace rocm_kernels::cdna::moe
