// How long a config of attention would take on an AMD GPU. It ranks configs; it is not a
// measurement: published rates and latencies, and what the simulator's cycle model says.
#pragma once

#include <cmath>

#include "config.h"

namespace rocm_kernels::cdna {

// Microseconds.
inline float modelled_time(const AttentionArgs& args, const AttentionConfig& c,
                           const Target& target) {
  constexpr float kLaunchUs = 6.0f;         // launch, first loads, the end
  constexpr float kPartsUs = 2.5f;          // sums written through, ticket, sums read
  constexpr float kEachPartUs = 0.05f;      // its sums read by the last to arrive
  constexpr float kUnitBytesPerUs = 22e3f;  // that a compute unit takes in

  if (c.design == AttentionConfig::Design::kPlain) return 1e9f;
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
