// Starts the products of each design. Their kernels' instances are compiled in files of their own.
#pragma once

#include "../gpu/product.h"
#include "pipelines.h"

namespace rocm_kernels {
namespace cuda {

struct ProductLaunch {
  GroupedEnd end;
  const GroupedProblem& product;
  const MoeConfig& config;
  const SlotIds& slots;
  const MoeDevice& device;
};

Status launch_resident(const ProductLaunch& call, Stream stream);        // resident.cu
Status launch_streamed(const ProductLaunch& call, Stream stream);        // streamed.cu
Status launch_streamed_wgmma(const ProductLaunch& call, Stream stream);  // streamed_wgmma.cu
// The warpgroup design: operands of one type, and weights narrower than a.
Status launch_grouped_tiles(const ProductLaunch& call, Stream stream);  // grouped_tiles.cu
Status launch_widened_tiles(const ProductLaunch& call, Stream stream);  // widened_tiles.cu

}  // namespace cuda
}  // namespace rocm_kernels
