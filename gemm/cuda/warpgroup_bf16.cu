// The warpgroup kernel for bfloat16 operands.
#include "instances.h"
#include "launch_warpgroup.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_bf16(const GemmArgs& args, const GemmConfig& config,
                             const WarpgroupProblem& problem, void* stream) {
  constexpr DType kType = DType::kBFloat16;
  if (args.out_dtype == DType::kFloat32) {
    ROCM_KERNELS_TILE(kType, false, 1, 128, false, 4)
    ROCM_KERNELS_TILE(kType, true, 1, 32, false, 4)
    return kNoTile;
  }
  ROCM_KERNELS_TILE(kType, false, 1, 256, false, 0)
  ROCM_KERNELS_TILE(kType, false, 2, 128, false, 0)
  ROCM_KERNELS_TILE(kType, false, 1, 128, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 32, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 64, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 96, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 128, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 256, false, 0)
  return kNoTile;
}

}  // namespace cuda
}  // namespace rocm_kernels
