// Grouped products on the warpgroup kernel: bfloat16 rows, FP8 weights.
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_grouped_tiles_bf16_fp8(const GroupedTilesLaunch& call, Stream stream) {
  constexpr DType kType = DType::kBFloat16, kWType = DType::kFloat8E4M3FN;
  return call.product.w.scale.is_blocked()
             ? launch_grouped_tiles<kType, true, 4, kWType>(call, stream)
             : launch_grouped_tiles<kType, false, 0, kWType>(call, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
