// Which config of gemm serves a shape on a device, and which are worth timing: pure functions.
#pragma once

#include "time_model.h"

namespace rocm_kernels::cdna {

// Calls visit(config) for the configs that can serve the shape and are worth a try.
template <typename Visit>
void for_each_gemm_config(const GemmShape& shape, const Target& target, const Visit& visit) {
  GemmConfig candidate;
  if (!target.matrix_instructions) {
    candidate.design = GemmConfig::Design::kPortable;
    return visit(candidate);
  }
  for (const GemmTile& tile : kGemmTiles) {
    candidate = GemmConfig{};
    candidate.block_m = tile.block_m;
    candidate.block_n = tile.block_n;
    const int32_t at_once = workgroups_at_once(tile, target);
    // The workgroups that an XCD runs at once, as near to a square of rows as tiles allow: they
    // then read the fewest rows of both operands.
    const float together = static_cast<float>(target.compute_units) / target.xcds * at_once;
    const float group = std::sqrt(together * tile.block_n / tile.block_m);
    candidate.group_m = std::max(1, static_cast<int32_t>(group + 0.5f));
    const TileOrder order = order_of(shape, candidate);
    if (int64_t{order.tiles_m} * order.tiles_n >= int64_t{1} << 30) continue;
    const int32_t tiles = order.tiles_m * order.tiles_n;
    const auto consider = [&](GemmConfig config, int32_t workgroups) {
      config.xcds = std::min(workgroups, target.xcds);
      if (check_config(shape, config) == nullptr) visit(config);
    };
    for (int32_t split_k = 1; split_k <= 16 && split_k * tiles <= 8 * target.compute_units + tiles;
         ++split_k) {
      candidate.split_k = split_k;
      consider(candidate, split_k * tiles);
    }
    // Stream-K: as many workgroups as run at once; all of the work divided, or only what is left
    // after one round less than would fit, so that the part divided is never small.
    candidate.split_k = 0;
    for (int32_t each = 1; each <= at_once; ++each) {
      candidate.workgroups = each * target.compute_units;
      const int32_t rounds = tiles / candidate.workgroups;
      candidate.whole_rounds = 0;
      consider(candidate, candidate.workgroups);
      if (rounds >= 2) {
        candidate.whole_rounds = rounds - 1;
        consider(candidate, candidate.workgroups);
      }
    }
  }
}

// Chooses by modelled time.
inline GemmConfig choose_config(const GemmShape& shape, const Target& target) {
  GemmConfig best;
  best.design = GemmConfig::Design::kPortable;  // beyond 2^31 lines of K even in the largest tiles
  float best_time = 0;
  for_each_gemm_config(shape, target, [&](const GemmConfig& config) {
    if (config.design == GemmConfig::Design::kPortable) return;
    const float time = modelled_time(shape, config, target).total();
    if (best_time == 0 || time < best_time) best = config, best_time = time;
  });
  return best;
}

inline GemmConfig cached_choice(const GemmShape& shape, const Target& target) {
  return kept_choice<GemmConfig>(kGemmShapeFields, shape, target.id,
                                 [&] { return choose_config(shape, target); });
}

}  // namespace rocm_kernels::cdna
