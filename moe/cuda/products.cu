// Grouped products for NVIDIA GPUs: the kernels, the choice of a config, the launches.
#include "../gpu/plain.h"
#include "../gpu/route_kernels.h"
#include "choose.h"
#include "launches.h"
#include "tiled.cuh"

namespace rocm_kernels {

namespace cuda::moe {
namespace {

// ---- The kernels that exist ---------------------------------------------------------------------

using Kernel = void (*)(GroupedProblem, GroupedOrder);

template <class Types, bool kGateUp, size_t kTile = 0>
Kernel kernel_of(size_t tile) {
  if constexpr (kTile == kMoeTileCount) {
    return nullptr;
  } else {
    return tile == kTile ? moe_tiled_kernel<Types, kTile, kGateUp>
                         : kernel_of<Types, kGateUp, kTile + 1>(tile);
  }
}

template <class Types>
Kernel kernel_of_types(GroupedEnd end, size_t tile) {
  return end == GroupedEnd::kGateUp ? kernel_of<Types, true>(tile) : kernel_of<Types, false>(tile);
}

Kernel kernel_of(GroupedEnd end, const GroupedProblem& p, size_t tile) {
  constexpr DType kFp8 = DType::kFloat8E4M3FN;
  constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16;
  if (p.w.dtype == DType::kFloat4E2M1x2) return kernel_of_types<Mxfp4Types>(end, tile);
  if (p.a_dtype == kFp8) return kernel_of_types<GroupedTypes<kFp8, kFp8>>(end, tile);
  if (p.a_dtype == DType::kFloat16) {
    return is_fp8(p.w.dtype) ? kernel_of_types<GroupedTypes<kHalf, kFp8>>(end, tile)
                             : kernel_of_types<GroupedTypes<kHalf, kHalf>>(end, tile);
  }
  return is_fp8(p.w.dtype) ? kernel_of_types<GroupedTypes<kBrain, kFp8>>(end, tile)
                           : kernel_of_types<GroupedTypes<kBrain, kBrain>>(end, tile);
}

Status launch_tiled(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                    int64_t most_tiles, const DeviceFacts& facts, Stream stream) {
  const int number = find_moe_tile(config.block_m, config.block_n);
  const Kernel kernel = kernel_of(end, p, number);
  if (kernel == nullptr) return "no kernel was built for this config; report a defect";
  const MoeTile& tile = kMoeTiles[number];
  const GroupedOrder order = {(p.n + config.block_n - 1) / config.block_n, p.split_k, 1,
                              config.walked()};
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(most_tiles * order.tiles_n * p.split_k));
  launch.block = tile.threads();
  launch.stream = stream;
  launch.shared_bytes = tile.shared_bytes(moe_step_bytes_a(p.a_dtype, p.w.dtype));
  launch.early = facts.is_hopper_or_later();
  return launch_kernel(kernel, launch, p, order);
}

Status ask_moe_device(int id, MoeDevice& device) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  device.id = id;
  device.sm_count = facts.compute_units;
  device.compute_capability = facts.compute_capability;
  int sm_bytes = 0, block_bytes = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  }
  device.shared_bytes_per_sm = sm_bytes;
  device.shared_bytes_per_block = block_bytes;
  device.memory = memory_rates(facts);
  return status_of(error);
}

Status current_moe_device(MoeDevice& device) { return ask_once<ask_moe_device>(device); }

}  // namespace

// ---- What moe/config.h and moe/gpu/product.h ask of a backend -----------------------------------

Status choose_config(const MoeShape& shape, MoeConfig& config) {
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  config = kept_choice<MoeConfig>(kMoeShapeFields, shape, device.id,
                                  [&] { return choose_config(shape, device); });
  return nullptr;
}

Status check_config(const MoeShape& shape, const MoeConfig& config) {
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  return check_config(shape, config, device);
}

Status visit_configs(const MoeShape& shape, void (*visit)(const MoeConfig& config, void* state),
                     void* state) {
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  for_each_config(shape, device, [&](const MoeConfig& config) { visit(config, state); });
  return nullptr;
}

Status launch_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, const SlotIds& slots, const DeviceFacts& facts,
                      Stream stream) {
  using Design = MoeConfig::Design;
  if (config.design == Design::kPlain)
    return launch_plain_grouped(end, p, most_tiles, facts, stream);
  if (config.design == Design::kTiled) {
    return launch_tiled(end, p, config, most_tiles, facts, stream);
  }
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  const ProductLaunch call = {end, p, config, slots, device};
  if (config.design == Design::kStreamed) return launch_streamed(call, stream);
  if (config.design == Design::kResident) return launch_resident(call, stream);
  if (config.design == Design::kStreamedWgmma) return launch_streamed_wgmma(call, stream);
  return p.w.dtype == p.a_dtype ? launch_grouped_tiles(call, stream)
                                : launch_widened_tiles(call, stream);
}

}  // namespace cuda::moe

Status launch_routing(const RoutingProblem& p, const DeviceFacts& facts, Stream stream) {
  return launch_routing_kernels(p, facts, stream);
}

}  // namespace rocm_kernels
