// The tiles that the kernels for few rows are compiled for. Dispatch, checks and the choice of a
// config go by this table. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rocm_kernels {
namespace cuda::skinny {

enum class Design : int32_t {
  kWarpgroup,         // TMA pipeline into wgmma: sm_90a alone (warpgroup.cuh)
  kTmaPipeline,       // TMA pipeline into mma.sync: sm_90 and later (tma_pipeline.cuh)
  kRegisterPipeline,  // w straight to registers: sm_80 and later (register_pipeline.cuh)
};

constexpr int kWarpN = 32;       // kTmaPipeline: rows of w of a warp, two mma tiles
constexpr int kWarpgroupN = 64;  // kWarpgroup: rows of w of a warpgroup

// What a kernel is compiled for.
struct SkinnyTile {
  Design design;
  int32_t m;  // rows of a that registers are held for: of a block, kTmaPipeline: of a warp
  int32_t n;  // rows of w likewise, kWarpgroup: of all warpgroups
};
constexpr SkinnyTile kSkinnyTiles[] = {
    {Design::kRegisterPipeline, 8, 16},        {Design::kRegisterPipeline, 8, 32},
    {Design::kRegisterPipeline, 16, 16},       {Design::kRegisterPipeline, 16, 32},
    {Design::kRegisterPipeline, 32, 16},       {Design::kRegisterPipeline, 32, 32},
    {Design::kTmaPipeline, 8, kWarpN},         {Design::kTmaPipeline, 16, kWarpN},
    {Design::kTmaPipeline, 32, kWarpN},        {Design::kWarpgroup, 32, 2 * kWarpgroupN},
    {Design::kWarpgroup, 48, 2 * kWarpgroupN}, {Design::kWarpgroup, 64, 2 * kWarpgroupN},
    {Design::kWarpgroup, 32, 4 * kWarpgroupN}, {Design::kWarpgroup, 48, 4 * kWarpgroupN},
    {Design::kWarpgroup, 64, 4 * kWarpgroupN},
};
constexpr size_t kSkinnyTileCount = sizeof(kSkinnyTiles) / sizeof(kSkinnyTiles[0]);

// The least m of a design's tiles that holds `rows`, or the largest that there is.
constexpr int32_t tile_m(Design design, int64_t rows) {
  int32_t found = 0;
  for (const SkinnyTile& tile : kSkinnyTiles) {
    if (tile.design != design) continue;
    const bool holds = tile.m >= rows;
    if (found < rows ? tile.m > found : holds && tile.m < found) found = tile.m;
  }
  return found;
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
