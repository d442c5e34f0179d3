// What the streamed_wgmma design (streamed_wgmma.cuh) asks of a block: the sizes of its pipeline,
// which dispatch, checks and the choice of a config go by. No CUDA header.
#pragma once

#include <cstdint>

#include "../../common/core/compiler.h"
#include "../../common/cuda/swizzle.h"
#include "streamed.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kStreamedWgmmaMaxM = 64;
constexpr int kStreamedWgmmaMaxN = 128;
constexpr int kStreamedWgmmaRows = 64;  // of w, that a warpgroup multiplies

constexpr bool is_streamed_wgmma_tile(int32_t block_m, int32_t block_n) {
  return (block_m == 8 || block_m == 16 || block_m == 32 || block_m == kStreamedWgmmaMaxM) &&
         (block_n == kStreamedWgmmaRows || block_n == kStreamedWgmmaMaxN);
}

// Two blocks an SM hide each other's ends of units, and the next kernel's begin while this one's
// end; 64 rows of a leave room for one.
ROCM_KERNELS_HOST_DEVICE constexpr int streamed_wgmma_blocks_per_sm(int block_m) {
  return block_m <= 32 ? 2 : 1;
}
// Units that are looked up before they are multiplied.
ROCM_KERNELS_HOST_DEVICE constexpr int streamed_wgmma_ahead(int block_m) {
  return block_m <= 16 ? 8 : 4;
}

// A stage: kStreamedBoxBytes of w, chunks of 128 bytes of K; as many chunks of block_m rows of a.
// Behind all stages lie their scales: for each chunk, block_m of a and 2 of w.
struct StreamedWgmmaStage {
  int32_t block_m = 8, block_n = 64;
  bool block_scales = false;

  ROCM_KERNELS_HOST_DEVICE constexpr int32_t chunks() const {
    return kStreamedBoxBytes / kChunkBytes / block_n;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t bytes() const {
    return kStreamedBoxBytes + chunks() * block_m * kChunkBytes;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t scale_bytes() const {
    return block_scales ? chunks() * (block_m + 2) * 4 : 0;
  }
  // Of shared memory beside the stages and their scales: the padding to whole patterns, how many
  // slots and tiles each expert has and where they begin, the slots by expert, and their experts.
  constexpr int32_t other_bytes(int32_t slots) const {
    return kPatternBytes + 3 * 4 * static_cast<int32_t>(kMaxExperts) + (slots + 31) / 32 * 128;
  }
  // At most, of its barriers and of the units ahead.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t static_bytes() const {
    return 512 + streamed_wgmma_ahead(block_m) * (12 * block_m + 8 * kStreamedWgmmaMaxN + 16);
  }
};

inline StreamedWgmmaStage streamed_wgmma_stage(const MoeConfig& c, bool block_scales) {
  return {c.block_m, c.block_n, block_scales};
}

// How many stages fit a block's part of an SM.
inline int32_t streamed_wgmma_stages(const StreamedWgmmaStage& stage, int32_t slots,
                                     const MoeDevice& device) {
  constexpr int64_t kReserved = 1 << 10;  // by the runtime, of each block
  const int64_t part = device.shared_bytes_per_sm / streamed_wgmma_blocks_per_sm(stage.block_m);
  const int64_t most = device.shared_bytes_per_block;
  const int64_t left = (part - kReserved < most ? part - kReserved : most) - stage.static_bytes() -
                       stage.other_bytes(slots);
  const int64_t stages = left / (stage.bytes() + stage.scale_bytes());
  return static_cast<int32_t>(stages < 0 ? 0 : stages < kStreamedStages ? stages : kStreamedStages);
}

}  // namespace cuda
}  // namespace rocm_kernels
