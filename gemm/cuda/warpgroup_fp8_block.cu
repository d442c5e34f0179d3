// The warpgroup kernel for FP8 operands and scales of blocks of 128.
#include "launch_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp8_block(const GemmArgs& args, const GemmConfig& config,
                                  const WarpgroupProblem& problem, void* stream) {
  return launch_tiles_to<DType::kFloat8E4M3FN, TileKind::kFp8Block, DType::kFloat16>(
      args, config, problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
