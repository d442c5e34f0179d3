// How long a config of attention would take on an NVIDIA GPU. It ranks configs; it is not a
// measurement.
//
// The constants were fitted to an H100's times of decode steps (benchmarks/attention.py --configs):
// 1 to 64 sequences, 1 to 8 KV heads, 1,024 to 65,536 keys. The pick takes 1.3 % more than the best
// config on average, 8 % at worst.
#pragma once

#include <cmath>

#include "config.h"

namespace rocm_kernels {
namespace cuda {

// Microseconds.
inline float modelled_time(const AttentionArgs& args, const AttentionConfig& c,
                           const AttentionDevice& device) {
  constexpr float kLaunchUs = 5.5f;   // launch, first loads, the end
  constexpr float kClusterUs = 0.4f;  // each doubling of the blocks that meet
  constexpr float kLargeClusterUs = 1;
  constexpr float kOuterUs = 5;    // the second kernel
  constexpr float kWaveUs = 1.5f;  // further blocks of a multiprocessor
  constexpr float kBlockBytesPerUs = 60e3f, kFp8BlockBytesPerUs = 40e3f;  // one block alone
  // What memory loses to each block more that reads at once, beyond half of the multiprocessors.
  constexpr float kCrowding = 0.2f;
  constexpr float kBandwidth = 0.85f;  // of what the driver says of the memory

  if (c.design == AttentionConfig::Design::kPlain) return 1e9f;
  const DecodeBlock block = decode_block(args, c, device);
  const float sms = static_cast<float>(device.sm_count);
  const float per_us = static_cast<float>(device.memory.bytes_per_us) * kBandwidth;
  int64_t keys = args.max_seqlen_k;
  if (args.window_left >= 0) {
    keys = std::min(keys, args.window_left + args.max_seqlen_q + block.keys());
  }
  const float items = static_cast<float>(args.batch * args.kv_heads * row_blocks(args, c));
  const float blocks = items * static_cast<float>(c.cluster * c.outer);
  const float slots = sms * static_cast<float>(block.at_once());
  const float resident = std::min(blocks, slots);
  const float tile = static_cast<float>(2 * block.row_bytes() * block.keys() * block.warps());
  const float of_item = 2.0f * static_cast<float>(keys) * block.row_bytes();
  const float of_block = std::ceil(of_item / static_cast<float>(c.cluster * c.outer) / tile) * tile;
  const float alone = block.bytes == 1 ? kFp8BlockBytesPerUs : kBlockBytesPerUs;
  const float waves = std::ceil(blocks / slots);
  const float wave_us = std::max(of_block / alone, of_block * resident / per_us);
  const float crowd = std::max(0.0f, resident / sms - 0.5f);
  return kLaunchUs + kClusterUs * std::log2(static_cast<float>(c.cluster)) +
         (c.cluster > 8 ? kLargeClusterUs : 0) + (c.outer > 1 ? kOuterUs : 0) + waves * wave_us +
         kCrowding * crowd * items * of_item / per_us + (waves - 1) * kWaveUs;
}

}  // namespace cuda
}  // namespace rocm_kernels
