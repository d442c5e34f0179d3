// How long a config of attention would take on an NVIDIA GPU. It ranks configs; it is not a
// measurement.
//
// The constants were fitted to an H100's times of decode steps (benchmarks/attention.py --configs):
// 1 to 64 sequences, 1 to 128 queries, 8 and 16 KV heads, 1,024 to 65,536 keys.
#pragma once

#include <cmath>

#include "../../common/core/math.h"
#include "config.h"

namespace rocm_kernels {
namespace cuda {

// Keys that a query of the longest sequence sees, on average.
inline float keys_of_query(const AttentionArgs& args) {
  float keys = static_cast<float>(args.max_seqlen_k);
  if (args.window_right >= 0) keys -= 0.5f * static_cast<float>(args.max_seqlen_q);
  if (args.window_left >= 0) keys = std::min(keys, static_cast<float>(args.window_left));
  return std::max(keys, 1.0f);
}

// Microseconds of the second kernel, which adds the sums of outer parts, and of leaving them: on an
// H200 a part costs as much for each 128 columns, from 2 to 32 parts and heads of 128 to 512.
inline float modelled_join_time(const AttentionArgs& args, const AttentionConfig& c,
                                const AttentionDevice& device) {
  constexpr float kJoinUs = 2.5f, kPartUs = 0.14f;
  constexpr float kJoinPasses = 3.5f;  // over the parts' sums, at memory's rate
  if (c.outer == 1) return 0;
  const float floats = static_cast<float>(args.total_q * args.heads * partial_floats(args, c)) *
                       static_cast<float>(c.outer);
  return kJoinUs + kPartUs * static_cast<float>(c.outer * ceil_div(args.head_dim_v, 128)) +
         kJoinPasses * floats * sizeof(float) / static_cast<float>(device.memory.bytes_per_us);
}

// Microseconds. Kernels are bound by the tensor cores, by memory, by L2 where blocks of rows share
// keys, and, alone, by what one block can do.
inline float modelled_prefill_time(const AttentionArgs& args, const AttentionConfig& c,
                                   const AttentionDevice& device) {
  constexpr float kLaunchUs = 6, kBlockUs = 2.5f;  // a block's first loads, its end
  constexpr float kTileUs = 0.15f;                 // between a tile's products
  constexpr float kFlopsPerUs = 5.3e6f;            // of a multiprocessor
  constexpr float kScoresPerUs = 13.4e3f;          // whose softmax it takes
  constexpr float kCodesPerUs = 24e3f;             // of FP8, that it widens
  constexpr float kBandwidth = 0.92f;              // of what the driver says of the memory
  constexpr float kL2Rate = 1.4f;                  // of the same
  constexpr float kSmBytesPerUs = 59e3f;           // that a multiprocessor takes in from memory
  const PrefillTile tile = prefill_tile(args);
  const float row_blocks_of_pair = static_cast<float>(row_blocks(args, c));
  const float outer = static_cast<float>(c.outer);
  const float pairs = static_cast<float>(args.batch * args.kv_heads);
  const float per_us = static_cast<float>(device.memory.bytes_per_us);
  const float queries = static_cast<float>(args.max_seqlen_q) / row_blocks_of_pair;
  const float keys = keys_of_query(args) + 0.5f * queries;
  const float longest = args.window_left >= 0 ? keys : static_cast<float>(args.max_seqlen_k);
  const float columns = static_cast<float>(tile.head_dim + tile.head_dim_v);
  const float scores = static_cast<float>(c.rows * tile.keys);
  const float elements = static_cast<float>(tile.keys) * columns;
  const float bytes_us =  // of keys that no other block brings to L2
      row_blocks_of_pair > 1
          ? 0
          : elements * static_cast<float>(size_of(args.kv_dtype)) / kSmBytesPerUs;
  const float tile_us = std::max(
      bytes_us, kTileUs + std::max({2 * scores * columns / kFlopsPerUs, scores / kScoresPerUs,
                                    tile.fp8 ? elements / kCodesPerUs : 0}));
  const auto block_us = [&](float its_keys) {
    return kBlockUs + std::ceil(its_keys / static_cast<float>(tile.keys) / outer) * tile_us;
  };
  const float blocks = pairs * row_blocks_of_pair * outer;
  const float waves = blocks / static_cast<float>(device.sm_count);
  const float rounds = waves < 4 ? std::ceil(waves) : waves + 0.5f;
  const float compute_us = std::max(rounds * block_us(keys), block_us(longest));
  const float bytes = pairs * longest * columns * static_cast<float>(size_of(args.kv_dtype));
  const float memory_us =
      std::max(bytes / kBandwidth, bytes * row_blocks_of_pair * keys / longest / kL2Rate) / per_us;
  return kLaunchUs + std::max(compute_us, memory_us) + modelled_join_time(args, c, device);
}

inline float modelled_decode_time(const AttentionArgs& args, const AttentionConfig& c,
                                  const AttentionDevice& device) {
  constexpr float kLaunchUs = 5.5f;   // launch, first loads, the end
  constexpr float kRowUs = 0.35f;     // more, for each row beyond 8
  constexpr float kClusterUs = 0.4f;  // each doubling of the blocks that meet
  constexpr float kLargeClusterUs = 1;
  constexpr float kWaveUs = 1.5f;  // further blocks of a multiprocessor
  constexpr float kBlockBytesPerUs = 60e3f, kFp8BlockBytesPerUs = 40e3f;  // one block alone
  // What more rows cost: of a block's own rate, and of memory's when all blocks read.
  constexpr float kOfBlock[] = {1, 0.7f, 0.3f}, kOfMemory[] = {1, 0.85f, 0.42f};
  // What memory loses to each block more that reads at once, beyond half of the multiprocessors.
  constexpr float kCrowding = 0.2f;
  constexpr float kBandwidth = 0.9f;  // of what the driver says of the memory

  const DecodeBlock block = decode_block(args, c, device);
  const float sms = static_cast<float>(device.sm_count);
  // Sums of a row of 192 or 256 take the registers of two rows of 128.
  const int rows = c.rows * static_cast<int>(std::max<int64_t>(ceil_div(block.head_dim, 128), 1));
  const int by_rows = rows == 8 ? 0 : rows == 16 ? 1 : 2;
  const float per_us =
      static_cast<float>(device.memory.bytes_per_us) * kBandwidth * kOfMemory[by_rows];
  int64_t keys = args.max_seqlen_k;
  if (args.window_left >= 0) {
    keys = std::min(keys, args.window_left + args.max_seqlen_q + block.keys());
  }
  const float items = static_cast<float>(args.batch * args.kv_heads * row_blocks(args, c));
  const float blocks = items * static_cast<float>(c.cluster * c.outer);
  // By the room that a block of a cluster has; the rates below were fitted to blocks that all had
  // it.
  // A cluster's blocks are of one group of SMs, which has 16 to 18: on an H200 eight clusters of 16
  // are not all there at once (16 query and 8 KV heads of 256: 31.9 us, by clusters of 8 25.2).
  constexpr float kGroupSms = 18;
  const float usable = c.cluster > 8 ? std::floor(sms / kGroupSms) * 16 : sms;
  const float slots = usable * static_cast<float>(block.at_once(kMaxCluster));
  const float resident = std::min(blocks, slots);
  const float tile = static_cast<float>(2 * block.row_bytes() * block.keys() * block.warps());
  const float of_item = 2.0f * static_cast<float>(keys) * block.row_bytes();
  const float of_block = std::ceil(of_item / static_cast<float>(c.cluster * c.outer) / tile) * tile;
  const float alone =
      (block.bytes == 1 ? kFp8BlockBytesPerUs : kBlockBytesPerUs) * kOfBlock[by_rows];
  const float waves = std::ceil(blocks / slots);
  const float shared = static_cast<float>(row_blocks(args, c));  // rows that L2 serves again
  const float wave_us = std::max(of_block / alone, of_block * resident / shared / per_us);
  const float crowd = std::max(0.0f, resident / sms - 0.5f);
  return kLaunchUs + kRowUs * static_cast<float>(c.rows - 8) +
         kClusterUs * std::log2(static_cast<float>(c.cluster)) +
         (c.cluster > 8 ? kLargeClusterUs : 0) + modelled_join_time(args, c, device) +
         waves * wave_us + kCrowding * crowd * items / shared * of_item / per_us +
         (waves - 1) * kWaveUs;
}

// Microseconds.
inline float modelled_time(const AttentionArgs& args, const AttentionConfig& c,
                           const AttentionDevice& device) {
  switch (c.design) {
    case AttentionConfig::Design::kPrefill:
      return modelled_prefill_time(args, c, device);
    case AttentionConfig::Design::kDecode:
      return modelled_decode_time(args, c, device);
    case AttentionConfig::Design::kPlain:
      break;
  }
  return 1e9f;  // never the better
}

}  // namespace cuda
}  // namespace rocm_kernels
