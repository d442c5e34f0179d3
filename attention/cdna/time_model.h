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
  // Fitted to launches of 143 shapes with different parts, as the simulator's cycle model plays
  // them (docs/kernels/attention_journal.md).
  constexpr float kLaunchUs = 5.7f;         // launch, first loads, the end
  constexpr float kBlockUs = 0.6f;          // of a block that begins where another has ended
  constexpr float kTurnUs = 0.95f;          // a step of each wave, whatever else is read
  constexpr float kPartsUs = 0.7f;          // sums written through, the ticket
  constexpr float kMeetBytesPerUs = 12e3f;  // of the parts' sums, read by the last to arrive
  constexpr float kUnitBytesPerUs = 21e3f;  // that a compute unit takes in

  int64_t keys = args.max_seqlen_k;
  if (args.window_left >= 0) {
    keys = std::min(keys, args.window_left + args.max_seqlen_q + kStepKeys);
  }
  const float bytes = static_cast<float>(size_of(args.kv_dtype));
  const float row = static_cast<float>(args.head_dim + args.head_dim_v) * bytes;
  const int64_t steps = (keys + kStepKeys - 1) / kStepKeys;
  const int64_t parts = std::max<int64_t>(std::min<int64_t>(c.parts, steps), 1);
  const int64_t of_part = (steps + parts - 1) / parts;  // steps
  const float of_block = static_cast<float>(of_part * kStepKeys) * row;
  const float turns = std::ceil(static_cast<float>(of_part) / kDecodeWaves);
  // All compute units share the memory, and those with a block more than others have it alone.
  const int64_t blocks = decode_items(args, c) * parts, units = target.compute_units;
  const auto read_by = [&](int64_t running) {
    const float share = target.terabytes_per_s * 1e6f / static_cast<float>(running);
    return std::max(of_block / std::min(kUnitBytesPerUs, share), turns * kTurnUs);
  };
  float us = kLaunchUs + static_cast<float>((blocks - 1) / units) * kBlockUs;
  if (blocks >= units) us += static_cast<float>(blocks / units) * read_by(units);
  if (blocks % units != 0) us += read_by(blocks % units);
  if (parts > 1) {
    constexpr float kLine = 64;  // with a maximum and a total
    const float rows = static_cast<float>(std::min<int64_t>(rows_of_kv_head(args), c.rows));
    const float of_sums = static_cast<float>(parts_brought(static_cast<int>(parts))) *
                          static_cast<float>(args.head_dim_v) * 4;
    us += kPartsUs + rows * (of_sums + kLine * static_cast<float>(parts)) / kMeetBytesPerUs;
  }
  return us;
}

}  // namespace rocm_kernels::cdna
