// The warpgroup kernel for FP8 operands and scales of blocks of 128.
#include "../../blocks/product/cuda/launch_warpgroup.cuh"
#include "instances.h"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp8_block(const GemmArgs& args, const GemmConfig& config,
                                  const WarpgroupProblem& problem, void* stream) {
  return launch_fp8_tile<true>(args, config, problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
