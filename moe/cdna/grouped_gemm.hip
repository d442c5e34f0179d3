// Grouped products for AMD GPUs: the kernels, the choice of a config, the launches.
#include "../../gemm/cdna/target.h"
#include "../gpu/grouped_gemm.h"
#include "../gpu/plain.h"
#include "../gpu/route_kernels.h"
#include "choose.h"
#include "streamed.h"
#include "tiled.h"

namespace rocm_kernels {
namespace cdna {
namespace {

// ---- The kernels that exist -------------------------------------------------------------------

using Kernel = void (*)(GroupedProblem, GroupedOrder);

template <MmaKind kKind, bool kBlockScales, bool kFp4, bool kGateUp, size_t kTile = 0>
Kernel tiled_kernel(size_t tile) {
  if constexpr (kTile == kMoeTileCount) {
    return nullptr;
  } else {
    return tile == kTile ? moe_tiled<kKind, kTile, kBlockScales, kFp4, kGateUp>
                         : tiled_kernel<kKind, kBlockScales, kFp4, kGateUp, kTile + 1>(tile);
  }
}

template <MmaKind kKind, bool kBlockScales, bool kFp4, bool kGateUp>
Kernel kernel_of(const MoeConfig& config) {
  if (config.design == MoeConfig::Design::kTiled) {
    return tiled_kernel<kKind, kBlockScales, kFp4, kGateUp>(
        find_moe_tile(config.block_m, config.block_n));
  }
  if constexpr (kFp4) {
    return nullptr;
  } else {
    return config.block_m == 16 ? moe_streamed<kKind, 16, kBlockScales, kGateUp>
                                : moe_streamed<kKind, 32, kBlockScales, kGateUp>;
  }
}

template <bool kGateUp>
Kernel kernel_of(const GroupedProblem& p, const MoeConfig& config) {
  const bool block_scaled = p.scale_a.is_blocked() || p.w.scale.is_blocked();
  if (is_fp8(p.a_dtype)) {
    return block_scaled ? kernel_of<MmaKind::kFp8, true, false, kGateUp>(config)
                        : kernel_of<MmaKind::kFp8, false, false, kGateUp>(config);
  }
  if (p.a_dtype == DType::kFloat16) {
    return kernel_of<MmaKind::kFloat16, false, false, kGateUp>(config);
  }
  if (is_fp8(p.w.dtype)) {
    return block_scaled ? kernel_of<MmaKind::kBFloat16Fp8, true, false, kGateUp>(config)
                        : kernel_of<MmaKind::kBFloat16Fp8, false, false, kGateUp>(config);
  }
  return p.w.dtype == DType::kFloat4E2M1x2
             ? kernel_of<MmaKind::kBFloat16, false, true, kGateUp>(config)
             : kernel_of<MmaKind::kBFloat16, false, false, kGateUp>(config);
}

MmaKind mma_kind_of(const GroupedProblem& p) {
  if (is_fp8(p.a_dtype)) return MmaKind::kFp8;
  if (p.a_dtype == DType::kFloat16) return MmaKind::kFloat16;
  return is_fp8(p.w.dtype) ? MmaKind::kBFloat16Fp8 : MmaKind::kBFloat16;
}

Status launch_grouped(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, Stream stream) {
  const Kernel kernel =
      end == GroupedEnd::kGateUp ? kernel_of<true>(p, config) : kernel_of<false>(p, config);
  if (kernel == nullptr) return "no kernel was built for this config; report a defect";
  const GroupedOrder order = {(p.n + config.block_n - 1) / config.block_n, p.split_k, config.xcds,
                              config.walked()};
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(most_tiles * order.tiles_n * p.split_k));
  launch.stream = stream;
  if (config.design == MoeConfig::Design::kTiled) {
    const GemmTile& tile = kMoeTiles[find_moe_tile(config.block_m, config.block_n)];
    launch.block = tile.threads();
    launch.shared_bytes = tile.lds_bytes();
  } else {
    launch.block = kStreamedWaves * 64;
    launch.shared_bytes = streamed_lds_bytes(mma_kind_of(p), config.block_m);
  }
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
                      int64_t most_tiles, const SlotIds&, const DeviceFacts& facts, Stream stream) {
  if (config.design == MoeConfig::Design::kPlain) {
    return launch_plain_grouped(end, p, most_tiles, facts, stream);
  }
  return cdna::launch_grouped(end, p, config, most_tiles, stream);
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
