// Grouped products on the warpgroup kernel: bfloat16 rows, MXFP4 weights.
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_grouped_tiles_bf16_mxfp4(const GroupedTilesLaunch& call, Stream stream) {
  return launch_grouped_tiles<DType::kBFloat16, false, 0, DType::kFloat4E2M1x2>(call, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
