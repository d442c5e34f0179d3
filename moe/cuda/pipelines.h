// What the streamed design (streamed.cuh) asks of a block: the sizes of its pipeline, which
// dispatch, checks and the choice of a config go by. No CUDA header.
#pragma once

#include <cstdint>

#include "../../common/core/compiler.h"
#include "../../common/cuda/memory_rates.h"
#include "../config.h"

namespace rocm_kernels {
namespace cuda {

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
inline StreamedStage streamed_stage(const MoeConfig& c, DType a, DType w, int64_t k,
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

// What the choice of a config depends on besides the shape.
struct MoeDevice {
  int32_t sm_count = 132;
  int32_t compute_capability = 90;
  int64_t shared_bytes_per_sm = 228 << 10;
  int64_t shared_bytes_per_block = 227 << 10;  // most that a block can ask for
  int32_t id = 0;                              // among the GPUs of the host
  MemoryRates memory;
};

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

}  // namespace cuda
}  // namespace rocm_kernels
