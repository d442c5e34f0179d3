// Grouped products on the warpgroup kernel of 16-bit rows and narrower weights, which become as
// wide on their way (blocks/product/cuda/widen.cuh).
#include "launch_grouped_tiles.cuh"

namespace rocm_kernels {
namespace cuda::moe {
namespace {

template <DType kType>
Status launch_fp8_weights(const ProductLaunch& call, Stream stream) {
  constexpr DType kWType = DType::kFloat8E4M3FN;
  return call.product.w.scale.is_blocked() ? launch_tiles_of<kType, true, 4, kWType>(call, stream)
                                           : launch_tiles_of<kType, false, 0, kWType>(call, stream);
}

}  // namespace

Status launch_widened_tiles(const ProductLaunch& call, Stream stream) {
  const GroupedProblem& p = call.product;
  if (p.w.dtype == DType::kFloat4E2M1x2) {
    return launch_tiles_of<DType::kBFloat16, false, 0, DType::kFloat4E2M1x2>(call, stream);
  }
  return p.a_dtype == DType::kBFloat16 ? launch_fp8_weights<DType::kBFloat16>(call, stream)
                                       : launch_fp8_weights<DType::kFloat16>(call, stream);
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
