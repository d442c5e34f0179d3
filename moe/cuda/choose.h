// Which config serves the mixture-of-experts ops on an NVIDIA GPU, and which are worth timing: pure
// functions of the shape and the device; no table of shapes.
#pragma once

#include <algorithm>
#include <cmath>

#include "time_model.h"

namespace rocm_kernels {
namespace cuda::moe {

constexpr int64_t kL2Bytes = int64_t{32} << 20;  // that tiles may count on
// Of them, for an expert's rows while its weights go by. Measured up to 18 MB.
constexpr int64_t kRowsInL2Bytes = int64_t{16} << 20;

// Calls visit(config) for the configs that can serve the shape and are worth a try.
template <typename Visit>
void for_each_config(const MoeShape& s, const MoeDevice& device, const Visit& visit) {
  const auto consider = [&](MoeConfig::Design design, int32_t block_m, int32_t block_n) {
    MoeConfig c;
    c.design = design;
    c.block_m = block_m;
    c.block_n = block_n;
    // Tiles of one expert's rows meet each of its weights together.
    if (design == MoeConfig::Design::kWarpgroup) {
      const int64_t tile_bytes = int64_t{block_m} * longest_k(s) * size_of(s.a());
      c.order = MoeConfig::kExpert;
      c.group_m = static_cast<int32_t>(std::max<int64_t>(1, kRowsInL2Bytes / tile_bytes));
    } else {
      // Where the rows of all experts fit L2, so may all tiles of rows.
      c.order = s.rows * int64_t{s.k} * size_of(s.a()) <= kL2Bytes ? MoeConfig::kColumn
                                                                   : MoeConfig::kGrouped;
      c.group_m =
          std::max(1, static_cast<int32_t>(std::ceil(s.rows / touched_experts(s) / block_m)));
    }
    for (const int32_t split_k : {1, 2, 4, 8}) {
      c.split_k = split_k;
      if (check_config(s, c, device) == nullptr) visit(c);
    }
  };
  for (const int32_t block_m : {8, 16, 32}) {
    for (const int32_t block_n : {32, 64}) {
      consider(MoeConfig::Design::kStreamed, block_m, block_n);
    }
    consider(MoeConfig::Design::kStreamedWgmma, block_m, kStreamedWgmmaN);
  }
  consider(MoeConfig::Design::kResident, kResidentBlockM, kResidentBlockN);
  for (const MoeWarpgroupTile& tile : kMoeWarpgroupTiles) {
    consider(MoeConfig::Design::kWarpgroup, tile.block_m, tile.block_n);
  }
  for (const MoeTile& tile : kMoeTiles) {
    consider(MoeConfig::Design::kTiled, tile.block_m, tile.block_n);
  }
  visit(MoeConfig{});
}

// Whether the tile has too few rows where routing is not as even as the model takes it for. With
// more slots than experts 16 rows take at most 1.3 % longer than 8, and up to a third less where
// few experts get all tokens (measured). An expert has no more rows than there are tokens.
inline bool suits_even_routing_alone(const MoeShape& s, const MoeConfig& c) {
  return c.design == MoeConfig::Design::kStreamedWgmma && c.block_m == 8 && s.tokens > c.block_m &&
         s.rows > s.experts;
}

inline MoeConfig choose_config(const MoeShape& s, const MoeDevice& device) {
  Quickest<MoeConfig> quickest;
  for_each_config(s, device, [&](const MoeConfig& config) {
    if (config.design == MoeConfig::Design::kPlain) return;
    // Measured: never behind.
    if (config.design == MoeConfig::Design::kStreamed && streams_to_wgmma(s, device)) return;
    if (suits_even_routing_alone(s, config)) return;
    quickest.offer(config, modelled_time(s, config, device));
  });
  return quickest.config();
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
