// The tiles that the AMD kernels exist for, and what a tile costs: registers and LDS. Dispatch,
// checks, candidates and tools/resources.py go by this table. No HIP header.
#pragma once

#include <cstddef>

#include "../../common/cdna/operands.h"

namespace rocm_kernels::cdna::skinny {

struct SkinnyTile {
  int32_t block_m;   // rows of a that registers are held for; M is at most this
  int32_t block_n;   // rows of w
  bool wide_a;       // 16-bit a fits, too: 256 VGPRs serve two waves a SIMD
  bool specialised;  // served by specialised waves as well as by the register pipeline
};

// Tiles of 8 rows of w leave half of the matrix instruction unused, and spare a small product the
// split of K; at M > 32 they would take in too much of a.
constexpr SkinnyTile kSkinnyTiles[] = {
    {16, 8, true, false}, {32, 8, true, false},                        //
    {16, 16, true, true}, {32, 16, true, true}, {64, 16, true, true},  //
    {16, 32, true, true}, {32, 32, true, true}, {64, 32, false, true}, {32, 64, false, true},
};
constexpr size_t kSkinnyTileCount = sizeof(kSkinnyTiles) / sizeof(kSkinnyTiles[0]);

// Rows of a that registers are held for: M up to 16, 32 or 64.
constexpr int32_t block_m_of(int32_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : 64; }

// The tile's number in the table, or -1: no kernel has it for elements of a of so many bytes.
constexpr int find_tile(int32_t block_m, int32_t block_n, int32_t bytes_a) {
  for (size_t i = 0; i < kSkinnyTileCount; ++i) {
    const SkinnyTile& tile = kSkinnyTiles[i];
    if (tile.block_m == block_m && tile.block_n == block_n && (bytes_a == 1 || tile.wide_a)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// Which kernels exist.
constexpr bool has_register_pipeline(const SkinnyTile& tile, MmaKind kind, bool block_scaled) {
  if (kind == MmaKind::kFp8Sparse) return tile.block_m == 16 && !block_scaled;
  return (tile.wide_a || a_bytes(kind) == 1) && (w_bytes(kind) == 1 || !block_scaled);
}
constexpr bool has_specialised_waves(const SkinnyTile& tile, MmaKind kind) {
  return tile.specialised &&
         (kind == MmaKind::kFp8 || (kind == MmaKind::kFp8Sparse && tile.block_m == 16));
}

// K blocks that a wave keeps in flight in registers.
constexpr int32_t register_stages(int32_t block_m, int32_t block_n, int32_t bytes_a,
                                  int32_t bytes_w) {
  if (block_n == 8) return block_m * bytes_a <= 32 ? 4 : 2;
  return bytes_a == 1 && bytes_w == 1 && block_m == 16 && block_n <= 32 ? 4 : 2;
}

// VGPRs of a wave of the register pipeline, about what the compiler takes.
constexpr int32_t register_pipeline_vgprs(int32_t block_m, int32_t block_n, int32_t bytes_a,
                                          int32_t bytes_w) {
  const int32_t tiles_m = mma_tiles_of(block_m), tiles_n = mma_tiles_of(block_n);
  const int32_t stages = register_stages(block_m, block_n, bytes_a, bytes_w) *
                         (block_n * bytes_w / 2 + 8 * tiles_m * bytes_a);
  return 40 + stages + 8 * (tiles_m * bytes_a + bytes_w) + 4 * tiles_m * tiles_n;
}
// Waves a SIMD that they allow; tools/resources.py checks that the compiled kernels do.
constexpr int32_t waves_per_simd(int32_t block_m, int32_t block_n, int32_t bytes_a,
                                 int32_t bytes_w) {
  return 512 / ((register_pipeline_vgprs(block_m, block_n, bytes_a, bytes_w) + 7) / 8 * 8);
}

}  // namespace rocm_kernels::cdna::skinny
