// Which config serves the mixture-of-experts ops on an AMD GPU, and which are worth timing: pure
// functions of the shape and the device; no table of shapes.
#pragma once

#include <algorithm>
#include <cmath>

#include "time_model.h"

namespace rocm_kernels::cdna::moe {

// Calls visit(config) for the configs that can serve the shape and are worth a try.
template <typename Visit>
void for_each_config(const MoeShape& s, const Target& target, const Visit& visit) {
  if (check_operands(s, target) != nullptr) return visit(MoeConfig{});
  const auto consider = [&](MoeConfig::Design design, int32_t block_m, int32_t block_n) {
    MoeConfig c;
    c.design = design;
    c.block_m = block_m;
    c.block_n = block_n;
    c.xcds = target.xcds;
    // Tiles of one expert's rows meet each of its weights together. Where the rows of all experts
    // fit an XCD's L2, so may all tiles of rows.
    constexpr int64_t kL2Bytes = int64_t{4} << 20;
    c.order = s.rows * int64_t{s.k} * size_of(s.a()) <= kL2Bytes ? MoeConfig::kColumn
                                                                 : MoeConfig::kGrouped;
    c.group_m = std::max(1, static_cast<int32_t>(std::ceil(s.rows / touched_experts(s) / block_m)));
    // Weights that one tile of rows meets are shared by none: workgroups know theirs at once.
    if (design == MoeConfig::Design::kStreamed && c.group_m == 1) {
      c.order = MoeConfig::kRow;
      c.xcds = 1;
    }
    for (const int32_t split_k : {1, 2, 4, 8}) {
      c.split_k = split_k;
      if (check_config(s, c, target) == nullptr) visit(c);
    }
  };
  for (const GemmTile& tile : kMoeTiles) {
    consider(MoeConfig::Design::kTiled, tile.block_m, tile.block_n);
  }
  for (const StreamedTileShape& tile : kStreamedTiles) {
    consider(MoeConfig::Design::kStreamed, tile.block_m, tile.block_n);
  }
}

inline MoeConfig choose_config(const MoeShape& s, const Target& target) {
  Quickest<MoeConfig> quickest;
  for_each_config(s, target, [&](const MoeConfig& config) {
    if (config.design == MoeConfig::Design::kPlain) return;
    quickest.offer(config, modelled_time(s, config, target));
  });
  return quickest.config();
}

}  // namespace rocm_kernels::cdna::moe
