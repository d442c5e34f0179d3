// The warpgroup kernel for bfloat16 a and FP8 weights.
#include "../../blocks/product/cuda/launch_warpgroup.cuh"
#include "instances.h"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_bf16_fp8(const GemmArgs& args, const GemmConfig& config,
                                 const WarpgroupProblem& problem, void* stream) {
  return launch_widened_tile<DType::kBFloat16>(args, config, problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
