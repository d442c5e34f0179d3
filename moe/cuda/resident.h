// What the resident design (resident.cuh) asks of a block: the rows of a that it keeps, and the
// stages that are left beside them. No CUDA header.
#pragma once

#include "streamed.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kResidentThreads = (kStreamedWarps + 1) * 32;
constexpr int kResidentSlots = 32;  // a lane of a warp has each
constexpr int kResidentBlockM = 8;
constexpr int kResidentStages = 8;       // at most
constexpr int kResidentLeastStages = 3;  // at least
constexpr int kResidentChunk = 256;      // columns that a warp quantises at a time

// One product of a layer: `rows` rows of a in FP8, whole, beside the stages of w.
struct ResidentShape {
  int32_t rows, k;
  int32_t block_n;
  int32_t sums;  // slots whose sums are kept until all are there: down's
  bool block_scales;

  ROCM_KERNELS_HOST_DEVICE constexpr int32_t row_bytes() const {
    return kStreamedBoxBytes / block_n;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t steps() const {
    return (k + row_bytes() - 1) / row_bytes();
  }
  // Rows of a, with zeros up to whole stages; padded so that neighbours fall on different banks.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_pitch() const { return steps() * row_bytes() + 64; }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t chunks() const {
    return (steps() * row_bytes() + kResidentChunk - 1) / kResidentChunk;
  }
  // Scales of a row of a.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t row_scales() const {
    return block_scales ? 2 * chunks() : 1;
  }
  // The box of w, and scales of its rows: of the blocks of K that it has, for each half; or, with a
  // unit's first box, those of whole rows.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t stage_bytes() const {
    return kStreamedBoxBytes + (block_scales ? 128 : kStreamedMaxN * 4);
  }
  // Behind the stages: the sums of warps that share K, a, its scales, the greatest magnitudes of
  // chunks, the sums of slots.
  static constexpr int32_t kPartialBytes = kStreamedWarps * 1024;
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_begin() const { return kPartialBytes; }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t scales_begin() const {
    return a_begin() + rows * a_pitch();
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t amaxes_begin() const {
    return scales_begin() + rows * row_scales() * 4;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t sums_begin() const {
    return amaxes_begin() + rows * chunks() * 4;
  }
  constexpr int32_t other_bytes() const { return 128 + sums_begin() + sums * block_n * 4; }
};
static_assert(kStreamedBoxBytes / kStreamedMaxN % kResidentChunk == 0, "stages are whole chunks");

inline int32_t resident_stages(const ResidentShape& shape, const MoeDevice& device) {
  constexpr int64_t kReserved = (1 << 10) + 256;  // by the runtime, of each block; barriers
  const int64_t left = device.shared_bytes_per_sm / 2 - kReserved - shape.other_bytes();
  const int64_t stages = left / shape.stage_bytes();
  return static_cast<int32_t>(stages < 0 ? 0 : stages < kResidentStages ? stages : kResidentStages);
}

// Blocks of a cluster that share the experts of a block of columns of out: as many as leave all
// clusters at work at once.
inline int32_t resident_cluster(int64_t most_tiles, int64_t tiles_n, int32_t sm_count) {
  int32_t cluster = 8;
  while (cluster > 1 && (cluster > most_tiles || cluster * tiles_n > 2 * sm_count)) cluster /= 2;
  return cluster;
}

}  // namespace cuda
}  // namespace rocm_kernels
