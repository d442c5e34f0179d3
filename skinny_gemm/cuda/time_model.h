// What was measured of the kernels for few rows, by which the choice goes in place of a model of
// time: each kernel has one good config of a product. On an H200 and an H100, by `python
// benchmarks/gpu.py` and by hand (docs/kernels/skinny_gemm_journal.md).
#pragma once

#include "config.h"

namespace rocm_kernels {
namespace cuda::skinny {

constexpr double kSmBytesPerUs = 35e3;  // the most that an SM of an H200 takes in

// The TMA pipeline. Smaller boxes cost more to issue than to read; half of these bytes in flight
// starves an SM, twice makes the last box late.
constexpr int kTmaMinBlockN = 4;
constexpr int kTmaInFlight = 100 << 10;

// Rows of a product that quantises them itself, or gates its outputs. Of one row a launch that is
// spared gains twice what it costs each block, a wait for L2; the next row costs that again. H200,
// us of a layer of an 8-billion Llama: 3.4 gained by one row, 0.8 by two, 3.4 lost by four.
constexpr int64_t kJoinedRows = 1;

// The warpgroup kernel. Below this many rows of w, a outweighs w: 64 rows of a take 14.2 us with 78
// rows and clusters of four, 26.9 with 18 rows (2304 x 16384). More blocks in a cluster gain
// nothing, and leave SMs idle. Fewer bytes in flight starve an SM; more make the last boxes late.
constexpr int kEnoughRows = 40;
constexpr int kWarpgroupInFlight = 70 << 10;

// Weights that are read before a pipeline is full: 128 x 128 in 16 bits takes 1.7 us through
// registers, 2.8 through shared memory.
constexpr int64_t kSmallBytes = 2 << 20;

// Up to how many rows of a these kernels are the quicker where gemm's tiles by wgmma serve, too. On
// an H200 (benchmarks/results/h200.json and h200_gemm.json, which a test compares with these), us
// of 28672 x 4096 and of 4096 x 14336:
//
//                                rows   these kernels   gemm's tiles
//   FP8, scales of rows           64      33.2, 17.9      34.5, 19.6
//   16-bit a, FP8 w               24      37.6, 21.8      47.7, 24.7
//                                 48      76.5, 36.8      53.0, 27.6
//   FP8, block scales             32      132             50 (of one weight on an H100)
//                                 64      193             50
//
// The first line is wgmma's, here as there; the others are mma.sync's, which multiplies 16 rows of
// an FP8 a, and 32 of a 16-bit one, while the weights come. FP8 with a K that is no whole number of
// chunks has mma.sync alone, as block scales have.
constexpr int64_t kQuickestByWgmma = kSkinnyGemmMaxRows;
constexpr int64_t kQuickest16Bit = 32;
constexpr int64_t kQuickestFp8 = 16;

// `by_wgmma`: whether gemm's tiles would be wgmma's.
inline int64_t quickest_rows(const GemmArgs& args, bool by_wgmma) {
  if (!by_wgmma) return kSkinnyGemmMaxRows;
  if (!is_fp8(args.a_dtype)) return kQuickest16Bit;
  return is_block_scaled(args) || args.k % kChunkBytes != 0 ? kQuickestFp8 : kQuickestByWgmma;
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
