// A config of the CUDA gemm: which kernel, and how the work is divided. As a struct, as text, and
// what it asks of the device. No CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../common/core/math.h"
#include "../../common/cuda/swizzle.h"
#include "../config_fields.h"
#include "../gemm.h"
#include "schedule.h"

namespace rocm_kernels {
namespace cuda {

// The warpgroup kernel's units (warpgroup.cuh).
constexpr int kMathGroups = 2;          // warpgroups that multiply
constexpr int kWarpgroupThreads = 384;  // and one that fetches
constexpr int kWidenThreads = 128;      // of each warpgroup that widens weights narrower than a
constexpr int kMaxStages = 8;
constexpr int kStageAlignment = kPatternBytes;
constexpr int kMaxRows = 256;  // of a tile
constexpr int kMaxColumns = 256;
constexpr int kWarpStagingBytes = 1536;  // outputs on their way
constexpr int kStagingBytes = kMathGroups * 4 * kWarpStagingBytes;
constexpr int kMaxScaleGroups = 4;  // of w, in a tile
constexpr int kScaleRun = 4;        // chunks whose block scales are fetched together
constexpr int kScaleBuffers = 2;
constexpr int kMaxSteps = 16;         // of an epilogue, each finished by one contributor
constexpr int kMaxContributors = 32;  // of a tile: a warp looks at their flags
constexpr int kStaticBytes = 7 << 10;

// The mma kernel's (mma.cuh).
constexpr int kMmaBlockM = 128, kMmaBlockN = 128;
constexpr int kMmaThreads = 256;
constexpr int kMmaStepBytes = 64;  // of a row of w: four lanes x 16 bytes
constexpr int kMmaStages = 4;

// Rows of both operands start at multiples of 16 bytes: what copies of vectors and boxes ask.
inline bool has_aligned_rows(const GemmArgs& args) {
  const auto aligned = [](const void* data, int64_t stride, int64_t rows, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
           (rows == 1 || stride * size_of(dtype) % 16 == 0);
  };
  return aligned(args.a, args.a_stride, args.m, args.a_dtype) &&
         aligned(args.w, args.w_stride, args.n, args.w_dtype);
}

inline int64_t mma_shared_bytes(const GemmArgs& args) {
  const int64_t step_elements = kMmaStepBytes / size_of(args.w_dtype);
  return kMmaStages *
         (int64_t{kMmaBlockN} * kMmaStepBytes + kMmaBlockM * step_elements * size_of(args.a_dtype));
}

struct GemmDevice {
  int sm_count = 0;
  int compute_capability = 0;          // 90 for sm_90
  int64_t shared_bytes_per_block = 0;  // most that a block can ask for
};

struct GemmConfig {
  enum class Design : int32_t {
    kPlain,      // any types, one element at a time (plain.cu)
    kMma,        // mma.sync: sm_80 and later (mma.cuh)
    kWarpgroup,  // TMA into wgmma: sm_90a alone (warpgroup.cuh), to which all fields belong
  };
  enum Rows : int32_t { kRowsOfA, kRowsOfW };  // the 64-row operand of wgmma
  enum Schedule : int32_t { kDataParallel, kSplitK, kStreamK, kHybrid };  // see schedule.h
  Design design = Design::kPlain;
  int32_t block_m = 128, block_n = 128;
  int32_t rows = kRowsOfA;
  int32_t cluster_m = 1, cluster_n = 1;  // blocks that share tiles of w, of a
  int32_t num_stages = 4;
  int32_t schedule = kDataParallel;
  int32_t split_k = 1;  // kSplitK
  int32_t group = 8;    // tiles of rows before the next columns

  bool rows_are_w() const { return rows == kRowsOfW; }
  int block_r() const { return rows_are_w() ? block_n : block_m; }
  int block_c() const { return rows_are_w() ? block_m : block_n; }
  int cluster_r() const { return rows_are_w() ? cluster_n : cluster_m; }
  int cluster_c() const { return rows_are_w() ? cluster_m : cluster_n; }

  static constexpr const char* kRowsNames[] = {"a", "w"};
  static constexpr const char* kScheduleNames[] = {"data_parallel", "split_k", "stream_k",
                                                   "hybrid"};
  static constexpr const char* kDesigns[] = {"plain", "mma", "warpgroup"};
  static constexpr ConfigField<GemmConfig> kFields[] = {
      {"block_m", &GemmConfig::block_m},
      {"block_n", &GemmConfig::block_n},
      {"rows", &GemmConfig::rows, kRowsNames, 2},
      {"cluster_m", &GemmConfig::cluster_m},
      {"cluster_n", &GemmConfig::cluster_n},
      {"num_stages", &GemmConfig::num_stages},
      {"schedule", &GemmConfig::schedule, kScheduleNames, 4},
      {"split_k", &GemmConfig::split_k},
      {"group", &GemmConfig::group},
  };
  static constexpr Status kMustRead =
      "gemm config: it must read like 'warpgroup block_m=128 block_n=128 rows=a cluster_m=1 "
      "cluster_n=1 num_stages=6 schedule=data_parallel split_k=1 group=8'";
};

constexpr Status kNoTile =
    "gemm config: no kernel has this tile; gemm_configs lists those that are";

// Rows of an operand that one copy brings: a tile's, or all there are, and a part of them where
// `sharing` blocks fetch one each. Whole patterns, so that parts join.
inline int32_t box_rows(int64_t rows, int block, int sharing) {
  return static_cast<int32_t>(
      ceil_div(ceil_div(std::min<int64_t>(rows, block), sharing), kPatternLines) * kPatternLines);
}

// Bytes of a row of w beside 128 of one of a, where w is narrower and has stages of its own; else
// 0.
constexpr int narrow_row_bytes(DType a, DType w) {
  return size_of(w) == size_of(a)    ? 0
         : w == DType::kFloat4E2M1x2 ? kChunkBytes / 4
                                     : kChunkBytes / 2;
}

// Bytes of shared memory that the warpgroup kernel asks for, narrow stages of w apart.
inline int64_t warpgroup_shared_bytes(const GemmConfig& c, bool block_scales) {
  const int64_t stage = int64_t{c.block_m + c.block_n} * kChunkBytes;
  const int64_t scales =
      block_scales ? kScaleBuffers * (c.block_m + kMaxScaleGroups) * kScaleRun * 4 : 0;
  return kStageAlignment + kStagingBytes + c.num_stages * stage + scales;
}

// Stages of weights that are widened: before they are (`narrow`), and of what is multiplied. Few
// rows wait for bytes from memory, which are under way in the former; many for the tensor cores.
struct WidenedStages {
  int narrow = 0, wide = 0;
};
inline WidenedStages widened_stages(int64_t block_m, int64_t block_n, int narrow_row_bytes,
                                    int64_t other_bytes, int64_t shared_bytes_per_block) {
  const int least = block_m < 128 ? 4 : 3;
  const int64_t narrow = block_n * narrow_row_bytes, wide = (block_m + block_n) * kChunkBytes;
  const int64_t left = shared_bytes_per_block - kStaticBytes - other_bytes;
  WidenedStages stages;
  stages.wide = static_cast<int>(std::min<int64_t>((left - least * narrow) / wide, kMaxStages));
  stages.narrow =
      static_cast<int>(std::min<int64_t>((left - stages.wide * wide) / narrow, kMaxStages));
  return stages;
}

// The cut of a product by a config: tiles as workers take them.
inline TileSchedule cut_product(const GemmConfig& c, int64_t m, int64_t n, int64_t k_bytes,
                                int sm_count) {
  const int64_t tiles = ceil_div(m, c.block_m * c.cluster_m) * ceil_div(n, c.block_n * c.cluster_n);
  const int chunks = static_cast<int>(ceil_div(k_bytes, kChunkBytes));
  const int most = sm_count / (c.cluster_m * c.cluster_n);
  int64_t whole = tiles;
  int split = 1;
  int64_t units = tiles;
  switch (c.schedule) {
    case GemmConfig::kDataParallel:
      break;
    case GemmConfig::kSplitK:
      split = std::min(c.split_k, chunks);
      if (split > 1) whole = 0;
      units = tiles * split;
      break;
    case GemmConfig::kStreamK:
      whole = 0, split = 0;
      units = std::min(tiles * chunks, tiles * (kMaxContributors - 2));
      break;
    case GemmConfig::kHybrid:
      // The last wave that is not full, and the one before it, so that no interval is short.
      whole = tiles % most == 0 ? tiles : std::max<int64_t>(0, tiles / most - 1) * most;
      split = whole == tiles ? 1 : 0;
      units = whole == tiles ? tiles : std::min(tiles * chunks, tiles * (kMaxContributors - 2));
      break;
  }
  return TileSchedule::make(static_cast<int32_t>(tiles), chunks, static_cast<int32_t>(whole), split,
                            static_cast<int32_t>(std::min<int64_t>(most, units)));
}

// Flags first, then the partial sums.
inline int64_t flag_bytes(const TileSchedule& schedule, int cluster) {
  if (schedule.slots() == 0) return 0;
  return ceil_div(int64_t{schedule.shared_tiles()} * cluster * kMathGroups * kMaxSteps *
                      kMaxContributors * 8,
                  256) *
         256;
}
inline int64_t workspace_bytes(const GemmConfig& c, const TileSchedule& schedule) {
  const int cluster = c.cluster_m * c.cluster_n;
  return flag_bytes(schedule, cluster) +
         schedule.slots() * cluster * int64_t{c.block_m} * c.block_n * 4;
}

}  // namespace cuda
}  // namespace rocm_kernels
