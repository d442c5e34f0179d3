// The tiles that grouped products with matrix instructions exist for on AMD GPUs. Dispatch, checks,
// candidates and tools/resources.py go by this table. No HIP header.
//
// A wave has two parts of 32 x 32 side by side along N: the gate and the up of 32 columns of h, so
// that the activation meets both in one lane. Where N is 256, a tile has whole groups of 128
// columns of h and quantises them.
#pragma once

#include "../../gemm/cdna/epilogue_lds.h"
#include "../../gemm/cdna/tiles.h"

namespace rocm_kernels::cdna {

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

// ---- The streamed design
// -------------------------------------------------------------------------

constexpr int kStreamedBlockN = 32;  // rows of w: two matrix instructions, a gate's and an up's
constexpr int kStreamedWaves = 4;    // of a workgroup
constexpr int kStreamedAtOnce = 2;   // workgroups of a compute unit, by registers
constexpr int kStreamedBlockMs[] = {16, 32};

// K blocks that a wave keeps in flight in registers, as skinny_gemm does.
constexpr int streamed_stages(MmaKind kind, int block_m) {
  return a_bytes(kind) == 1 && block_m == 16 ? 4 : 2;
}
// What tiles pass through, or what waves add up, whichever is more.
constexpr int32_t streamed_lds_bytes(MmaKind kind, int32_t block_m) {
  const int32_t transposed = kStreamedWaves * transpose_bytes(a_bytes(kind), w_bytes(kind));
  const int32_t added = epilogue_lds_bytes(kStreamedWaves, block_m, kStreamedBlockN);
  return transposed > added ? transposed : added;
}

}  // namespace rocm_kernels::cdna
