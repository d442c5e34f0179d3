// What was measured of the kernels for few rows, by which the choice goes in place of a model of
// time: each kernel has one good config of a product. On an H200 and an H100, by `python
// benchmarks/gpu.py` and by hand (docs/kernels/skinny_gemm_journal.md).
#pragma once

#include "config.h"

namespace rocm_kernels {
namespace cuda::skinny {

// The TMA pipeline. Smaller boxes cost more to issue than to read; half of these bytes in flight
// starves an SM, twice makes the last box late.
constexpr int kTmaMinBlockN = 4;
constexpr int kTmaInFlight = 100 << 10;

// The warpgroup kernel. Below this many rows of w, a outweighs w: 64 rows of a take 14.2 us with 78
// rows and clusters of four, 26.9 with 18 rows (2304 x 16384). More blocks in a cluster gain
// nothing, and leave SMs idle. Fewer bytes in flight starve an SM; more make the last boxes late.
constexpr int kEnoughRows = 40;
constexpr int kWarpgroupInFlight = 70 << 10;

// Weights that are read before a pipeline is full: 128 x 128 in 16 bits takes 1.7 us through
// registers, 2.8 through shared memory.
constexpr int64_t kSmallBytes = 2 << 20;

// Up to how many rows these kernels are the quicker, `by_wgmma`: than gemm's tiles by wgmma.
// mma.sync keeps up with the weight for 16 rows, for 32 where a has 16 bits: with block scales 32
// and 64 rows took 132 and 193 us on an H100 that wgmma takes 50 for. FP8 has wgmma among these
// kernels, too.
inline int64_t quickest_rows(const GemmArgs& args, bool by_wgmma) {
  if (!by_wgmma) return kSkinnyGemmMaxRows;
  if (!is_fp8(args.a_dtype)) return 32;
  return is_block_scaled(args) || args.k % kChunkBytes != 0 ? 16 : kSkinnyGemmMaxRows;
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
