// Which config serves a product on an NVIDIA GPU, and which are worth timing: pure functions. How
// near the picks are to the best: docs/kernels/gemm.md.
#pragma once

#include <algorithm>

#include "../../blocks/product/choice.h"
#include "../../skinny_gemm/cuda/choose.h"
#include "../gemm.h"
#include "time_model.h"

namespace rocm_kernels {
namespace cuda {

// Calls visit(config) for every config of the warpgroup kernel that the model weighs.
template <class Visit>
void for_each_warpgroup_config(const GemmArgs& args, const GemmDevice& device, const Visit& visit) {
  const TileKind kind = tile_kind_of(args);
  const GemmTiles all = tiles_of(kind);
  const int chunks = static_cast<int>(ceil_div(args.k * size_of(args.a_dtype), kChunkBytes));
  for (size_t i = 0; i < all.count; ++i) {
    const GemmTile& tile = all.tiles[i];
    if (!is_compiled(kind, args.out_dtype, tile)) continue;
    // Tiles that are mostly beyond the matrix are not worth a look.
    if (tile.block_m > 32 && args.m * 4 <= tile.block_m) continue;
    GemmConfig c;
    c.design = GemmConfig::Design::kWarpgroup;
    c.block_m = tile.block_m;
    c.block_n = tile.block_n;
    c.swap_ab = tile.swap_ab;
    for (const int cluster : {0, 1, 2}) {
      c.cluster_m = cluster == 1 ? 2 : 1;
      c.cluster_n = cluster == 2 ? 2 : 1;
      if ((c.cluster_m == 2 && (args.m <= c.block_m || is_widened(args))) ||
          (c.cluster_n == 2 && args.n <= c.block_n)) {
        continue;
      }
      constexpr int64_t kInFlight = 200 << 10;
      const int64_t stage_bytes = int64_t{c.block_m + c.block_n} * kChunkBytes;
      c.num_stages = 0;
      const int64_t left =
          device.shared_bytes_per_block - kStaticBytes - warpgroup_shared_bytes(args, c);
      c.num_stages =
          is_widened(args)
              ? widened_stages(c.block_m, c.block_n, narrow_row_bytes(args.a_dtype, args.w_dtype),
                               warpgroup_shared_bytes(args, c), device.shared_bytes_per_block)
                    .wide
              : static_cast<int>(
                    std::min<int64_t>(std::min(kInFlight, left) / stage_bytes, kMaxStages));
      if (c.num_stages < 2) continue;
      const int64_t count_tiles =
          ceil_div(args.m, c.block_m * c.cluster_m) * ceil_div(args.n, c.block_n * c.cluster_n);
      const int workers = device.sm_count / (c.cluster_m * c.cluster_n);
      if (count_tiles > INT32_MAX) continue;
      c.schedule = GemmConfig::kDataParallel;
      c.split_k = 1;
      visit(c);
      // Splits that fill the workers once, or nearly; each part at least four chunks.
      const int most = static_cast<int>(
          std::min<int64_t>({workers / count_tiles, chunks / 4, kMaxContributors}));
      c.schedule = GemmConfig::kSplitK;
      for (c.split_k = std::max(2, most - 1); c.split_k <= most; ++c.split_k) visit(c);
      if (most >= 4) c.split_k = most / 2, visit(c);
      c.split_k = 1;
      c.schedule = GemmConfig::kHybrid;
      if (count_tiles % workers != 0 && count_tiles > workers / 4 && chunks >= 8 &&
          count_tiles < int64_t{workers} * 64) {
        visit(c);
      }
    }
  }
}

// Data-parallel unless sharing sums is thought to be that much quicker: the model errs by some
// percent, and with it the pick is seldomer slower than data-parallel
// (docs/kernels/gemm_journal.md, "A margin for sharing").
constexpr double kSharedMargin = 1.03;

// The tiles of the least modelled time, by the M of the class: a class of few rows has as many
// tiles for each M, so that the work is cut alike.
inline GemmConfig choose_tiles(GemmArgs args, const GemmDevice& device) {
  GemmConfig best;
  if (needs_plain(args)) return best;
  best.design = GemmConfig::Design::kMma;
  if (!fits_warpgroup(args, device)) return best;
  args.m = judged_rows(args.m);
  Quickest<GemmConfig> quickest(best);
  for_each_warpgroup_config(args, device, [&](const GemmConfig& c) {
    const double margin = c.schedule == GemmConfig::kDataParallel ? 1 : kSharedMargin;
    quickest.offer(c, modelled_time(args, c, device) * margin);
  });
  return quickest.config();
}

using Config = std::variant<GemmConfig, skinny::SkinnyGemmConfig>;

inline Config choose_config(const GemmArgs& args, const GemmDevice& device) {
  if (skinny::serves(args) && args.m <= skinny::quickest_rows(args, fits_warpgroup(args, device))) {
    return skinny::choose_config(args, device);
  }
  // Rows that are not aligned: mma.cuh makes 128 rows of a whatever there are.
  if (args.m <= 16 && !skinny::serves(args)) return GemmConfig{};
  return choose_tiles(args, device);
}

// What choose_config() depends on.
struct GemmShape {
  int32_t m, n, k;
  int32_t a_dtype, w_dtype, out_dtype;
  int32_t block_scaled, fits_warpgroup, serves_few, chunks;  // 0 or 1
};
constexpr ConfigField<GemmShape> kGemmShapeFields[] = {
    {"m", &GemmShape::m},
    {"n", &GemmShape::n},
    {"k", &GemmShape::k},
    {"a_dtype", &GemmShape::a_dtype},
    {"w_dtype", &GemmShape::w_dtype},
    {"out_dtype", &GemmShape::out_dtype},
    {"block_scaled", &GemmShape::block_scaled},
    {"fits_warpgroup", &GemmShape::fits_warpgroup},
    {"serves_few", &GemmShape::serves_few},
    {"chunks", &GemmShape::chunks},
};

// choose_config() weighs some 200 configs in 7 us of a host thread, and a call asks twice.
inline Config cached_choice(const GemmArgs& args, const GemmDevice& device) {
  const GemmShape shape = {static_cast<int32_t>(args.m),
                           static_cast<int32_t>(args.n),
                           static_cast<int32_t>(args.k),
                           static_cast<int32_t>(args.a_dtype),
                           static_cast<int32_t>(args.w_dtype),
                           static_cast<int32_t>(args.out_dtype),
                           is_block_scaled(args),
                           fits_warpgroup(args, device),
                           skinny::serves(args),
                           skinny::alignment_of(args).chunks};
  return kept_choice<Config>(kGemmShapeFields, shape, device.id,
                             [&] { return choose_config(args, device); });
}

// Calls visit(config) for every config that is worth timing.
template <class Visit>
void for_each_config(const GemmArgs& args, const GemmDevice& device, const Visit& visit) {
  if (skinny::serves(args))
    skinny::for_each_config(args, device, [&](const auto& c) { visit(Config(c)); });
  if (!needs_plain(args) && fits_warpgroup(args, device)) {
    for_each_warpgroup_config(args, device, [&](const GemmConfig& c) { visit(Config(c)); });
  }
  for (const auto design : {GemmConfig::Design::kMma, GemmConfig::Design::kPlain}) {
    GemmConfig c;
    c.design = design;
    if (check_config(args, c, device) == nullptr) visit(Config(c));
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
