// Grouped products on the warpgroup kernel: float16 rows, FP8 weights.
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_grouped_tiles_fp16_fp8(const GroupedTilesLaunch& call, Stream stream) {
  return launch_widened_tiles<DType::kFloat16>(call, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
