// The warpgroup kernel for FP8 operands and scales of whole rows or tensors.
#include "launch_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp8(const GemmArgs& args, const GemmConfig& config,
                            const WarpgroupProblem& problem, void* stream) {
  return launch_tiles_to<DType::kFloat8E4M3FN, TileKind::kFp8, DType::kFloat16>(args, config,
                                                                                problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
