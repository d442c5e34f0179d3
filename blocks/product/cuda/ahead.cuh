// Asks L2 for the beginning of the next product's weight (ahead.h).
#pragma once

#include "../../../common/cuda/tma.cuh"
#include "../ahead.h"

namespace rocm_kernels {
namespace cuda {

#if __CUDA_ARCH__ >= 900
// By a warp of each block, all its lanes: a piece or two of a block. An instruction takes 30 ns to
// issue however much it asks for, and the block must not end later for it: rows of 0.5 KB each,
// some 200 a block, cost a product 6 us on an H200.
__device__ __forceinline__ void ask_ahead(const WeightAhead* ahead, int lane) {
  if (ahead == nullptr) return;
  const WeightAhead next = *ahead;
  for (int64_t piece = blockIdx.x + int64_t{gridDim.x} * lane; piece < next.pieces;
       piece += int64_t{gridDim.x} * 32) {
    prefetch_bytes(static_cast<const char*>(next.data) + piece * next.stride,
                   static_cast<uint32_t>(next.bytes));
  }
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
