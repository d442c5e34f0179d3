// What moe/config.h and moe/gpu/ ask of a GPU backend (products.cu has it), and the launches of
// each design's products: their kernels' instances are compiled in files of their own.
#pragma once

#include "../gpu/product.h"
#include "config.h"

namespace rocm_kernels {
namespace cuda::moe {

Status choose_config(const MoeShape& shape, MoeConfig& config);
Status check_config(const MoeShape& shape, const MoeConfig& config);
Status visit_configs(const MoeShape& shape, void (*visit)(const MoeConfig& config, void* state),
                     void* state);
Status launch_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, const SlotIds& slots, const DeviceFacts& facts,
                      Stream stream);

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

}  // namespace cuda::moe
}  // namespace rocm_kernels
