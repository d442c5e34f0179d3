// The tiles that grouped products with tensor cores exist for on NVIDIA GPUs. Dispatch, checks and
// candidates go by this table. No CUDA header.
//
// K goes by in steps of 64 bytes of a row of w. A warp has 32 rows of w: two instructions' worth,
// or the gates and the ups of 16 columns of h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../blocks/product/cuda/shape.h"
#include "../../common/core/compiler.h"
#include "../../common/core/dtype.h"
#include "../config.h"

namespace rocm_kernels {
namespace cuda::moe {

constexpr int kMoeStepBytes = 64;  // of a row of w: four lanes x 16 bytes
constexpr int kMoeWarpN = 32;

// Bytes of a row of a in a step: as many elements as 64 bytes of w have.
inline int32_t moe_step_bytes_a(DType a, DType w) {
  const int64_t elements =
      w == DType::kFloat4E2M1x2 ? 2 * kMoeStepBytes : kMoeStepBytes / size_of(w);
  return static_cast<int32_t>(elements * size_of(a));
}

struct MoeTile {
  int32_t block_m, block_n;
  int32_t warps_m;     // times block_n / kMoeWarpN
  int32_t num_stages;  // steps of K on their way to shared memory

  ROCM_KERNELS_HOST_DEVICE constexpr int32_t warps_n() const { return block_n / kMoeWarpN; }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t threads() const { return warps_m * warps_n() * 32; }
  // Of a stage; `step_bytes`: of a row of a in a step of K.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t stage_bytes(int32_t step_bytes) const {
    return block_n * kMoeStepBytes + block_m * step_bytes;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t shared_bytes(int32_t step_bytes) const {
    return num_stages * stage_bytes(step_bytes);
  }
};

// Few rows an expert: small tiles of many stages, several a multiprocessor.
constexpr MoeTile kMoeTiles[] = {{128, 128, 2, 4}, {64, 128, 2, 4}, {32, 64, 1, 6}, {16, 64, 1, 8}};
constexpr size_t kMoeTileCount = sizeof(kMoeTiles) / sizeof(kMoeTiles[0]);

// The tile's number in the table, or -1.
constexpr int find_moe_tile(int32_t block_m, int32_t block_n) {
  for (size_t i = 0; i < kMoeTileCount; ++i) {
    if (kMoeTiles[i].block_m == block_m && kMoeTiles[i].block_n == block_n) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// ---- The warpgroup kernel's (grouped_tiles.cuh) -------------------------------------------------

struct MoeWarpgroupTile {
  int32_t block_m, block_n;

  // wgmma takes 64 rows of one operand and 8 to 256 of the other, its columns. For few rows of a, w
  // is the 64-row operand.
  constexpr bool swap_ab() const { return block_n > block_m; }
  constexpr int32_t rows() const { return swap_ab() ? block_n : block_m; }
  constexpr int32_t columns() const { return swap_ab() ? block_m : block_n; }
  constexpr int32_t waves() const { return rows() / (kMathGroups * 64); }  // of a warpgroup
};
// Of two that are modelled alike the first is taken: the one that has more bytes of w under way.
constexpr MoeWarpgroupTile kMoeWarpgroupTiles[] = {{32, 256}, {64, 256}, {128, 128}, {256, 128}};
constexpr size_t kMoeWarpgroupTileCount =
    sizeof(kMoeWarpgroupTiles) / sizeof(kMoeWarpgroupTiles[0]);

constexpr bool is_moe_warpgroup_tile(int32_t block_m, int32_t block_n) {
  for (const MoeWarpgroupTile& tile : kMoeWarpgroupTiles) {
    if (tile.block_m == block_m && tile.block_n == block_n) return true;
  }
  return false;
}

// Widened weights leave a thread 208 registers, of which 128 sums and a block's 64 products are
// most.
constexpr bool fits_registers(const MoeWarpgroupTile& tile, bool block_scales, bool widened) {
  return !(block_scales && widened && tile.block_m == 256);
}

// Blocks that share rows of a: where both operands' boxes of a tile are more than L2 gives
// (blocks/product/cuda/warpgroup.cuh). For few rows w is most of the bytes, and nobody shares it.
constexpr int warpgroup_cluster(const MoeTiling& c) { return c.block_n == 128 ? 2 : 1; }

// Whether most experts have one tile, of those for few rows, so that their weights are read once.
constexpr bool reads_weights_once(int64_t rows, int64_t experts, int32_t block_m) {
  return block_m <= 64 && 4 * rows <= 3 * experts * block_m;
}

// Float32 sums on their way to memory: 16 rows of a warp's, padded so that lanes fall on different
// banks; in two buffers where a warp has but two such steps in a tile. They take two stages' place,
// and pay where K is short: on an H200 the down product of 32768 rows took 475 us for 775 at K =
// 256, and 199 for 185 at K = 768.
constexpr int kMoeStagedColumns = 64;
constexpr int kMoeStagedPitch = kMoeStagedColumns * 4 + 32;
constexpr int kMoeStagedBytes = 16 * kMoeStagedPitch;
constexpr int64_t kMoeStagedMostChunks = 4;  // of 128 bytes of K
constexpr int moe_staging_buffers(int waves) { return waves == 1 ? 2 : 1; }

// Bytes of a warp's, 0 where threads store what they have: where w is the 64-row operand, too.
inline int warp_staging_bytes(const MoeTiling& c, int64_t k_bytes, bool wide_float32) {
  const bool swap_ab = c.block_n > c.block_m;
  if (swap_ab || !wide_float32 || k_bytes > kMoeStagedMostChunks * kChunkBytes) return 0;
  return moe_staging_buffers(c.block_m / 128) * kMoeStagedBytes;
}

inline int64_t warpgroup_bytes(const MoeTiling& c, int scale_bytes, int num_stages,
                               int warp_staging) {
  return warpgroup_shared_bytes(c.block_m, c.block_n, num_stages, scale_bytes + warp_staging);
}
// Of static shared memory: gemm's, and the places of two tiles' rows, or the greatest magnitudes of
// two tiles' rows that the other block of the cluster has found.
inline int64_t moe_static_bytes(const MoeTiling& c) { return kStaticBytes + 8 * c.block_m; }
// Stages that fit a block which may have `shared_bytes`.
inline int warpgroup_stages(const MoeTiling& c, int scale_bytes, int64_t shared_bytes,
                            int warp_staging) {
  const int64_t stage = int64_t{c.block_m + c.block_n} * kChunkBytes;
  const int64_t left =
      shared_bytes - moe_static_bytes(c) - warpgroup_bytes(c, scale_bytes, 0, warp_staging);
  return static_cast<int>(std::min<int64_t>(left / stage, kMaxStages));
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
