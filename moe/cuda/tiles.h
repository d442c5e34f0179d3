// The tiles that grouped products with tensor cores exist for on NVIDIA GPUs. Dispatch, checks and
// candidates go by this table. No CUDA header.
//
// K goes by in steps of 64 bytes of a row of w. A warp has 32 rows of w: two instructions' worth,
// or the gates and the ups of 16 columns of h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../common/core/compiler.h"
#include "../../common/core/dtype.h"

namespace rocm_kernels {
namespace cuda {

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
