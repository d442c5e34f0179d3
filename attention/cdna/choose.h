// Which config serves attention on an AMD GPU: a pure function of sizes and device. No HIP header.
#pragma once

#include "../../blocks/product/choice.h"
#include "../gpu/shape.h"
#include "time_model.h"

namespace rocm_kernels::cdna {

// Calls visit(config) for the configs that can serve args and are worth a try.
template <typename Visit>
void for_each_config(const AttentionArgs& args, const Target& target, const Visit& visit) {
  const int64_t rows = rows_of_kv_head(args);
  for (const int32_t block_rows : {16, 32}) {
    // The fewest rows that hold all, or the most.
    const bool holds = block_rows >= rows;
    if (!holds && block_rows == 16 && find_decode_tile(args, 32) >= 0) continue;
    for (int32_t parts = 1; parts <= 128; parts += parts < 16 ? 1 : parts / 8) {
      AttentionConfig c;
      c.design = AttentionConfig::Design::kDecode;
      c.rows = block_rows;
      c.parts = parts;
      if (check_config(args, c, target) == nullptr) visit(c);
    }
    if (holds) break;
  }
  for (const PrefillTile& tile : kPrefillTiles) {
    AttentionConfig c;
    c.design = AttentionConfig::Design::kPrefill;
    c.rows = tile.rows();
    c.xcds = args.batch * args.kv_heads % target.xcds == 0 ? target.xcds : 1;
    c.heavy_first = 1;
    if (tile.chain_in_lds || check_config(args, c, target) != nullptr) continue;
    // Tiles for heads of other sizes have as many rows.
    if (&kPrefillTiles[find_prefill_tile(args, c)] == &tile) visit(c);
  }
  visit(AttentionConfig{});
}

inline AttentionConfig choose_config(const AttentionArgs& args, const Target& target) {
  Quickest<AttentionConfig> quickest;
  for_each_config(args, target, [&](const AttentionConfig& c) {
    quickest.offer(c, modelled_time(args, c, target));
  });
  return quickest.config();
}

// choose_config(), which weighs some 60 configs, kept by all that it depends on.
inline AttentionConfig cached_choice(const AttentionArgs& args, const Target& target) {
  return kept_choice<AttentionConfig>(kAttentionShapeFields, AttentionShape::of(args, 0), target.id,
                                      [&] { return choose_config(args, target); });
}

}  // namespace rocm_kernels::cdna
