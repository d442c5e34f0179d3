// The warpgroup kernel for FP8 operands and scales of whole rows or tensors.
#include "instances.h"
#include "launch_warpgroup.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp8(const GemmArgs& args, const GemmConfig& config,
                            const WarpgroupProblem& problem, void* stream) {
  constexpr DType kType = DType::kFloat8E4M3FN;
  if (args.out_dtype == DType::kFloat16) {
    // float16 shows what the tensor core's sums of 128 products lack; of 64 it does not.
    ROCM_KERNELS_TILE(kType, false, 2, 128, false, 2)
    ROCM_KERNELS_TILE(kType, false, 1, 128, false, 2)
    ROCM_KERNELS_TILE(kType, true, 1, 32, false, 2)
    ROCM_KERNELS_TILE(kType, true, 1, 64, false, 2)
    return kNoTile;
  }
  ROCM_KERNELS_TILE(kType, false, 2, 128, false, 4)
  ROCM_KERNELS_TILE(kType, false, 1, 128, false, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 32, false, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 64, false, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 96, false, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 128, false, 4)
  ROCM_KERNELS_TILE(kType, true, 2, 64, false, 4)
  return kNoTile;
}

}  // namespace cuda
}  // namespace rocm_kernels
