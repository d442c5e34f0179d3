// What the resident design (resident.cuh) asks of a block: the rows of a that it keeps, the stages
// that are left beside them, and how warps and blocks share the work. No CUDA header.
#pragma once

#include <algorithm>

#include "streamed.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kResidentWarps = 8;
constexpr int kResidentThreads = kResidentWarps * 32;
constexpr int kResidentSlots = 32;  // a lane of a warp has each
constexpr int kResidentBlockM = 8, kResidentBlockN = 16;
constexpr int kResidentRowBytes = 256;  // of each of block_n rows of w, in a stage
constexpr int kResidentBoxBytes = kResidentBlockN * kResidentRowBytes;
// A stage: the box of w, and the scales of its two blocks of K for each half of its rows; or, with
// a unit's first box, those of whole rows.
constexpr int kResidentStageBytes = kResidentBoxBytes + 128;
constexpr int kResidentStages = 3;       // of a warp, at most
constexpr int kResidentLeastStages = 2;  // and at least
constexpr int kResidentChunk = 256;      // columns that a warp quantises at a time

// How the units of one product, tiles of rows x block_n rows of w, are divided.
struct ResidentSplit {
  int32_t cluster;  // blocks that share the tiles of a block of columns: down alone
  int32_t columns;  // down: blocks of columns that a cluster has, at most
  int32_t parts;    // warps that share the K of a unit
};

// One product of a layer: `rows` rows of a in FP8, whole, beside the stages of w.
struct ResidentShape {
  int32_t rows, k;
  int32_t sums;  // down: those of slots, for each of its blocks of columns; else 0
  int32_t parts;
  bool block_scales;

  ROCM_KERNELS_HOST_DEVICE constexpr int32_t steps() const {
    return (k + kResidentRowBytes - 1) / kResidentRowBytes;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t chunks() const { return steps(); }
  // Rows of a, with zeros up to whole stages; padded so that neighbours fall on different banks.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_pitch() const {
    return steps() * kResidentRowBytes + 64;
  }
  // Scales of a row of a.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t row_scales() const {
    return block_scales ? 2 * chunks() : 1;
  }
  // Behind the stages: what warps that share a unit have summed, of this unit and the one before;
  // a, its scales, the greatest magnitudes of chunks, the sums of slots.
  static constexpr int32_t kShareBytes = 512;  // of a warp
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_begin() const {
    return parts > 1 ? 2 * kResidentWarps * kShareBytes : 0;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t scales_begin() const {
    return a_begin() + rows * a_pitch();
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t amaxes_begin() const {
    return scales_begin() + rows * row_scales() * 4;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t sums_begin() const {
    return amaxes_begin() + rows * chunks() * 4;
  }
  constexpr int32_t other_bytes() const { return 128 + sums_begin() + sums * kResidentBlockN * 4; }
};
static_assert(kResidentRowBytes == kResidentChunk, "stages are whole chunks");

// Dynamic shared memory of a block.
constexpr int64_t resident_shared_bytes(const ResidentShape& shape, int num_stages) {
  return int64_t{kResidentWarps} * num_stages * kResidentStageBytes + shape.other_bytes();
}

// Of down, or of gate_up, for `slots` slots of `tokens` tokens.
inline ResidentShape resident_shape(bool is_down, int32_t tokens, int32_t slots, int32_t k,
                                    bool block_scales, const ResidentSplit& split) {
  return {is_down ? slots : tokens, k, is_down ? slots * split.columns : 0, split.parts,
          block_scales};
}

// Stages of each warp. A block has half of an SM, so that the next product's blocks fill their
// stages while this one's end.
inline int32_t resident_stages(const ResidentShape& shape, const MoeDevice& device) {
  constexpr int64_t kReserved = (1 << 10) + 512;  // by the runtime, of each block; barriers
  const int64_t left = device.shared_bytes_per_sm / 2 - kReserved - shape.other_bytes();
  const int64_t stages = left / (kResidentWarps * kResidentStageBytes);
  return static_cast<int32_t>(stages < 0 ? 0 : stages < kResidentStages ? stages : kResidentStages);
}

inline int32_t divided_up(int64_t count, int64_t by) {
  return static_cast<int32_t>((count + by - 1) / by);
}

// `most_tiles` tiles of rows, `columns_n` blocks of columns. Two blocks share a block of columns of
// down where that leaves the busiest at least a tenth less to do. Where a block has fewer units
// than warps, several warps share one.
inline ResidentSplit resident_split(bool is_down, int64_t most_tiles, int64_t columns_n, int32_t k,
                                    int32_t sm_count) {
  ResidentSplit split = {1, 0, 1};
  int64_t units = divided_up(columns_n * most_tiles, sm_count);
  if (is_down) {
    const auto units_of = [&](int32_t cluster) {
      return int64_t{divided_up(columns_n, sm_count / cluster)} * divided_up(most_tiles, cluster);
    };
    if (most_tiles > 1 && sm_count > 1 && units_of(2) * 10 <= units_of(1) * 9) split.cluster = 2;
    split.columns = divided_up(columns_n, sm_count / split.cluster);
    units = units_of(split.cluster);
  }
  const int32_t steps = divided_up(k, kResidentRowBytes);
  while (2 * split.parts * units <= kResidentWarps && 2 * split.parts <= steps) split.parts *= 2;
  return split;
}

}  // namespace cuda
}  // namespace rocm_kernels
