// Grouped products on the warpgroup kernel: float16 operands.
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_grouped_tiles_fp16(const GroupedTilesLaunch& call, Stream stream) {
  return launch_grouped_tiles<DType::kFloat16, false, 0>(call, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
