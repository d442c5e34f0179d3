// A config of the CUDA gemm: which kernel, and how the work is divided. As a struct, as text, and
// what it asks of the device. No CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../common/core/math.h"
#include "../../../common/cuda/memory_rates.h"
#include "../../../common/cuda/swizzle.h"
#include "../args.h"
#include "../config_fields.h"
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
constexpr int kStagedRows = 16;  // of out, that a warp stores by one copy (dense_sink.cuh)
// What a warp needs to store 16 rows of 32 columns by itself, and 32 rows of 16.
constexpr int kWarpRowsBytes = 1280, kWarpColumnsBytes = 1536;
constexpr int kMaxScaleGroups = 5;    // of w, in a tile
constexpr int kScaleRun = 4;          // chunks whose block scales are fetched together
constexpr int kScaleSkew = 8;         // words between theirs, for lanes write four chunks at once
constexpr int kMaxSteps = 16;         // of a Sink, each finished by one contributor
constexpr int kMaxContributors = 32;  // of a tile: a warp looks at their flags
constexpr int kStaticBytes = 7 << 10;
constexpr int kSharedBytes = 227 << 10;  // that a block of sm_90 can ask for

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
  int id = 0;                          // among the GPUs of the host
  // sm_90: clusters of 1, 2 and 4 blocks, each block with an SM of its own, that it holds at once.
  int clusters[3] = {};
  MemoryRates memory;
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
  int32_t group = 32;   // tiles of rows before the next columns

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
      "cluster_n=1 num_stages=5 schedule=data_parallel split_k=1 group=32'";
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

// FP8 weights of a 16-bit a, which become its type on their way.
inline bool is_widened(const GemmArgs& args) {
  return size_of(args.w_dtype) < size_of(args.a_dtype);
}

// Bytes of shared memory of the warpgroup kernel, narrow stages of w apart; `warp_bytes` for each
// warp that multiplies.
constexpr int64_t warpgroup_shared_bytes(int64_t block_m, int64_t block_n, int num_stages,
                                         int64_t warp_bytes) {
  return kStageAlignment + kMathGroups * 4 * warp_bytes +
         num_stages * (block_m + block_n) * kChunkBytes;
}

// Columns of a tile that surely lie in one block of 128 of w; `paired`: each 128 rows of w are 64
// gates and their ups.
constexpr int columns_of_block(int block_c, bool paired) {
  return paired ? 64 : block_c % 128 == 0 ? 128 : block_c % 64 == 0 ? 64 : 32;
}
// Block scales in shared memory (block_scales.cuh): rows of a in a table, groups of w beside each,
// bytes for each warp. Tables of a warpgroup that take turns are half a warp's each.
constexpr int scale_rows(int block_r, int block_c, bool rows_are_w) {
  return rows_are_w ? ceil_div(block_c, 32) * 32 : block_r / 8;
}
constexpr int padded_groups(int groups) { return groups <= 2 ? groups : ceil_div(groups, 4) * 4; }
constexpr int warp_scale_bytes(int block_r, int block_c, bool rows_are_w, bool paired) {
  const int groups = rows_are_w ? (paired ? block_r / 128 : 1)
                                : padded_groups(block_c / columns_of_block(block_c, paired));
  const int bytes =
      kScaleRun * (scale_rows(block_r, block_c, rows_are_w) * groups + kScaleSkew) * 4;
  return rows_are_w ? bytes / 2 : bytes;
}

// Outputs on their way to memory: boxes of kStagedRows x staged_columns() of 16 bits. With room for
// all of its boxes of a tile a warp never waits, and the copy engine stores them while the next
// tile is multiplied; but stages come first, so that operands for 1,900 cycles of products are
// under way beside the one that is multiplied, and 16-bit types hold another
// (docs/kernels/gemm_journal.md). Widened weights leave room for one. Where w is the 64-row operand
// a warp stores by itself, 32 rows of 16 columns at a time.
constexpr int staged_columns(int block_c) { return block_c % 64 == 0 ? 64 : 32; }
constexpr int staged_box_bytes(int block_c) { return kStagedRows * staged_columns(block_c) * 2; }
constexpr int boxes_of_tile(int block_r, int block_c) {
  return block_r / (kMathGroups * 64) * (block_c / staged_columns(block_c));
}
constexpr int staged_boxes(int block_r, int block_c, bool fp8, int scale_bytes, bool widened) {
  const int box = staged_box_bytes(block_c), all = boxes_of_tile(block_r, block_c);
  const int least = (kWarpRowsBytes + box - 1) / box;
  if (widened) return least;
  const int64_t left =
      kSharedBytes - kStaticBytes - warpgroup_shared_bytes(block_r, block_c, 0, scale_bytes);
  const int64_t stage = int64_t{block_r + block_c} * kChunkBytes;
  const int cycles = block_r * block_c / 32;
  const int64_t wanted = 1 + (fp8 ? 0 : 1) + (1900 + cycles - 1) / cycles;
  const int64_t most = (left - kMathGroups * 4 * least * box) / stage;
  const int64_t stages = std::min<int64_t>({wanted, most, kMaxStages});
  return static_cast<int>(
      std::clamp<int64_t>((left - stages * stage) / (kMathGroups * 4 * box), least, all));
}
constexpr int warp_staging_bytes(int block_r, int block_c, bool rows_are_w, bool fp8,
                                 int scale_bytes, bool widened) {
  return rows_are_w ? kWarpColumnsBytes
                    : staged_boxes(block_r, block_c, fp8, scale_bytes, widened) *
                          staged_box_bytes(block_c);
}

inline int64_t warpgroup_shared_bytes(const GemmArgs& args, const GemmConfig& c) {
  const int scales =
      is_block_scaled(args) ? warp_scale_bytes(c.block_r(), c.block_c(), c.rows_are_w(), false) : 0;
  return warpgroup_shared_bytes(
      c.block_m, c.block_n, c.num_stages,
      scales + warp_staging_bytes(c.block_r(), c.block_c(), c.rows_are_w(), is_fp8(args.a_dtype),
                                  scales, is_widened(args)));
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
