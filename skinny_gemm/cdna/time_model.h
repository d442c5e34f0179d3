// How long a config would take: Little's law for loads in flight, and the rates of memory, caches
// and LDS. It ranks configs; it is not a measurement.
#pragma once

#include <algorithm>

#include "config.h"

namespace rocm_kernels::cdna::skinny {

// Parts of a modelled time, in microseconds. Published rates and latencies, not measurements; what
// they were checked against is in docs/kernels/skinny_gemm.md.
struct SkinnyGemmTime {
  float memory;   // bytes that must cross the memory interface, at the sustained rate
  float cache;    // what the L2s must deliver
  float unit;     // what the busiest CU must take in, at the rate that its bytes in flight allow
  float latency;  // launch, first bytes of each round of workgroups, a workgroup's sums
  float sharing;  // partial sums of tiles with several contributors
  float total() const { return std::max({memory, cache, unit}) + latency + sharing; }
};

inline SkinnyGemmTime modelled_time(const GemmShape& s, const SkinnyGemmConfig& c,
                                    const Target& target) {
  constexpr float kMemoryUs = 0.8f;         // a load from memory, under load
  constexpr float kCacheUs = 0.3f;          // a load from L2, under load
  constexpr float kLaunchUs = 1.0f;         // dispatch, arguments, first instructions
  constexpr float kSumUs = 0.3f;            // LDS, barriers, the store
  constexpr float kPartialSumsUs = 2.0f;    // stores written through, ticket, partial sums read
  constexpr float kCacheTerabytes = 25;     // a second, from all L2s: of 34.4 at most (AMD's)
  constexpr float kLinesInFlight = 32768;   // bytes that the L1 of a CU tracks at once
  constexpr float kFillBytesPerClock = 48;  // L2 to L1, of 64
  constexpr float kSumBytesPerClock = 16;   // partial sums that a workgroup reads

  const Schedule schedule = schedule_of(s, c);
  const float workgroups = static_cast<float>(schedule.workgroups());
  const float tiles = static_cast<float>(schedule.tiles);
  const float w_total = static_cast<float>(s.n) * s.k * s.w_bytes;
  const float a_once = static_cast<float>(s.m) * s.k * s.a_bytes;
  const float tile_sums = static_cast<float>(s.m) * c.block_n * 4;  // bytes
  const float clocks_per_us = target.gigahertz * 1000;
  const int32_t block_m = block_m_of(s.m);

  SkinnyGemmTime time = {};
  const float contributors =
      schedule.streamed() ? workgroups / tiles + 1 : static_cast<float>(c.split_k);
  const bool shared = schedule.slots() != 0;
  const float partials = shared ? tiles * contributors * tile_sums : 0;
  time.memory =
      (w_total + a_once + s.m * 2.0f * s.n + 2 * partials) / (target.terabytes_per_s * 1e6f);
  time.cache = (w_total + a_once * tiles) / (kCacheTerabytes * 1e6f);

  // Workgroups that a CU holds at once, and the rounds that it takes.
  int32_t at_once = waves_per_simd(block_m, c.block_n, s.a_bytes, s.w_bytes) * 4 / c.waves;
  const int32_t by_lds = target.lds_bytes / lds_bytes_of(s, c);
  if (at_once > by_lds) at_once = by_lds;
  if (at_once < 1) at_once = 1;
  const int32_t capacity = at_once * target.compute_units;
  const int32_t rounds = (schedule.workgroups() + capacity - 1) / capacity;
  time.latency = kLaunchUs + kMemoryUs * rounds + kSumUs;

  // The busiest CU takes in its workgroups' shares of w, and all of a for each tile. Little's law
  // twice: the waves' loads in flight turn over in the time of a load from memory, and L1 tracks a
  // line for as long as its load takes.
  const int32_t busiest = (schedule.workgroups() + target.compute_units - 1) / target.compute_units;
  const float a_total = a_once * tiles;
  const float in_flight = static_cast<float>(busiest < at_once ? busiest : at_once) * c.waves *
                          register_stages(block_m, c.block_n, s.a_bytes, s.w_bytes) * 128 *
                          static_cast<float>(c.block_n * s.w_bytes + s.m * s.a_bytes);
  const float turns = (w_total + a_total) * kMemoryUs / in_flight;
  const float lines = (w_total * kMemoryUs + a_total * kCacheUs) / kLinesInFlight;
  const float fill = (w_total + a_total) / (kFillBytesPerClock * clocks_per_us);
  time.unit = busiest / workgroups * std::max({turns, lines, fill});
  if (shared) {
    time.sharing = kPartialSumsUs + contributors * tile_sums / (kSumBytesPerClock * clocks_per_us);
  }
  return time;
}

}  // namespace rocm_kernels::cdna::skinny
