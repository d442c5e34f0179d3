// How long a config of the mixture-of-experts ops would take on an AMD GPU: by the time that its
// bytes, its lines of K and its rounds of workgroups take. It ranks configs; nothing here is
// measured.
#pragma once

#include <algorithm>
#include <cmath>

#include "config.h"

namespace rocm_kernels::cdna::moe {

// Experts that `rows` rows meet if routing is even.
inline float touched_experts(const MoeShape& s) {
  return s.experts * (1.0f - std::pow(1.0f - 1.0f / s.experts, static_cast<float>(s.rows)));
}

// Tiles of block_m rows that they make. How many rows an expert has is about normal, and each
// multiple of block_m that they exceed is one tile more.
inline float tiles_of_rows(const MoeShape& s, int32_t block_m) {
  const float mean = static_cast<float>(s.rows) / s.experts;
  const float deviation = std::sqrt(mean * (1.0f - 1.0f / s.experts));
  const float reach = 4 * deviation;  // beyond it there is next to nothing
  // Beside its first: those that an expert has for sure, then those that it may have.
  const float sure = std::max(0.0f, std::floor((mean - 0.5f - reach) / block_m));
  float others = sure;
  for (float i = sure + 1; i * block_m < mean + reach; ++i) {
    others += std::erfc((i * block_m + 0.5f - mean) / (deviation * std::sqrt(2.0f))) / 2;
  }
  return touched_experts(s) + s.experts * others;
}

// Bytes of an element of w, MXFP4's with its scale.
inline float w_bytes(const MoeShape& s) {
  return s.w() == DType::kFloat4E2M1x2 ? 0.53f : static_cast<float>(size_of(s.w()));
}

// The time of two things that go on at once and wait for each other at barriers: they hide each
// other but for an eighth.
inline float overlapped(float a, float b) { return std::max(a, b) + std::min(a, b) / 8; }

// 128 bytes a cycle and channel, 16 channels an XCD.
inline float l2_bytes_per_us(const Target& target) {
  return 128.0f * 16 * target.xcds * target.gigahertz * 1000;
}

// What a grouped product must take from memory and bring back, in us.
inline float memory_time(const MoeShape& s, const Target& target, int32_t n, int32_t k,
                         int32_t split_k) {
  const float bytes = touched_experts(s) * n * k * w_bytes(s) + s.rows * 1.0f * k * size_of(s.a()) +
                      4.0f * s.rows * n * split_k;
  return bytes / (target.terabytes_per_s * 1e6f);
}

// One streamed product's time in us: Little's law for the loads that a compute unit's waves have in
// flight, as skinny_gemm's model has it.
inline float streamed_time(const MoeShape& s, const MoeConfig& c, const Target& target, int32_t n,
                           int32_t k, int32_t split_k) {
  constexpr float kLaunchUs = 1.0f, kMemoryUs = 0.8f, kSumUs = 0.3f;
  constexpr float kLinesInFlight = 32768;  // bytes that the L1 of a CU tracks at once
  const bool fp4 = s.w() == DType::kFloat4E2M1x2;
  const float tiles_m = tiles_of_rows(s, c.block_m);
  const float workgroups = tiles_m * std::ceil(static_cast<float>(n) / c.block_n) * split_k;
  const float tile_rows = std::min(s.rows / tiles_m, static_cast<float>(c.block_m));
  const float depth = static_cast<float>(k) / split_k;
  const float bytes = depth * (c.block_n * w_bytes(s) + tile_rows * size_of(s.a()));
  const int32_t stages = size_of(s.a()) == 1 && c.block_m == 16 ? 4 : 2;
  const float k_block = static_cast<float>(streamed_k_block(fp4));
  const int32_t waves = streamed_waves(static_cast<int32_t>(depth / k_block));
  const float busiest = std::ceil(workgroups / target.compute_units);
  constexpr int32_t kSimds = 4;
  const float at_once = std::min<float>(busiest, kStreamedAtOnce * kSimds / waves);
  const float in_flight = std::min(
      kLinesInFlight, at_once * std::min(bytes, waves * stages * k_block * c.block_n * w_bytes(s)));
  float unit = busiest * bytes * kMemoryUs / in_flight;
  if (fp4) {
    // Vector instructions that decode an element, of the 64 lanes that a CU has in a cycle.
    const float decoding = (target.gfx950 ? 1.0f : 3.1f) / 64;
    unit = std::max(unit, busiest * depth * c.block_n * decoding / (target.gigahertz * 1000));
  }
  // An expert's second tile reads its weights again, from the L2 of the XCD that both run on.
  const float again = (tiles_m - touched_experts(s)) * n * k * w_bytes(s);
  const float memory = memory_time(s, target, n, k, split_k) + again / l2_bytes_per_us(target);
  // No barrier in its loop: what takes longest hides the rest.
  return std::max(unit, memory) + kLaunchUs + kMemoryUs + kSumUs;
}

// One tiled product's time in us.
inline float tiled_time(const MoeShape& s, const MoeConfig& c, const Target& target, int32_t n,
                        int32_t k, int32_t split_k) {
  constexpr float kLaunchUs = 1.0f;
  constexpr float kFirstLoadCycles = 1700;  // a load from memory, under load
  constexpr float kTurnCycles = 400;        // of a line alone: barriers, the way through LDS
  constexpr float kFillBytesPerCycle = 48;  // L2 to L1, of 64
  const GemmTile& tile = kMoeTiles[find_moe_tile(c.block_m, c.block_n)];
  const float a_bytes = static_cast<float>(size_of(s.a()));
  const float tiles_m = tiles_of_rows(s, c.block_m);
  const float workgroups = tiles_m * std::ceil(static_cast<float>(n) / c.block_n) * split_k;
  const float lines = std::ceil(k * a_bytes / kLine / split_k);

  const float at_once = std::min(static_cast<float>(workgroups_at_once(tile, target)),
                                 std::ceil(workgroups / target.compute_units));
  const float mma = static_cast<float>(c.block_m) * c.block_n / (target.gfx950 ? 32 : 16);
  const float rows = static_cast<float>(c.block_m + c.block_n);
  const float lds = tile.waves() * static_cast<float>(tile.wave_m() + tile.wave_n()) + rows;
  const float fill = rows * kLine / kFillBytesPerCycle;
  // A workgroup asks for one line ahead, so alone it takes the time of a load for each.
  const float alone = std::max(mma + rows + kTurnCycles, kFirstLoadCycles);
  const float line = std::max({mma, lds, fill, alone / at_once});
  const float each = std::ceil(workgroups / target.compute_units);
  const float multiply =
      (each * lines * line + each / at_once * kFirstLoadCycles) / (target.gigahertz * 1000);
  return overlapped(multiply, memory_time(s, target, n, k, split_k)) + kLaunchUs;
}

inline float product_time(const MoeShape& s, const MoeConfig& c, const Target& target, int32_t n,
                          int32_t k, int32_t split_k) {
  return c.design == MoeConfig::Design::kStreamed ? streamed_time(s, c, target, n, k, split_k)
                                                  : tiled_time(s, c, target, n, k, split_k);
}

inline float modelled_time(const MoeShape& s, const MoeConfig& c, const Target& target) {
  if (!s.fused) return product_time(s, c, target, s.n, s.k, 1);
  float time =
      product_time(s, c, target, s.n, s.k, 1) + product_time(s, c, target, s.k, s.n / 2, c.split_k);
  constexpr float kRoutingUs = 3.0f;
  if (!c.routes_itself(s.rows, s.experts)) time += kRoutingUs;
  // h in float32 and again as FP8, where the first product does not end in groups.
  if (is_fp8(s.a()) && !(c.ends_in_groups() && (s.blocks & 2) != 0)) {
    time += 1.0f + 4.5f * s.rows * s.n / (target.terabytes_per_s * 1e6f);
  }
  // The sums of slots read every part, and no product hides that.
  return time + 4.0f * s.rows * s.k * c.split_k / (target.terabytes_per_s * 1e6f);
}

}  // namespace rocm_kernels::cdna::moe
