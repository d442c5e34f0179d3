// What the warpgroup kernel and gemm's others ask of an NVIDIA GPU and of the operands, for gemm
// and for the products of experts. No CUDA header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../common/core/math.h"
#include "../../../common/cuda/memory_rates.h"
#include "../../../common/cuda/swizzle.h"
#include "../args.h"

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
constexpr int scale_rows(int block_r, int block_c, bool swap_ab) {
  return swap_ab ? ceil_div(block_c, 32) * 32 : block_r / 8;
}
constexpr int padded_groups(int groups) { return groups <= 2 ? groups : ceil_div(groups, 4) * 4; }
constexpr int warp_scale_bytes(int block_r, int block_c, bool swap_ab, bool paired) {
  const int groups = swap_ab ? (paired ? block_r / 128 : 1)
                             : padded_groups(block_c / columns_of_block(block_c, paired));
  const int bytes = kScaleRun * (scale_rows(block_r, block_c, swap_ab) * groups + kScaleSkew) * 4;
  return swap_ab ? bytes / 2 : bytes;
}

// Outputs on their way to memory: boxes of kStagedRows x staged_columns() of 16 bits. With room for
// all of its boxes of a tile a warp never waits, and TMA stores them while the next
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
constexpr int warp_staging_bytes(int block_r, int block_c, bool swap_ab, bool fp8, int scale_bytes,
                                 bool widened) {
  return swap_ab ? kWarpColumnsBytes
                 : staged_boxes(block_r, block_c, fp8, scale_bytes, widened) *
                       staged_box_bytes(block_c);
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

}  // namespace cuda
}  // namespace rocm_kernels
