// How long a config of attention would take on an NVIDIA GPU. It ranks configs; it is not a
// measurement.
//
// The constants were fitted to an H200's and an H100's times of the configs of some 260 calls each,
// listed ones and others of chance (attention.py --parts configs,drawn,queries); those of tiles
// of more than 8 rows in FP8, and of pages that no other block shares, to an H200's alone.
#pragma once

#include <cmath>

#include "../../common/core/math.h"
#include "../gpu/shape.h"
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

// Microseconds of prefill's second kernel, which adds the sums of outer parts, and of leaving them:
// on an H200 a part costs as much for each 128 columns, from 2 to 32 parts.
inline float modelled_join_time(const AttentionArgs& args, const AttentionConfig& c,
                                const AttentionDevice& device) {
  constexpr float kJoinUs = 1.9f, kPartUs = 0.089f;
  constexpr float kJoinPasses = 2.9f;  // over the parts' sums, at memory's rate
  if (c.outer == 1) return 0;
  const float bytes = static_cast<float>(partial_bytes(args, c));
  return kJoinUs + kPartUs * static_cast<float>(c.outer * ceil_div(args.head_dim_v, 128)) +
         kJoinPasses * bytes / static_cast<float>(device.memory.bytes_per_us);
}

// Microseconds. Kernels are bound by the tensor cores, by memory, by L2 where blocks of rows share
// keys, and, alone, by what one block can do.
inline float modelled_prefill_time(const AttentionArgs& args, const AttentionConfig& c,
                                   const AttentionDevice& device) {
  constexpr float kLaunchUs = 2.3f, kBlockUs = 3.7f;  // a block's first loads, its end
  constexpr float kRoundUs = 2.5f;                    // memory's rest while blocks follow blocks
  constexpr float kTileUs = 0.14f;                    // between a tile's products
  constexpr float kFlopsPerUs = 5.3e6f;               // of a multiprocessor
  constexpr float kScoresPerUs = 14.1e3f;             // whose softmax it takes,
  constexpr float kMoreScoresPerUs = 16.7e3f;         // and by three consumers
  constexpr float kCodesPerUs = 22.3e3f;              // of FP8, that it widens
  // Where blocks of rows share keys that threads copy, on an H100: FP8, and a tile in pages.
  constexpr float kWideFp8RowUs = 0.06f;  // of FP8 heads beyond 128, a block that follows another
  constexpr float kFp8BlockUs = 3, kFewerCodesPerUs = 18.3e3f;
  constexpr float kPagedTileUs = 1.1f, kPagedRowUs = 0.009f;
  constexpr float kBandwidth = 0.79f;  // of what the driver says of the memory
  constexpr float kL2Rate = 1.4f;      // of the same
  // What a multiprocessor takes in from memory: of rows, of pages, whose keys take as long however
  // narrow they are.
  constexpr float kSmBytesPerUs = 70.1e3f, kSmPagedBytesPerUs = 39.5e3f, kPagedKeyUs = 0.011f;
  constexpr float kFp8PagedKeyUs = 0.005f;  // beside widening
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
  const bool shared = row_blocks_of_pair > 1, in_pages = size_of_pages(args) != 0;
  const float begin_us = kBlockUs + (shared && tile.fp8 ? kFp8BlockUs : 0);
  const float keys_of_tile = static_cast<float>(tile.keys);
  float copies_us = 0;
  if (tile.fp8) copies_us = elements / (shared && c.rows > 64 ? kFewerCodesPerUs : kCodesPerUs);
  if (shared && in_pages) copies_us = kPagedTileUs + kPagedRowUs * static_cast<float>(c.rows);
  if (!shared && in_pages && tile.fp8) copies_us += kFp8PagedKeyUs * keys_of_tile;
  float bytes_us = 0;  // of keys that no other block brings to L2
  if (!shared) {
    bytes_us = elements * static_cast<float>(size_of(args.kv_dtype)) /
               (in_pages ? kSmPagedBytesPerUs : kSmBytesPerUs);
    if (in_pages && !tile.fp8) bytes_us = std::max(bytes_us, kPagedKeyUs * keys_of_tile);
  }
  const float tile_us = std::max(
      bytes_us,
      kTileUs + std::max({2 * scores * columns / kFlopsPerUs,
                          scores / (c.rows > 128 ? kMoreScoresPerUs : kScoresPerUs), copies_us}));
  const auto block_us = [&](float its_keys) {
    return begin_us + std::ceil(its_keys / static_cast<float>(tile.keys) / outer) * tile_us;
  };
  const float blocks = pairs * row_blocks_of_pair * outer;
  const float waves = blocks / static_cast<float>(device.sm_count);
  const float rounds = waves < 4 ? std::ceil(waves) : waves + 0.5f;
  float compute_us = std::max(rounds * block_us(keys), block_us(longest));
  if (tile.fp8 && tile.head_dim > 128)
    compute_us += (rounds - 1) * kWideFp8RowUs * static_cast<float>(c.rows);
  const float bytes = pairs * longest * columns * static_cast<float>(size_of(args.kv_dtype));
  const float memory_us =
      std::max(bytes / kBandwidth, bytes * row_blocks_of_pair * keys / longest / kL2Rate) / per_us;
  return kLaunchUs + std::max(compute_us, kBlockUs + memory_us + (waves > 1 ? kRoundUs : 0)) +
         modelled_join_time(args, c, device);
}

// Blocks of a decode kernel that the device holds at once. Those of a cluster are of one group of
// multiprocessors, which has 16 to 18: on an H200 eight clusters of 16 are not all there at once
// (16 query and 8 KV heads of 256: 31.9 us, by clusters of 8 25.2), and of 64 clusters of 4
// neither.
inline float modelled_places(const AttentionArgs& args, const AttentionConfig& c,
                             const AttentionDevice& device) {
  constexpr float kGroupSms = 18, kOfGroups = 0.94f;
  const float sms = static_cast<float>(device.sm_count);
  if (c.cluster > 8) return std::floor(sms / kGroupSms) * 16;
  // By the room that a block of a cluster has; the rates were fitted to blocks that all had it.
  const int at_once = decode_block(args, c, device).at_once(kMaxCluster);
  return sms * static_cast<float>(at_once) * (c.cluster > 2 ? kOfGroups : 1);
}

// The same behind a kernel that gathers keys and values.
inline float modelled_gathered_time(const AttentionArgs& args, const AttentionConfig& c,
                                    const AttentionDevice& device) {
  constexpr float kGatherUs = 1.5f;  // beside the launch that follows, and bytes by memory's rate
  const float bytes = static_cast<float>(gathered_bytes(args));
  const float read = bytes * static_cast<float>(size_of(args.kv_dtype)) / 2;
  return kGatherUs + (read + bytes) / static_cast<float>(device.memory.bytes_per_us) +
         modelled_prefill_time(gathered_args(args, nullptr), behind_gathering(c), device);
}

inline float modelled_decode_time(const AttentionArgs& args, const AttentionConfig& c,
                                  const AttentionDevice& device) {
  constexpr float kLaunchUs = 2.8f;           // launch, first loads, the end
  constexpr float kFp8Us = 0.67f;             // more: queries become float16
  constexpr float kRowUs[] = {0.23f, 0.16f};  // more, for each row beyond 8: 16 bits, FP8
  constexpr float kClusterUs = 0.048f;        // each doubling of the blocks that meet
  constexpr float kLargeClusterUs = 0.55f;
  constexpr float kOuterUs = 1.3f, kPartUs = 0.091f;  // parts that meet in memory
  constexpr float kPagedOuterUs = 0.49f;
  constexpr float kTurnUs = 1.4f;  // where a thread has more than two columns
  constexpr float kWaveUs = 1.7f;  // further blocks of a multiprocessor
  // One block alone: its keys in rows, in pages of whole runs of 16 keys, in others (TileCopies).
  constexpr float kBlockBytesPerUs[] = {65.2e3f, 45.4e3f, 22.8e3f};
  constexpr float kFp8BlockBytesPerUs[] = {50.5e3f, 44.4e3f, 22.6e3f};
  constexpr float kSmBytesPerUs = 56.5e3f;  // two blocks of a multiprocessor
  // What a tile's rows cost: of a block's own rate, and of memory's when all blocks read. In the
  // order of kDecodeTiles, of 16 bits and of FP8.
  constexpr float kOfBlock[2][kDecodeTileCount] = {
      {0.89f, 0.84f, 0.87f, 0.83f, 0.43f, 1, 0.66f, 0.36f, 0.67f, 0.42f, 0.94f, 0.68f, 0.56f},
      {0.89f, 0.85f, 0.57f, 0.83f, 0.66f, 1, 0.87f, 0.72f, 0.67f, 0.73f, 0.94f, 0.91f, 0.56f}};
  constexpr float kOfMemory[2][kDecodeTileCount] = {
      {0.94f, 1, 1, 0.87f, 0.85f, 0.99f, 0.79f, 0.68f, 1, 0.75f, 1, 0.86f, 0.52f},
      {0.94f, 0.64f, 0.58f, 0.87f, 0.67f, 0.99f, 0.83f, 0.65f, 1, 0.69f, 1, 0.69f, 0.52f}};
  constexpr float kBandwidth = 0.92f;  // of what the driver says of the memory
  constexpr float kInPages = 0.98f;    // of that
  constexpr float kTogether = 2.6f;    // what blocks of large clusters wait, where some share
  constexpr float kCrowded = 0.8f;     // of the multiprocessors, from which on some do

  const DecodeBlock block = decode_block(args, c, device);
  const int tile = find_decode_tile(args, c.rows), fp8 = block.bytes == 1;
  const int64_t page_size = size_of_pages(args);
  const bool in_pages = page_size > 0;
  const float per_us = static_cast<float>(device.memory.bytes_per_us) * kBandwidth *
                       kOfMemory[fp8][tile] * (in_pages ? kInPages : 1);
  int64_t keys = args.max_seqlen_k;
  if (args.window_left >= 0) {
    keys = std::min(keys, args.window_left + args.max_seqlen_q + kDecodeKeys);
  }
  const float blocks = static_cast<float>(decode_blocks(args, c));
  const float places = modelled_places(args, c, device);
  const float sms = static_cast<float>(device.sm_count);
  const float tile_bytes = static_cast<float>(2 * block.row_bytes() * kDecodeKeys * block.warps());
  const float of_item = 2.0f * static_cast<float>(keys) * block.row_bytes();
  const float of_block =
      std::ceil(of_item / static_cast<float>(c.cluster * c.outer) / tile_bytes) * tile_bytes;
  const int layout = page_size == 0 ? 0 : page_size % 16 == 0 ? 1 : 2;
  const float alone = (fp8 ? kFp8BlockBytesPerUs : kBlockBytesPerUs)[layout] * kOfBlock[fp8][tile];
  const float shared = static_cast<float>(row_blocks(args, c));  // rows that L2 serves again
  const auto wave_us = [&](float at_once) {
    return std::max(of_block / alone, of_block * at_once / shared / per_us);
  };
  const float full = std::floor(blocks / places), rest = blocks - full * places;
  float blocks_us = full * wave_us(places) + (rest > 0 ? wave_us(rest) : 0);
  // Places are given out before all are free: where every multiprocessor could have one block, some
  // have two.
  if (blocks > kCrowded * sms && blocks <= sms && places > sms && !is_alone(args, c, device)) {
    blocks_us = std::max(blocks_us, (c.cluster > 2 ? kTogether : 2) * of_block / kSmBytesPerUs);
  }
  const float waves = full + (rest > 0 ? 1 : 0);
  const int64_t here = std::min<int64_t>(rows_of_kv_head(args), c.rows);
  const int64_t turns = ceil_div(here * block.head_dim / c.cluster / 2, 32 * block.warps());
  const float outer_us = c.outer == 1 ? 0
                                      : kOuterUs + (in_pages ? kPagedOuterUs : 0) +
                                            kPartUs * static_cast<float>(c.outer - 1) +
                                            kTurnUs * static_cast<float>(turns - 1);
  const float rows_us = kRowUs[fp8] * static_cast<float>(c.rows - 8);
  return kLaunchUs + (fp8 ? kFp8Us : 0) + rows_us +
         kClusterUs * std::log2(static_cast<float>(c.cluster)) +
         (c.cluster > 8 ? kLargeClusterUs : 0) + outer_us + blocks_us +
         (waves - 1) * (kWaveUs + rows_us);
}

// Microseconds.
inline float modelled_time(const AttentionArgs& args, const AttentionConfig& c,
                           const AttentionDevice& device) {
  switch (c.design) {
    case AttentionConfig::Design::kPrefill:
      return modelled_prefill_time(args, c, device);
    case AttentionConfig::Design::kGathered:
      return modelled_gathered_time(args, c, device);
    case AttentionConfig::Design::kDecode:
      return modelled_decode_time(args, c, device);
    case AttentionConfig::Design::kPlain:
      break;
  }
  return 1e9f;  // never the better
}

}  // namespace cuda
}  // namespace rocm_kernels
