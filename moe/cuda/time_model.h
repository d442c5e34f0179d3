// How long a config of the mixture-of-experts ops would take on an NVIDIA GPU: by the time that its
// bytes and its rounds of blocks take. It ranks configs; it is not a measurement.
//
// The constants were fitted to layers timed on an H200 (docs/h200_moe_configs.md, by
// benchmarks/moe_configs.py). The memory's rate is the device's own (common/cuda/memory_rates.h).
#pragma once

#include <algorithm>
#include <cmath>

#include "config.h"

namespace rocm_kernels {
namespace cuda::moe {

// Experts that `rows` rows meet if routing is even.
inline float touched_experts(const MoeShape& s) {
  return s.experts * (1.0f - std::pow(1.0f - 1.0f / s.experts, static_cast<float>(s.rows)));
}

// How many tiles an expert has that gets `rows` rows on average. Its last tile is half full on
// average, which adds half a tile; no expert that has rows has less than one.
inline float tiles_of_expert(float rows, int32_t block_m) {
  return std::max(1.0f, rows / block_m + 0.5f);
}

inline float bytes_of_w(const MoeShape& s) {
  return s.w() == DType::kFloat4E2M1x2 ? 0.53f : static_cast<float>(size_of(s.w()));
}

// The time of pieces of work that run at once. The longest hides the others, but not quite one that
// takes nearly as long.
inline float joined(float a, float b, float c = 0, float d = 0) {
  const auto fourth = [](float x) { return x * x * x * x; };
  return std::pow(fourth(a) + fourth(b) + fourth(c) + fourth(d), 0.25f);
}

// Bytes that the memory delivers in a microsecond, if it reaches `share` of its rate.
inline float memory_rate(const MoeDevice& device, float share) {
  return share * static_cast<float>(device.memory.bytes_per_us);
}

// What one product's operands cost to multiply.
struct MultiplyRates {
  float slice_cycles;    // streamed: of a scheduler, to widen 64 bytes of 32 rows of w
  float rows_cycles;     // and to multiply them with 8 rows of a
  float warpgroup_rate;  // multiply-adds an us of an SM, times bytes of an element
  float mma_rate;        // of mma.sync, an us of an SM
  float widen_rate;      // elements of w that become wider, an us of an SM; 0: none do
};
inline MultiplyRates rates_of(const MoeShape& s, int product) {
  if (s.w() == DType::kFloat4E2M1x2) return {600, 480, 3.6e6f, 0.19e6f, 21.6e3f};
  if (size_of(s.w()) == 2) return {10, 190, 5.83e6f, 0.39e6f, 0};
  const bool blocks = s.blocks >> product & 1;
  if (size_of(s.a()) == 2) {
    if (blocks) return {170, 390, 3.45e6f, 0.255e6f, 24.8e3f};
    return {150, 240, 4.05e6f, 0.43e6f, 29.9e3f};
  }
  if (blocks) return {170, 300, 3.86e6f, 0.255e6f, 0};
  return {150, 180, 4.32e6f, 0.43e6f, 0};
}

// One streamed product's time in us: the SM with the most units takes in its bytes, or multiplies
// them; and what no byte hides.
inline float streamed_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                           int product) {
  constexpr float kMemory = 1.058f;   // of its rate, as if all SMs had as much as the busiest
  constexpr float kOutsideUs = 5.8f;  // launch, first bytes, last sums; quantising, or the combine
  constexpr float kUnitUs = 0.28f;
  constexpr float kAloneFactor = 1.28f;  // for what one block an SM waits, which two would hide
  constexpr float kCyclesPerUs = 1755;
  const StreamedStage stage = streamed_stage(s, c, product);
  const MultiplyRates rates = rates_of(s, product);
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float touched = touched_experts(s);
  const float each = s.rows / touched;
  const float tiles_m = touched * tiles_of_expert(each, c.block_m);
  const float units = tiles_m * std::ceil(static_cast<float>(n) / stage.block_n);
  // By whole rounds of two blocks an SM.
  const float busiest = 2 * std::ceil(units / (2 * device.sm_count));
  const float unit_bytes = stage.block_n * k * bytes_of_w(s);
  const float load = busiest * unit_bytes * device.sm_count / memory_rate(device, kMemory);
  const float slices =
      busiest * std::ceil(1.0f * w_row_bytes(s.w(), k) / stage.row_bytes()) * kStreamedWarps;
  const float rows = std::ceil(std::min<float>(each, c.block_m) / 8);
  float multiply = slices / 4 * (rates.slice_cycles + rates.rows_cycles * rows) / kCyclesPerUs;
  if (streamed_blocks_per_sm(c.block_m) == 1) multiply *= kAloneFactor;
  return joined(load, multiply) + busiest * kUnitUs + kOutsideUs;
}

// The same of a product streamed to wgmma: its bytes, or the steps of the SM with the most units;
// and what its sums take to memory, and back.
inline float streamed_wgmma_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                                 int product) {
  constexpr float kMemory = 0.909f;
  constexpr float kStepUs = 0.27f;  // of a stage; and, with 8 rows of a, their square
  constexpr float kBlockRowsUs = 0.019f, kRowsSquareUs = 0.022f;
  constexpr float kStoreBytesPerUs = 1.38e6f;
  constexpr float kOutsideUs = 6.2f, kOutsideRowsUs = 1.2f;  // and for each 8 rows of a tile
  constexpr int32_t kStepBytes = kStreamedWgmmaChunks * kChunkBytes;
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float touched = touched_experts(s), each = s.rows / touched;
  const float tiles = tiles_of_expert(each, c.block_m), eights = each / tiles / 8;
  const float units = touched * tiles * std::ceil(static_cast<float>(n) / kStreamedWgmmaN);
  const float load = touched * n * k / memory_rate(device, kMemory);
  const bool blocks = s.blocks >> product & 1;
  const float step =
      kStepUs + (blocks ? kBlockRowsUs * eights : 0.0f) + kRowsSquareUs * eights * eights;
  const float steps =
      std::ceil(units / device.sm_count) * std::ceil(static_cast<float>(k) / kStepBytes) * step;
  const float store = s.rows * (product == 0 ? 2.0f : 8.0f) * n / kStoreBytesPerUs;
  return joined(load, steps) + store + kOutsideUs + kOutsideRowsUs * (c.block_m / 8.0f);
}

// What a resident layer gains beside a streamed one, us: measured with one to four tokens. The more
// tiles there are, the worse its units divide among the warps of a block.
inline float resident_gain(const MoeShape& s, bool beside_wgmma) {
  const float more = static_cast<float>(s.tokens - 1);
  if (beside_wgmma) return 5.0f - 10.0f * more;
  return s.blocks == 0 ? 8.0f - 10.5f * more : 12.5f - 7.0f * more;
}

// One product's time in us by the warpgroup kernel: the SM with the most tiles multiplies, or takes
// them in from L2 or memory.
inline float warpgroup_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                            int product) {
  constexpr float kMemory = 0.925f;
  constexpr float kL2BytesPerUs = 69e3f;  // that an SM gets
  constexpr float kOutsideUs = 8.1f;      // launch, first bytes, last tile's end, and quantising h
  constexpr float kEndUs = 0.78f;         // of a tile
  constexpr float kStoreBytesPerUs = 46.7e3f;
  constexpr float kStagedBytesPerUs = 68.6e3f, kStagedAloneBytesPerUs = 26.3e3f;  // in one buffer
  constexpr float kColumnBytesPerUs = 22.4e3f;  // where w is the 64-row operand
  // Of 256 rows: their sums have no second set of registers, but weights are widened once for all.
  constexpr float kTallRate = 0.93f, kTallWidenedRate = 1.27f;
  // Of a warpgroup's products, what is spared where an expert's last tile has no rows for it.
  constexpr float kSpared = 0.69f;
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float bytes = static_cast<float>(size_of(s.a())), w_bytes = bytes_of_w(s);
  const float touched = touched_experts(s), cluster = static_cast<float>(warpgroup_cluster(c));
  const float tiles_m = touched * tiles_of_expert(s.rows / touched, c.block_m);
  const float tiles = tiles_m * std::ceil(n / (c.block_n * cluster)) * cluster;
  const float busiest = std::ceil(tiles / device.sm_count);
  const float area = static_cast<float>(c.block_m) * c.block_n;
  const MultiplyRates rates = rates_of(s, product);
  const bool swap_ab = c.block_n > c.block_m, tall = c.block_m == 256;
  const float halves = touched * tiles_of_expert(s.rows / touched, c.block_m / 2);
  const float multiplied =
      swap_ab ? 1.0f : 1.0f - kSpared * (1.0f - halves / (2 * tiles_m));  // of the tiles' area
  const float rate = rates.warpgroup_rate * (!tall                  ? 1.0f
                                             : rates.widen_rate > 0 ? kTallWidenedRate
                                                                    : kTallRate);
  const float multiply = busiest * multiplied * area * k * bytes / rate;
  const float widen =
      rates.widen_rate > 0 ? busiest * c.block_n * static_cast<float>(k) / rates.widen_rate : 0;
  const float load =
      busiest * (c.block_m / cluster * bytes + c.block_n * w_bytes) * k / kL2BytesPerUs;
  const float out_bytes = s.fused && product == 0 ? 2.0f : 4.0f;  // of each of w's rows
  const float rows = std::min<float>(s.rows / touched, c.block_m);
  const bool staged = warp_staging_bytes(c, k * size_of(s.a()), s.fused && product == 1) > 0;
  const float store = busiest * rows * c.block_n * out_bytes /
                      (staged    ? tall ? kStagedAloneBytesPerUs : kStagedBytesPerUs
                       : swap_ab ? kColumnBytesPerUs
                                 : kStoreBytesPerUs);
  const float memory =
      (touched * n * k * w_bytes + 1.0f * s.rows * k * bytes + out_bytes * s.rows * n) /
      memory_rate(device, kMemory);
  return joined(multiply, load, memory, widen) + store + busiest * kEndUs + kOutsideUs;
}

// One tiled product's time in us.
inline float tiled_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device,
                        int product) {
  constexpr float kOutsideUs = 14.0f;
  constexpr float kMemory = 0.366f;
  constexpr float kLargeTileFactor = 1.38f;  // 128 rows of a, in registers that are too few
  const int32_t n = n_of(s, product), k = k_of(s, product);
  const float split_k = product == 1 ? static_cast<float>(c.split_k) : 1.0f;
  const float touched = touched_experts(s);
  const float tiles_m = touched * std::ceil(s.rows / touched / c.block_m);
  const float blocks = tiles_m * std::ceil(static_cast<float>(n) / c.block_n) * split_k;
  const float busiest = std::ceil(blocks / device.sm_count);
  // Reading and widening a fragment of w weighs as much as 8 rows of a.
  const float multiply = busiest * (c.block_m + 8) * c.block_n * (k / split_k) /
                         rates_of(s, product).mma_rate *
                         (c.block_m == 128 ? kLargeTileFactor : 1.0f);
  const float bytes = touched * n * k * bytes_of_w(s) + 1.0f * s.rows * k * size_of(s.a()) +
                      4.0f * s.rows * n * split_k * (split_k > 1 ? 2 : 1);
  return joined(multiply, bytes / memory_rate(device, kMemory)) + kOutsideUs;
}

inline float modelled_time(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  const auto of_products = [&](auto time) {
    return time(s, c, device, 0) + (s.fused ? time(s, c, device, 1) : 0.0f);
  };
  switch (c.design) {
    case MoeConfig::Design::kResident: {
      MoeConfig streamed = c;
      const bool by_wgmma = streams_to_wgmma(s, device);
      streamed.design = by_wgmma ? MoeConfig::Design::kStreamedWgmma : MoeConfig::Design::kStreamed;
      streamed.block_n = by_wgmma ? kStreamedWgmmaN : 32;
      return modelled_time(s, streamed, device) - resident_gain(s, by_wgmma);
    }
    case MoeConfig::Design::kStreamed:
      return of_products(streamed_time);
    case MoeConfig::Design::kStreamedWgmma:
      return of_products(streamed_wgmma_time);
    case MoeConfig::Design::kWarpgroup: {
      if (!s.fused) return of_products(warpgroup_time);
      constexpr float kRouteUs = 9.0f, kSortBytesPerUs = 2.4e6f;
      const float sorted = 2.0f * s.rows * s.k * size_of(s.a());
      // The pass over h, which tiles with whole groups of its columns spare.
      constexpr float kPassElementsPerUs = 0.55e6f;
      const bool spared = c.ends_in_groups() && is_fp8(s.a()) && (s.blocks & 2) != 0;
      const float pass = spared ? 0.5f * s.rows * s.n / kPassElementsPerUs : 0.0f;
      return kRouteUs + sorted / kSortBytesPerUs - pass + of_products(warpgroup_time);
    }
    default:
      return of_products(tiled_time);
  }
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
