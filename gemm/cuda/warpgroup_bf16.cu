// The warpgroup kernel for bfloat16 operands.
#include "../../blocks/product/cuda/launch_warpgroup.cuh"
#include "instances.h"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_bf16(const GemmArgs& args, const GemmConfig& config,
                             const WarpgroupProblem& problem, void* stream) {
  return launch_16_bit_tile<DType::kBFloat16>(args, config, problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
