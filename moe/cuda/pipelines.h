// What the pipeline of each design asks of a block: its stages, its shared memory, how many stages
// fit. Dispatch, checks and the choice of a config go by them. No CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../common/core/compiler.h"
#include "../../common/cuda/memory_rates.h"
#include "../../common/cuda/swizzle.h"
#include "../config.h"

namespace rocm_kernels {
namespace cuda::moe {

// What the choice of a config depends on besides the shape.
struct MoeDevice {
  int32_t sm_count = 132;
  int32_t compute_capability = 90;
  int64_t shared_bytes_per_sm = 228 << 10;
  int64_t shared_bytes_per_block = 227 << 10;  // most that a block can ask for
  int32_t id = 0;                              // among the GPUs of the host
  MemoryRates memory;
};

// ---- streamed (streamed.cuh) --------------------------------------------------------------------

constexpr int kStreamedBoxBytes = 16 << 10;  // of w in a stage: block_n rows, 512 or 256 bytes each
constexpr int kStreamedSliceBytes = 64;      // of a row, that a warp multiplies of a stage
constexpr int kStreamedRows = 32;  // of w, that a warp multiplies: two instructions' worth
constexpr int kStreamedWarps = 8;  // that multiply
constexpr int kStreamedThreads = (kStreamedWarps + 2) * 32;
constexpr int kStreamedStages = 8;  // at most
constexpr int kStreamedAhead = 8;   // units that are looked up before they are multiplied
constexpr int kStreamedMaxM = 32;
constexpr int kStreamedMaxN = 64;
constexpr int kStreamedMaxSlots = 4096;        // each block sorts all of them for itself
constexpr int kStreamedStaticBytes = 8 << 10;  // of shared memory: barriers, units

static_assert(2 * kStreamedMaxSlots <= 8 * 1024, "slots lie where the sums of 8 rows do");

// Two blocks an SM hide each other's barriers, and the next kernel's begin while this one's end;
// the sums of 32 rows leave room for one.
constexpr int streamed_blocks_per_sm(int block_m) { return block_m <= 16 ? 2 : 1; }

// A stage: the box of w; block_m rows of a, padded so that an instruction's rows fall on different
// banks; the scales that change along K.
struct StreamedStage {
  int32_t block_m = 8, block_n = 32;
  int32_t a_ratio = 1;  // bytes of a for each of w: 1, 2 or 4
  bool block_scales = false, mx_scales = false;

  ROCM_KERNELS_HOST_DEVICE constexpr int32_t row_bytes() const {
    return kStreamedBoxBytes / block_n;
  }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_row_bytes() const { return row_bytes() * a_ratio; }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_pitch() const {
    return a_row_bytes() + (a_ratio == 1 ? 64 : 16);
  }
  // MXFP4: the exponents of a row of w, in whole vectors from wherever they begin.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t mx_row_bytes() const { return row_bytes() / 16 + 16; }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t a_begin() const { return kStreamedBoxBytes; }
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t scales_begin() const {
    return a_begin() + block_m * a_pitch();
  }
  // Block scales: [block_m of a, 2 of w][4] floats. Exponents: [block_n][mx_row_bytes].
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t bytes() const {
    const int32_t scales = block_scales ? (block_m + 2) * 16
                           : mx_scales  ? block_n * mx_row_bytes()
                                        : 0;
    return (scales_begin() + scales + 127) / 128 * 128;
  }
  // Of shared memory beside the stages: sums of warps that share K, how many slots and tiles each
  // expert has and where they begin, the slots by expert.
  ROCM_KERNELS_HOST_DEVICE constexpr int32_t sum_bytes() const { return block_m * 1024; }
  constexpr int32_t other_bytes(int32_t slots) const {
    return 128 + sum_bytes() + 3 * 4 * static_cast<int32_t>(kFewExperts) + (slots + 31) / 32 * 64;
  }
};

// The stage of one product of a layer, rows of a of type `a` times w of `k` columns. Where a stage
// of 32 rows would end half empty, 64 rows share it.
inline StreamedStage streamed_stage(const MoeTiling& c, DType a, DType w, int64_t k,
                                    bool block_scales) {
  StreamedStage stage;
  stage.block_m = c.block_m;
  const int64_t rest = w_row_bytes(w, k) % (kStreamedBoxBytes / 32);
  stage.block_n = rest > 0 && rest <= kStreamedBoxBytes / 64 ? 64 : c.block_n;
  stage.mx_scales = w == DType::kFloat4E2M1x2;
  stage.a_ratio = stage.mx_scales ? 4 : static_cast<int32_t>(size_of(a) / size_of(w));
  stage.block_scales = block_scales;
  return stage;
}

// Dynamic shared memory of a block.
constexpr int64_t streamed_shared_bytes(const StreamedStage& stage, int num_stages, int32_t slots) {
  return int64_t{num_stages} * stage.bytes() + stage.other_bytes(slots);
}

// How many stages fit a block's part of an SM.
inline int32_t streamed_stages(const StreamedStage& stage, int32_t slots, const MoeDevice& device) {
  constexpr int64_t kReserved = 1 << 10;  // by the runtime, of each block
  const int64_t part = device.shared_bytes_per_sm / streamed_blocks_per_sm(stage.block_m);
  const int64_t most = device.shared_bytes_per_block;
  const int64_t left = (part - kReserved < most ? part - kReserved : most) - kStreamedStaticBytes -
                       stage.other_bytes(slots);
  const int64_t stages = left / stage.bytes();
  return static_cast<int32_t>(stages < 0 ? 0 : stages < kStreamedStages ? stages : kStreamedStages);
}

// ---- streamed_wgmma (streamed_wgmma.cuh) --------------------------------------------------------

constexpr int kStreamedWgmmaN = 64;       // rows of w of a unit: an instruction's
constexpr int kStreamedWgmmaChunks = 2;   // of 128 bytes of K, of a stage
constexpr int kStreamedWgmmaCopiers = 3;  // warps that gather a
constexpr int kStreamedWgmmaThreads = (kStreamedWarps + 1 + kStreamedWgmmaCopiers) * 32;
// They hide each other's ends of units, and the next kernel's begin while this one's end.
constexpr int kStreamedWgmmaBlocksPerSm = 2;
// Copiers take stages in turn; with fewer stages one would be a round ahead of another.
constexpr int kStreamedWgmmaLeastStages = kStreamedWgmmaCopiers;

// Units of a block that its number gives it; it takes the others as it gets there. And how many
// taken units are remembered: more than the warps of a block are apart.
constexpr int kStreamedWgmmaOwn = 2;
constexpr int kStreamedWgmmaTaken = 16;
static_assert(kStreamedStages + kStreamedWgmmaCopiers + kStreamedWgmmaOwn < kStreamedWgmmaTaken,
              "a unit takes one stage or more");

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

// ---- resident (resident.cuh) --------------------------------------------------------------------

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

}  // namespace cuda::moe
}  // namespace rocm_kernels
