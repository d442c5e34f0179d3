// The warpgroup kernel for FP8 operands and scales of blocks of 128.
#include "instances.h"
#include "launch_warpgroup.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp8_block(const GemmArgs& args, const GemmConfig& config,
                                  const WarpgroupProblem& problem, void* stream) {
  constexpr DType kType = DType::kFloat8E4M3FN;
  if (args.out_dtype == DType::kFloat16) {
    // float16 shows what the tensor core's sums of 128 products lack; of 64 it does not.
    ROCM_KERNELS_TILE(kType, false, 2, 128, true, 2)
    ROCM_KERNELS_TILE(kType, false, 1, 128, true, 2)
    ROCM_KERNELS_TILE(kType, true, 1, 32, true, 2)
    ROCM_KERNELS_TILE(kType, true, 1, 64, true, 2)
    return kNoTile;
  }
  ROCM_KERNELS_TILE(kType, false, 2, 128, true, 4)
  ROCM_KERNELS_TILE(kType, false, 1, 128, true, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 32, true, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 64, true, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 96, true, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 128, true, 4)
  ROCM_KERNELS_TILE(kType, true, 2, 64, true, 4)
  return kNoTile;
}

}  // namespace cuda
}  // namespace rocm_kernels
