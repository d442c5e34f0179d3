// What the streamed_wgmma design (streamed_wgmma.cuh) asks of a block: the sizes of its pipeline,
// which dispatch, checks and the choice of a config go by. No CUDA header.
#pragma once

#include <cstdint>

#include "../../common/core/compiler.h"
#include "../../common/cuda/swizzle.h"
#include "streamed.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kStreamedWgmmaN = 64;       // rows of w of a unit: an instruction's
constexpr int kStreamedWgmmaChunks = 2;   // of 128 bytes of K, of a stage
constexpr int kStreamedWgmmaCopiers = 3;  // warps that gather a
constexpr int kStreamedWgmmaThreads = (kStreamedWarps + 1 + kStreamedWgmmaCopiers) * 32;
// They hide each other's ends of units, and the next kernel's begin while this one's end.
constexpr int kStreamedWgmmaBlocksPerSm = 2;
// Copiers take stages in turn; with fewer stages one would be a round ahead of another.
constexpr int kStreamedWgmmaLeastStages = kStreamedWgmmaCopiers;

// Units that are looked up before they are multiplied.
ROCM_KERNELS_HOST_DEVICE constexpr int streamed_wgmma_ahead(int block_m) {
  return block_m <= 16 ? 8 : 4;
}

// A stage: chunks of 64 rows of w, as many of block_m rows of a. Behind all stages lie their
// scales: for each chunk, block_m of a and 2 of w.
struct StreamedWgmmaStage {
  int32_t block_m = 8;
  bool block_scales = false;

  static constexpr int32_t kWBytes = kStreamedWgmmaChunks * kStreamedWgmmaN * kChunkBytes;
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t bytes() const {
    return kWBytes + kStreamedWgmmaChunks * block_m * kChunkBytes;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t scale_bytes() const {
    return block_scales ? kStreamedWgmmaChunks * (block_m + 2) * 4 : 0;
  }
  // Of shared memory beside the stages and their scales: the padding to whole patterns, how many
  // slots and tiles each expert has and where they begin, the slots by expert, and their experts.
  constexpr int32_t other_bytes(int32_t slots) const {
    return kPatternBytes + 3 * 4 * static_cast<int32_t>(kFewExperts) + (slots + 31) / 32 * 128;
  }
  // At most, of its barriers and of the units ahead.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t static_bytes() const {
    return 512 + streamed_wgmma_ahead(block_m) * (8 * block_m + 8 * kStreamedWgmmaN + 16);
  }
};

// Dynamic shared memory of a block.
constexpr int64_t streamed_wgmma_shared_bytes(const StreamedWgmmaStage& stage, int num_stages,
                                              int32_t slots) {
  return int64_t{num_stages} * (stage.bytes() + stage.scale_bytes()) + stage.other_bytes(slots);
}

// How many stages fit a block's part of an SM.
inline int32_t streamed_wgmma_stages(const StreamedWgmmaStage& stage, int32_t slots,
                                     const MoeDevice& device) {
  constexpr int64_t kReserved = 1 << 10;  // by the runtime, of each block
  const int64_t part = device.shared_bytes_per_sm / kStreamedWgmmaBlocksPerSm - kReserved;
  const int64_t left = part - stage.static_bytes() - stage.other_bytes(slots);
  const int64_t stages = left / (stage.bytes() + stage.scale_bytes());
  return static_cast<int32_t>(stages < 0 ? 0 : stages < kStreamedStages ? stages : kStreamedStages);
}

}  // namespace cuda
}  // namespace rocm_kernels
