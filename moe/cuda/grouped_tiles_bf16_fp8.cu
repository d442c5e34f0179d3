// Grouped products on the warpgroup kernel: bfloat16 rows, FP8 weights.
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_grouped_tiles_bf16_fp8(const GroupedTilesLaunch& call, Stream stream) {
  return launch_widened_tiles<DType::kBFloat16>(call, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
