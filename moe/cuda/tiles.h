// The tiles that grouped products with tensor cores exist for on NVIDIA GPUs. Dispatch, checks and
// candidates go by this table. No CUDA header.
//
// K goes by in steps of 64 bytes of a row of w. A warp has 32 rows of w: two instructions' worth,
// or the gates and the ups of 16 columns of h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../common/core/compiler.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kMoeStepBytes = 64;  // of a row of w: four lanes x 16 bytes
constexpr int kMoeWarpN = 32;

struct MoeTile {
  int32_t block_m, block_n;
  int32_t warps_m;     // times block_n / kMoeWarpN
  int32_t num_stages;  // steps of K on their way to shared memory

  ROCM_KERNELS_HOST_DEVICE constexpr int32_t warps_n() const { return block_n / kMoeWarpN; }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t threads() const { return warps_m * warps_n() * 32; }
  // Of a stage, by bytes of an element.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_row_bytes(int32_t a_bytes, int32_t w_bytes) const {
    return kMoeStepBytes / w_bytes * a_bytes;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t stage_bytes(int32_t a_bytes, int32_t w_bytes) const {
    return block_n * kMoeStepBytes + block_m * a_row_bytes(a_bytes, w_bytes);
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

}  // namespace cuda
}  // namespace rocm_kernels
