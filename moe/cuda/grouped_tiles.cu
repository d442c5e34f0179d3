// Grouped products on the warpgroup kernel: FP8 operands and scales of whole rows.
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_grouped_tiles_fp8(const GroupedTilesLaunch& call, Stream stream) {
  return launch_grouped_tiles<DType::kFloat8E4M3FN, false, 4>(call, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
