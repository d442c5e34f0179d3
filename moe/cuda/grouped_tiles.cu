// Grouped products on the warpgroup kernel whose operands are of one type.
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda::moe {

Status launch_grouped_tiles(const ProductLaunch& call, Stream stream) {
  const GroupedProblem& p = call.product;
  if (p.a_dtype == DType::kBFloat16) {
    return launch_tiles_of<DType::kBFloat16, false, 0>(call, stream);
  }
  if (p.a_dtype == DType::kFloat16) return launch_tiles_of<DType::kFloat16, false, 0>(call, stream);
  return p.scale_a.is_blocked() || p.w.scale.is_blocked()
             ? launch_tiles_of<DType::kFloat8E4M3FN, true, 4>(call, stream)
             : launch_tiles_of<DType::kFloat8E4M3FN, false, 4>(call, stream);
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
