// Grouped products for AMD GPUs: the kernels, the choice of a config, the launches.
#include "../gpu/grouped_gemm.h"
#include "../gpu/plain.h"
#include "../gpu/route_kernels.h"
#include "choose.h"
#include "tiled.h"

namespace rocm_kernels {
namespace cdna {
namespace {

// ---- The kernels that exist -------------------------------------------------------------------

using TiledKernel = void (*)(GroupedProblem, GroupedOrder);

template <MmaKind kKind, bool kBlockScales, bool kFp4, bool kGateUp, size_t kTile = 0>
TiledKernel tiled_kernel(size_t tile) {
  if constexpr (kTile == kMoeTileCount) {
    return nullptr;
  } else {
    return tile == kTile ? moe_tiled<kKind, kTile, kBlockScales, kFp4, kGateUp>
                         : tiled_kernel<kKind, kBlockScales, kFp4, kGateUp, kTile + 1>(tile);
  }
}

template <bool kGateUp>
TiledKernel tiled_kernel(const GroupedProblem& p, bool block_scaled, size_t tile) {
  if (is_fp8(p.a_dtype)) {
    return block_scaled ? tiled_kernel<MmaKind::kFp8, true, false, kGateUp>(tile)
                        : tiled_kernel<MmaKind::kFp8, false, false, kGateUp>(tile);
  }
  if (p.a_dtype == DType::kFloat16) {
    return tiled_kernel<MmaKind::kFloat16, false, false, kGateUp>(tile);
  }
  if (is_fp8(p.w.dtype)) {
    return block_scaled ? tiled_kernel<MmaKind::kBFloat16Fp8, true, false, kGateUp>(tile)
                        : tiled_kernel<MmaKind::kBFloat16Fp8, false, false, kGateUp>(tile);
  }
  return p.w.dtype == DType::kFloat4E2M1x2
             ? tiled_kernel<MmaKind::kBFloat16, false, true, kGateUp>(tile)
             : tiled_kernel<MmaKind::kBFloat16, false, false, kGateUp>(tile);
}

Status launch_tiled(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                    int64_t most_tiles, Stream stream) {
  const int tile = find_moe_tile(config.block_m, config.block_n);
  const bool block_scaled = p.scale_a.is_blocked() || p.w.scale.is_blocked();
  const TiledKernel kernel = end == GroupedEnd::kGateUp
                                 ? tiled_kernel<true>(p, block_scaled, tile)
                                 : tiled_kernel<false>(p, block_scaled, tile);
  if (kernel == nullptr) return "no kernel was built for this config; report a defect";
  const GroupedOrder order = {(p.n + config.block_n - 1) / config.block_n, p.split_k, config.xcds,
                              config.walked()};
  const Launch launch{dim3(static_cast<unsigned>(most_tiles * order.tiles_n * p.split_k)),
                      kMoeTiles[tile].threads(), stream, kMoeTiles[tile].lds_bytes()};
  return launch_kernel(kernel, launch, p, order);
}

}  // namespace
}  // namespace cdna

// ---- What moe/config.h and moe/gpu/product.h ask of a backend -----------------------------------

Status choose_config(const MoeShape& shape, MoeConfig& config) {
  cdna::Target target;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  config = cdna::choose_config(shape, target);
  return nullptr;
}

Status check_config(const MoeShape& shape, const MoeConfig& config) {
  cdna::Target target;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  return cdna::check_config(shape, config, target);
}

Status visit_configs(const MoeShape& shape, void (*visit)(const MoeConfig& config, void* state),
                     void* state) {
  cdna::Target target;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  cdna::for_each_config(shape, target, [&](const MoeConfig& config) { visit(config, state); });
  return nullptr;
}

Status launch_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, const DeviceFacts& facts, Stream stream) {
  if (config.design == MoeConfig::Design::kTiled) {
    return cdna::launch_tiled(end, p, config, most_tiles, stream);
  }
  return launch_plain_grouped(end, p, most_tiles, facts, stream);
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
