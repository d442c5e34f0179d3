// Which config serves attention on an NVIDIA GPU: a pure function of sizes and device. No CUDA
// header.
#pragma once

#include "../../blocks/product/choice.h"
#include "../gpu/shape.h"
#include "time_model.h"

namespace rocm_kernels {
namespace cuda {

// The rows of decode's largest tile for the heads. More would be several blocks', each of which
// reads the keys: where prefill serves them, decode was the quicker in no call that was measured.
inline int64_t most_decode_rows(const AttentionArgs& args) {
  int32_t rows = 32;
  while (rows > 8 && find_decode_tile(args, rows) < 0) rows /= 2;
  return rows;
}

// Calls visit(config) for the configs that can serve args and are worth a try.
template <typename Visit>
void for_each_config(const AttentionArgs& args, const AttentionDevice& device, const Visit& visit) {
  const int64_t rows = rows_of_kv_head(args);
  bool any = false;
  for (const auto design :
       {AttentionConfig::Design::kPrefill, AttentionConfig::Design::kGathered}) {
    if (design == AttentionConfig::Design::kGathered && gathered_bytes(args) > kMostGatheredBytes) {
      break;
    }
    for (const int32_t block_rows : {64, 128, 192}) {
      if (rows <= block_rows - 64) continue;
      for (int32_t outer = 1; outer <= 32; outer *= 2) {
        AttentionConfig c;
        c.design = design;
        c.rows = block_rows;
        c.outer = outer;
        if (check_config(args, c, device) == nullptr) any = true, visit(c);
      }
    }
  }
  for (const int32_t block_rows : {8, 16, 32}) {
    if (any && rows > most_decode_rows(args)) break;
    // The fewest rows that hold all, or the most that there are, and that the device has room for.
    const bool holds = block_rows >= rows;
    AttentionConfig more;
    more.design = AttentionConfig::Design::kDecode;
    more.rows = 2 * block_rows;
    if (!holds && more.rows <= 32 && check_config(args, more, device) == nullptr) continue;
    for (int32_t cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
      for (int32_t outer = 1; outer <= 32; outer *= 2) {
        AttentionConfig c;
        c.design = AttentionConfig::Design::kDecode;
        c.rows = block_rows;
        c.cluster = cluster;
        c.outer = outer;
        if (check_config(args, c, device) == nullptr) visit(c);
      }
    }
    if (holds) break;
  }
  visit(AttentionConfig{});
}

inline AttentionConfig choose_config(const AttentionArgs& args, const AttentionDevice& device) {
  Quickest<AttentionConfig> quickest;
  for_each_config(args, device, [&](const AttentionConfig& c) {
    quickest.offer(c, modelled_time(args, c, device));
  });
  return quickest.config();
}

// choose_config(), which weighs some 40 configs, kept by all that it depends on.
inline AttentionConfig cached_choice(const AttentionArgs& args, const AttentionDevice& device) {
  const int32_t alignment = has_aligned_heads(args) + 2 * has_vector_heads(args);
  return kept_choice<AttentionConfig>(kAttentionShapeFields, AttentionShape::of(args, alignment),
                                      device.id, [&] { return choose_config(args, device); });
}

}  // namespace cuda
}  // namespace rocm_kernels
