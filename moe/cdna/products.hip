// Grouped products for AMD GPUs: the kernels, the choice of a config, the launches.
#include "../../blocks/product/cdna/target.h"
#include "../gpu/plain.h"
#include "../gpu/route_kernels.h"
#include "choose.h"
#include "launches.h"
#include "streamed.h"
#include "tiled.h"

namespace rocm_kernels {
namespace cdna::moe {
namespace {

// ---- The kernels that exist -------------------------------------------------------------------

using TiledKernel = void (*)(GroupedProblem, GroupedOrder);
using StreamedKernel = void (*)(GroupedProblem, StreamedWork);
struct Kernels {
  TiledKernel tiled;
  StreamedKernel streamed;
};

template <MmaKind kKind, bool kBlockScales, bool kFp4, bool kGateUp, size_t kTile = 0>
TiledKernel tiled_kernel(size_t tile) {
  if constexpr (kTile == kMoeTileCount) {
    return nullptr;
  } else {
    return tile == kTile ? moe_tiled<kKind, kTile, kBlockScales, kFp4, kGateUp>
                         : tiled_kernel<kKind, kBlockScales, kFp4, kGateUp, kTile + 1>(tile);
  }
}

template <MmaKind kKind, bool kBlockScales, bool kFp4, bool kGateUp, size_t kTile = 0>
StreamedKernel streamed_kernel(const MoeConfig& config) {
  if constexpr (kTile == kStreamedTileCount) {
    return nullptr;
  } else {
    constexpr StreamedTileShape kIs = kStreamedTiles[kTile];
    if constexpr (kFp4 ? kIs.fp4 : kIs.others) {
      if (config.block_m == kIs.block_m && config.block_n == kIs.block_n) {
        return moe_streamed<kKind, kIs.block_m, kIs.block_n, kBlockScales, kFp4, kGateUp>;
      }
    }
    return streamed_kernel<kKind, kBlockScales, kFp4, kGateUp, kTile + 1>(config);
  }
}

template <MmaKind kKind, bool kBlockScales, bool kFp4, bool kGateUp>
Kernels kernels_of(const MoeConfig& config) {
  if (config.design == MoeConfig::Design::kTiled) {
    const auto tile = static_cast<size_t>(find_moe_tile(config.block_m, config.block_n));
    return {tiled_kernel<kKind, kBlockScales, kFp4, kGateUp>(tile), nullptr};
  }
  return {nullptr, streamed_kernel<kKind, kBlockScales, kFp4, kGateUp>(config)};
}

template <bool kGateUp>
Kernels kernels_of(const GroupedProblem& p, const MoeConfig& config) {
  const bool block_scaled = p.scale_a.is_blocked() || p.w.scale.is_blocked();
  if (is_fp8(p.a_dtype)) {
    return block_scaled ? kernels_of<MmaKind::kFp8, true, false, kGateUp>(config)
                        : kernels_of<MmaKind::kFp8, false, false, kGateUp>(config);
  }
  if (p.a_dtype == DType::kFloat16) {
    return kernels_of<MmaKind::kFloat16, false, false, kGateUp>(config);
  }
  if (is_fp8(p.w.dtype)) {
    return block_scaled ? kernels_of<MmaKind::kBFloat16Fp8, true, false, kGateUp>(config)
                        : kernels_of<MmaKind::kBFloat16Fp8, false, false, kGateUp>(config);
  }
  return p.w.dtype == DType::kFloat4E2M1x2
             ? kernels_of<MmaKind::kBFloat16, false, true, kGateUp>(config)
             : kernels_of<MmaKind::kBFloat16, false, false, kGateUp>(config);
}

MmaKind mma_kind_of(const GroupedProblem& p) {
  if (is_fp8(p.a_dtype)) return MmaKind::kFp8;
  if (p.a_dtype == DType::kFloat16) return MmaKind::kFloat16;
  return is_fp8(p.w.dtype) ? MmaKind::kBFloat16Fp8 : MmaKind::kBFloat16;
}

// The streamed design's launch, but for the stream.
Launch streamed_launch(const GroupedProblem& p, const MoeConfig& config, int64_t most_tiles,
                       const SlotIds& slots, StreamedWork& work) {
  const int32_t k_block = streamed_k_block(p.w.dtype == DType::kFloat4E2M1x2);
  work.parts = EvenSplit::of((p.k + k_block - 1) / k_block, p.split_k);
  work.waves = streamed_waves(work.parts.length);
  work.log2_waves = work.waves / 2;
  constexpr int64_t kMostZ = 65535;
  Launch launch;
  launch.block = work.waves * 64;
  launch.shared_bytes =
      streamed_lds_bytes(mma_kind_of(p), config.block_m, config.block_n, work.waves);
  if (p.tiles == nullptr) {
    work.ids = slots.ids, work.slots = slots.slots, work.experts = slots.experts;
  }
  work.by_grid =
      p.tiles == nullptr || (config.walked() == 1 && config.xcds == 1 && most_tiles <= kMostZ);
  const int64_t parts = int64_t{work.order.tiles_n} * p.split_k;
  launch.grid = work.by_grid
                    ? dim3(static_cast<unsigned>(work.order.tiles_n),
                           static_cast<unsigned>(p.split_k), static_cast<unsigned>(most_tiles))
                    : dim3(static_cast<unsigned>(most_tiles * parts));
  return launch;
}

Status launch_grouped(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, const SlotIds& slots, Stream stream) {
  const Kernels kernels =
      end == GroupedEnd::kGateUp ? kernels_of<true>(p, config) : kernels_of<false>(p, config);
  const GroupedOrder order = {(p.n + config.block_n - 1) / config.block_n, p.split_k, config.xcds,
                              config.walked()};
  if (kernels.streamed != nullptr) {
    StreamedWork work = {};
    work.order = order;
    Launch launch = streamed_launch(p, config, most_tiles, slots, work);
    launch.stream = stream;
    return launch_kernel(kernels.streamed, launch, p, work);
  }
  if (kernels.tiled == nullptr) return "no kernel was built for this config; report a defect";
  const GemmTile& tile = kMoeTiles[find_moe_tile(config.block_m, config.block_n)];
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(most_tiles * order.tiles_n * p.split_k));
  launch.block = tile.threads();
  launch.shared_bytes = tile.lds_bytes();
  launch.stream = stream;
  return launch_kernel(kernels.tiled, launch, p, order);
}

}  // namespace

// ---- What moe/config.h and moe/gpu/product.h ask of a backend -----------------------------------

Status choose_config(const MoeShape& shape, MoeConfig& config) {
  Target target;
  if (!current_target(target)) return kNoDevice;
  config = kept_choice<MoeConfig>(kMoeShapeFields, shape, target.id,
                                  [&] { return choose_config(shape, target); });
  return nullptr;
}

Status check_config(const MoeShape& shape, const MoeConfig& config) {
  Target target;
  if (!current_target(target)) return kNoDevice;
  return check_config(shape, config, target);
}

Status visit_configs(const MoeShape& shape, void (*visit)(const MoeConfig& config, void* state),
                     void* state) {
  Target target;
  if (!current_target(target)) return kNoDevice;
  for_each_config(shape, target, [&](const MoeConfig& config) { visit(config, state); });
  return nullptr;
}

Status launch_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig& config,
                      int64_t most_tiles, const SlotIds& slots, const DeviceFacts& facts,
                      Stream stream) {
  if (config.design == MoeConfig::Design::kPlain) {
    return launch_plain_grouped(end, p, most_tiles, facts, stream);
  }
  return launch_grouped(end, p, config, most_tiles, slots, stream);
}

}  // namespace cdna::moe

Status launch_routing(const RoutingProblem& p, const DeviceFacts& facts, Stream stream) {
  return launch_routing_kernels(p, facts, stream);
}

}  // namespace rocm_kernels
