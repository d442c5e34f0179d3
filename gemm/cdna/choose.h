// Which config of gemm serves a shape on a device, and which are worth timing: pure functions.
#pragma once

#include "../../blocks/product/choice.h"
#include "../../skinny_gemm/cdna/choose.h"
#include "../gemm.h"
#include "time_model.h"

namespace rocm_kernels::cdna {

using Config = std::variant<GemmConfig, skinny::SkinnyGemmConfig>;

// Calls visit(config) for the tiled configs that can serve the shape and are worth a try.
template <typename Visit>
void for_each_tiled_config(const GemmShape& shape, const Target& target, const Visit& visit) {
  GemmConfig candidate;
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
    candidate.split_k = kStreamKSplit;
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

// The two time models are apart by some percent where memory bounds both kinds: tiles are taken for
// few rows where they are thought this much quicker.
constexpr float kTilesMargin = 1.05f;

// The tiles of the least modelled time.
inline GemmConfig choose_tiles(const GemmShape& shape, const Target& target) {
  GemmConfig best;
  best.design = GemmConfig::Design::kPlain;  // beyond 2^31 lines of K even in the largest tiles
  if (!target.matrix_instructions) return best;
  Quickest<GemmConfig> quickest(best);
  for_each_tiled_config(shape, target, [&](const GemmConfig& config) {
    quickest.offer(config, modelled_time(shape, config, target).total());
  });
  return quickest.config();
}

// Chooses by modelled time.
inline Config choose_config(const GemmShape& shape, const Target& target) {
  GemmShape judged = shape;
  judged.m = static_cast<int32_t>(judged_rows(shape.m));
  const GemmConfig tiles = choose_tiles(judged, target);
  if (shape.m > kSkinnyGemmMaxRows || !target.matrix_instructions) return tiles;
  const skinny::SkinnyGemmConfig few_rows = skinny::choose_config(judged, target);
  const float few_rows_time = skinny::modelled_time(judged, few_rows, target).total();
  if (tiles.design == GemmConfig::Design::kPlain) return few_rows;
  const float tiles_time = modelled_time(judged, tiles, target).total();
  return tiles_time * kTilesMargin < few_rows_time ? Config(tiles) : Config(few_rows);
}

// choose_config() weighs some 100 configs in 7 us of a host thread.
inline Config cached_choice(const GemmShape& shape, const Target& target) {
  return kept_choice<Config>(kGemmShapeFields, shape, target.id,
                             [&] { return choose_config(shape, target); });
}

// Calls visit(config) for every config that is worth timing. A tile has 64 rows or more.
template <typename Visit>
void for_each_config(const GemmShape& shape, const Target& target, const Visit& visit) {
  if (!target.matrix_instructions) return visit(choose_config(shape, target));
  if (shape.m <= kSkinnyGemmMaxRows) {
    skinny::for_each_config(shape, target, [&](const auto& config) { visit(Config(config)); });
  }
  if (shape.m > 16) {
    for_each_tiled_config(shape, target, [&](const auto& config) { visit(Config(config)); });
  }
}

}  // namespace rocm_kernels::cdna
