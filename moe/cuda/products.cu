// Grouped products for NVIDIA GPUs: the kernels, the choice of a config, the launches.
#include "../gpu/grouped_gemm.h"
#include "../gpu/plain.h"
#include "../gpu/route_kernels.h"
#include "choose.h"
#include "launch_grouped_tiles.h"
#include "launch_resident.h"
#include "launch_streamed.h"
#include "launch_streamed_wgmma.h"
#include "tiled.cuh"

namespace rocm_kernels {

namespace cuda {
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

Status launch_streamed_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                               const SlotIds& slots, Stream stream) {
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  const StreamedStage stage =
      streamed_stage(config, p.a_dtype, p.w.dtype, p.k, p.w.scale.is_blocked());
  return launch_streamed(
      {end, p, slots.ids, slots.slots, slots.experts, stage,
       streamed_stages(stage, slots.slots, device), config.walked(), slots.first, device.sm_count},
      stream);
}

Status launch_streamed_wgmma_product(GroupedEnd end, const GroupedProblem& p,
                                     const MoeConfig& config, const SlotIds& slots, Stream stream) {
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  const StreamedWgmmaStage stage = {config.block_m, p.w.scale.is_blocked()};
  return launch_streamed_wgmma(
      {end, p, slots, stage, streamed_wgmma_stages(stage, slots.slots, device), config.walked(),
       device.sm_count},
      stream);
}

Status launch_resident_product(GroupedEnd end, const GroupedProblem& p, const SlotIds& slots,
                               Stream stream) {
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  const bool is_down = end == GroupedEnd::kDown;
  const ResidentSplit split =
      resident_split(is_down, most_row_tiles(slots.slots, slots.experts, kResidentBlockM),
                     p.n / kResidentBlockN, p.k, device.sm_count);
  const ResidentShape shape = resident_shape(is_down, slots.slots / p.slots_of_token, slots.slots,
                                             p.k, p.w.scale.is_blocked(), split);
  return launch_resident(
      {end, p, slots, split, shape, resident_stages(shape, device), device.sm_count}, stream);
}

Status launch_warpgroup_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                                const SlotIds& slots, Stream stream) {
  MoeDevice device;
  if (const Status error = current_moe_device(device)) return error;
  const GroupedTilesLaunch call = {
      end, p, config, slots.slots, slots.experts, device.sm_count, device.shared_bytes_per_block};
  const bool is_bf16 = p.a_dtype == DType::kBFloat16;
  if (p.w.dtype == DType::kFloat4E2M1x2) return launch_grouped_tiles_bf16_mxfp4(call, stream);
  if (is_fp8(p.w.dtype) && !is_fp8(p.a_dtype)) {
    return is_bf16 ? launch_grouped_tiles_bf16_fp8(call, stream)
                   : launch_grouped_tiles_fp16_fp8(call, stream);
  }
  if (is_bf16) return launch_grouped_tiles_bf16(call, stream);
  if (p.a_dtype == DType::kFloat16) return launch_grouped_tiles_fp16(call, stream);
  return p.scale_a.is_blocked() || p.w.scale.is_blocked()
             ? launch_grouped_tiles_fp8_block(call, stream)
             : launch_grouped_tiles_fp8(call, stream);
}

}  // namespace
}  // namespace cuda

// ---- What moe/config.h and moe/gpu/product.h ask of a backend -----------------------------------

Status choose_config(const MoeShape& shape, MoeConfig& config) {
  cuda::MoeDevice device;
  if (const Status error = cuda::current_moe_device(device)) return error;
  config = kept_choice<MoeConfig>(kMoeShapeFields, shape, device.id,
                                  [&] { return cuda::choose_config(shape, device); });
  return nullptr;
}

Status check_config(const MoeShape& shape, const MoeConfig& config) {
  cuda::MoeDevice device;
  if (const Status error = cuda::current_moe_device(device)) return error;
  return cuda::check_moe_config(shape, config, device);
}

Status visit_configs(const MoeShape& shape, void (*visit)(const MoeConfig& config, void* state),
                     void* state) {
  cuda::MoeDevice device;
  if (const Status error = cuda::current_moe_device(device)) return error;
  cuda::for_each_config(shape, device, [&](const MoeConfig& config) { visit(config, state); });
  return nullptr;
}

Status launch_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, const SlotIds& slots, const DeviceFacts& facts,
                      Stream stream) {
  switch (config.design) {
    case MoeConfig::Design::kStreamed:
      return cuda::launch_streamed_product(end, p, config, slots, stream);
    case MoeConfig::Design::kResident:
      return cuda::launch_resident_product(end, p, slots, stream);
    case MoeConfig::Design::kStreamedWgmma:
      return cuda::launch_streamed_wgmma_product(end, p, config, slots, stream);
    case MoeConfig::Design::kWarpgroup:
      return cuda::launch_warpgroup_product(end, p, config, slots, stream);
    case MoeConfig::Design::kTiled:
      return cuda::launch_tiled(end, p, config, most_tiles, facts, stream);
    default:
      return launch_plain_grouped(end, p, most_tiles, facts, stream);
  }
}

Status launch_routing(const RoutingProblem& p, const DeviceFacts& facts, Stream stream) {
  return launch_routing_kernels(p, facts, stream);
}

int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs& args, const Context&) {
  return grouped_gemm_bytes_on_gpu(args);
}

Status launch_grouped_gemm(const GroupedGemmArgs& args, const Context& context) {
  return launch_grouped_gemm_on_gpu(args, context);
}

Status visit_grouped_gemm_configs(const GroupedGemmArgs& args, const Context&,
                                  void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = check_sizes(args)) return error;
  return tell_configs(args.config, shape_of(args), visit, state);
}

}  // namespace rocm_kernels
