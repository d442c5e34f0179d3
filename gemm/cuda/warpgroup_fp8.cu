// The warpgroup kernel for FP8 operands and scales of whole rows or tensors.
#include "../../blocks/product/cuda/launch_warpgroup.cuh"
#include "instances.h"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp8(const GemmArgs& args, const GemmConfig& config,
                            const WarpgroupProblem& problem, void* stream) {
  return launch_fp8_tile<false>(args, config, problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
