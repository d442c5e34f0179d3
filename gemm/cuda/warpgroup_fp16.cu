// The warpgroup kernel for float16 operands.
#include "launch_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp16(const GemmArgs& args, const GemmConfig& config,
                             const WarpgroupProblem& problem, void* stream) {
  return launch_tiles_to<DType::kFloat16, TileKind::k16Bit, DType::kFloat32>(args, config, problem,
                                                                             stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
