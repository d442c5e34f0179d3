// How a product is cut for CUDA: one pure function of the sizes, the types and the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../../common/cuda/swizzle.h"
#include "../gemm.h"
#include "schedule.h"

namespace rocm_kernels {
namespace cuda {

// The warpgroup kernel's units (warpgroup.cuh).
constexpr int kMathGroups = 2;          // warpgroups that multiply
constexpr int kWarpgroupThreads = 384;  // and one that fetches
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

// The mma kernel's (mma.cuh), and the plain kernel's (plain.cuh).
constexpr int kMmaBlockM = 128, kMmaBlockN = 128;
constexpr int kMmaThreads = 256;
constexpr int kMmaStepBytes = 64;  // of a row of w: four lanes x 16 bytes
constexpr int kMmaStages = 4;
constexpr int kPlainWarps = 8;   // rows of w
constexpr int kPlainBlockM = 8;  // rows of a

ROCM_KERNELS_HOST_DEVICE constexpr int64_t ceil_div(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

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
  enum class Kernel : int32_t { kPlain, kMma, kWarpgroup };
  enum class Schedule : int32_t { kDataParallel, kSplitK, kStreamK, kHybrid };
  Kernel kernel = Kernel::kPlain;
  int block_m = 128, block_n = 128;
  bool rows_are_w = false;           // w is the 64-row operand of wgmma, else a
  int cluster_m = 1, cluster_n = 1;  // blocks that share tiles of w, of a
  int num_stages = 4;
  Schedule schedule = Schedule::kDataParallel;
  int split_k = 1;  // kSplitK
  int group = 8;    // tiles of rows before the next columns

  int block_r() const { return rows_are_w ? block_n : block_m; }
  int block_c() const { return rows_are_w ? block_m : block_n; }
  int cluster_r() const { return rows_are_w ? cluster_n : cluster_m; }
  int cluster_c() const { return rows_are_w ? cluster_m : cluster_n; }
};

constexpr const char* kScheduleNames[] = {"data_parallel", "split_k", "stream_k", "hybrid"};
constexpr const char* kKernelNames[] = {"plain", "mma", "warpgroup"};

constexpr size_t kConfigTextBytes = 192;
inline int describe(const GemmConfig& c, char* text, size_t size) {
  if (c.kernel != GemmConfig::Kernel::kWarpgroup) {
    return std::snprintf(text, size, "%s", kKernelNames[static_cast<int>(c.kernel)]);
  }
  return std::snprintf(
      text, size,
      "%s block_m=%d block_n=%d rows=%s cluster_m=%d cluster_n=%d num_stages=%d schedule=%s "
      "split_k=%d group=%d",
      kKernelNames[static_cast<int>(c.kernel)], c.block_m, c.block_n, c.rows_are_w ? "w" : "a",
      c.cluster_m, c.cluster_n, c.num_stages, kScheduleNames[static_cast<int>(c.schedule)],
      c.split_k, c.group);
}

inline bool parse(const char* text, GemmConfig& c) {
  c = GemmConfig();
  for (const GemmConfig::Kernel kernel : {GemmConfig::Kernel::kPlain, GemmConfig::Kernel::kMma}) {
    c.kernel = kernel;
    if (std::strcmp(text, kKernelNames[static_cast<int>(kernel)]) == 0) return true;
  }
  char kernel[16], rows[4], schedule[16];
  int end = 0;
  if (std::sscanf(text,
                  "%15s block_m=%d block_n=%d rows=%3s cluster_m=%d cluster_n=%d num_stages=%d "
                  "schedule=%15s split_k=%d group=%d%n",
                  kernel, &c.block_m, &c.block_n, rows, &c.cluster_m, &c.cluster_n, &c.num_stages,
                  schedule, &c.split_k, &c.group, &end) != 10 ||
      text[end] != '\0') {
    return false;
  }
  const auto find = [](const char* name, const char* const* names, int count) {
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(name, names[i]) == 0) return i;
    }
    return -1;
  };
  const int kernel_index = find(kernel, kKernelNames, 3);
  const int schedule_index = find(schedule, kScheduleNames, 4);
  if (kernel_index != 2 || schedule_index < 0) return false;
  c.kernel = static_cast<GemmConfig::Kernel>(kernel_index);
  c.schedule = static_cast<GemmConfig::Schedule>(schedule_index);
  c.rows_are_w = rows[0] == 'w';
  return true;
}

// Bytes of shared memory that the warpgroup kernel asks for.
inline int64_t warpgroup_shared_bytes(const GemmConfig& c, bool block_scales) {
  const int64_t stage = int64_t{c.block_m + c.block_n} * kChunkBytes;
  const int64_t scales =
      block_scales ? kScaleBuffers * (c.block_m + kMaxScaleGroups) * kScaleRun * 4 : 0;
  return kStageAlignment + kStagingBytes + c.num_stages * stage + scales;
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
    case GemmConfig::Schedule::kDataParallel:
      break;
    case GemmConfig::Schedule::kSplitK:
      split = std::min(c.split_k, chunks);
      if (split > 1) whole = 0;
      units = tiles * split;
      break;
    case GemmConfig::Schedule::kStreamK:
      whole = 0, split = 0;
      units = std::min(tiles * chunks, tiles * (kMaxContributors - 2));
      break;
    case GemmConfig::Schedule::kHybrid:
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
