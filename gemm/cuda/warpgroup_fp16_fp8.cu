// The warpgroup kernel for float16 a and FP8 weights.
#include "launch_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_warpgroup_fp16_fp8(const GemmArgs& args, const GemmConfig& config,
                                 const WarpgroupProblem& problem, void* stream) {
  constexpr DType kType = DType::kFloat16, kOut = DType::kBFloat16;
  return is_block_scaled(args)
             ? launch_tiles<kType, TileKind::kWidenedBlock, kOut>(args, config, problem, stream)
             : launch_tiles<kType, TileKind::kWidened, kOut>(args, config, problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
