// How long a config of attention would take on an AMD GPU. It ranks configs; it is not a
// measurement: published rates and latencies, and what the simulator's cycle model says.
#pragma once

#include <cmath>

#include "config.h"

namespace rocm_kernels::cdna {

// Microseconds.
inline float modelled_prefill_time(const AttentionArgs& args, const AttentionConfig& c,
                                   const Target& target) {
  constexpr float kLaunchUs = 6.0f;
  // Of the matrix instructions' peak: two workgroups of a compute unit, one alone, and what remains
  // of either where two row tiles of a wave share an operand, not three or four.
  constexpr float kRate = 0.5f, kAlone = 0.6f, kFewRows = 0.9f;
  const PrefillTile& tile = kPrefillTiles[find_prefill_tile(args, c)];
  const float keys = static_cast<float>(
      std::min(args.max_seqlen_k, args.window_left >= 0 ? args.window_left + tile.rows() + kStepKeys
                                                        : args.max_seqlen_k));
  const float blocks = static_cast<float>(args.batch * args.kv_heads * row_blocks(args, c));
  const float busiest = std::ceil(blocks / static_cast<float>(target.compute_units));
  float per_us = (target.gfx950 ? 4096.0f : 2048.0f) * target.gigahertz * 1e3f * kRate;
  if (busiest == 1) per_us *= kAlone;
  if (tile.row_tiles == 2) per_us *= kFewRows;
  const float of_block =
      2.0f * static_cast<float>(tile.rows() * (tile.head_dim + tile.head_dim_v)) * keys / per_us;
  // Heavy blocks first and XCDs of their own cost nothing.
  const float order =
      (c.heavy_first ? 0.0f : 0.02f) + (c.xcds > 1 ? 0.0f : 0.02f) + (c.chain == 1 ? 0.1f : 0.0f);
  return kLaunchUs + busiest * of_block * (1 + order);
}

inline float modelled_time(const AttentionArgs& args, const AttentionConfig& c,
                           const Target& target) {
  if (c.design == AttentionConfig::Design::kPlain) return 1e9f;
  if (c.design == AttentionConfig::Design::kPrefill) {
    return modelled_prefill_time(args, c, target);
  }
  constexpr float kLaunchUs = 6.0f;         // launch, first loads, the end
  constexpr float kPartsUs = 2.5f;          // sums written through, ticket, sums read
  constexpr float kEachPartUs = 0.05f;      // its sums read by the last to arrive
  constexpr float kUnitBytesPerUs = 22e3f;  // that a compute unit takes in

  int64_t keys = args.max_seqlen_k;
  if (args.window_left >= 0) {
    keys = std::min(keys, args.window_left + args.max_seqlen_q + kStepKeys);
  }
  const float bytes = static_cast<float>(size_of(args.kv_dtype));
  const float row = static_cast<float>(args.head_dim + args.head_dim_v) * bytes;
  const int64_t steps = (keys + kStepKeys - 1) / kStepKeys;
  const int64_t of_part = (steps + c.parts - 1) / c.parts;  // steps, by whole steps a wave
  const float turns = std::ceil(static_cast<float>(of_part) / kDecodeWaves);
  const float of_block = turns * kDecodeWaves * kStepKeys * row;
  const float blocks = static_cast<float>(decode_items(args, c) * c.parts);
  const float busiest = std::ceil(blocks / static_cast<float>(target.compute_units));
  const float per_us = target.terabytes_per_s * 1e6f;
  return kLaunchUs + (c.parts > 1 ? kPartsUs + kEachPartUs * static_cast<float>(c.parts) : 0) +
         std::max(busiest * of_block / kUnitBytesPerUs, blocks * of_block / per_us);
}

}  // namespace rocm_kernels::cdna
