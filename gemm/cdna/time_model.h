// How long a config of gemm would take: what a compute unit's matrix pipes, LDS and loads ask for
// each line of K, and what the memories must deliver. It ranks configs; it is not a measurement.
//
// Its numbers were fitted to the simulator's cycle model (gfx942, some 180 launches of 30 products
// of 72 to 4096 rows, FP8 and bfloat16), so they are as good as that is; docs/kernels/gemm.md tells
// how far the choice is from the best config there.
#pragma once

#include <algorithm>
#include <cmath>

#include "config.h"

namespace rocm_kernels::cdna {

// Parts of a modelled time, in microseconds.
struct GemmTime {
  float units;    // the busiest compute unit's lines
  float tiles;    // beginnings and ends of its tiles
  float memory;   // bytes that must cross the memory interface, at the sustained rate
  float sharing;  // partial sums of tiles with several contributors
  float launch;   // and what is written at the end
  float total() const { return std::max(units + tiles, memory) + sharing + launch; }
};

inline GemmTime modelled_time(const GemmShape& s, const GemmConfig& c, const Target& target) {
  constexpr float kLaunchUs = 1.6f;            // dispatch, arguments, first loads
  constexpr float kFirstLoadCycles = 530;      // of a tile, where no other fills its pauses
  constexpr float kTurnCycles = 1640;          // of a line alone: barriers, the way through LDS
  constexpr float kFillBytesPerCycle = 24;     // L2 to a compute unit, of 64
  constexpr float kStoreBytesPerCycle = 6.3f;  // the end of a tile: factors, rounding, stores
  constexpr float kScalingSums = 43;           // block-scaled a cycle
  constexpr float kPartialBytesPerCycle = 14;  // the last contributor's reads
  constexpr float kSharingUs = 1.0f;     // tickets, and stores until the other workgroups see them
  constexpr float kHandoffCycles = 370;  // of a contributor's sums, besides their bytes
  constexpr float kInfinityBytesPerUs = 10.6e6f;  // Infinity Cache to the L2s
  constexpr float kWriteBytesPerUs = 4.0e6f;

  const GemmTile& tile = kGemmTiles[find_gemm_tile(c.block_m, c.block_n, s.block_scaled)];
  const Schedule schedule = schedule_of(s, c);
  const float cycles_per_us = target.gigahertz * 1000;
  const int32_t cus = target.compute_units;
  const int32_t workgroups = schedule.workgroups();
  const float lines = static_cast<float>(schedule.k_blocks) * schedule.tiles;

  // Lines and tiles of the busiest compute unit. Stream-K divides lines evenly.
  float busiest_lines, busiest_tiles;
  if (schedule.streamed()) {
    const float rounds = std::ceil(static_cast<float>(workgroups) / cus);
    busiest_lines = rounds * std::ceil(lines / workgroups);
    busiest_tiles = rounds * (std::ceil(busiest_lines / rounds / schedule.k_blocks) + 1);
  } else {
    busiest_tiles = static_cast<float>((workgroups + cus - 1) / cus);
    busiest_lines = busiest_tiles * std::ceil(static_cast<float>(schedule.k_blocks) / c.split_k);
  }
  const int32_t at_once =
      std::min(workgroups_at_once(tile, target), std::max(1, (workgroups + cus - 1) / cus));

  // Cycles of a line: what each resource needs for it, or what a workgroup alone takes from one
  // line to the next where no other fills its pauses.
  const float outputs = static_cast<float>(tile.block_m) * tile.block_n;
  const float mma = outputs / (target.gfx950 ? 32 : 16);
  const float scaling = s.block_scaled ? outputs / kScalingSums : 0;
  const float rows = static_cast<float>(tile.block_m + tile.block_n);
  const float lds = tile.waves() * static_cast<float>(tile.wave_m() + tile.wave_n()) + rows;
  const float fill = rows * kLine / kFillBytesPerCycle;
  const float alone = mma + scaling + rows + kTurnCycles;
  const float line = std::max({mma + scaling, lds, fill, alone / at_once});

  GemmTime time = {};
  time.units = busiest_lines * line / cycles_per_us;
  const float store = outputs * 2 / kStoreBytesPerCycle;
  time.tiles = (busiest_tiles * store + busiest_tiles / at_once * kFirstLoadCycles) / cycles_per_us;

  // Each XCD reads what its workgroups share once a line; the Infinity Cache answers.
  const float together =
      std::min<float>(workgroups, static_cast<float>(at_once * cus)) / target.xcds;
  const float group = std::min<float>(c.group_m, together);
  const float shared_rows = group * c.block_m + std::ceil(together / group) * c.block_n;
  const float rounds = lines / (together * target.xcds);
  const float infinity = rounds * target.xcds * shared_rows * kLine / kInfinityBytesPerUs;
  const float out = 2.0f * s.m * s.n;
  const float once =
      static_cast<float>(s.m) * s.k * s.a_bytes + static_cast<float>(s.n) * s.k * s.w_bytes + out;

  // Every contributor to a shared tile leaves its sums in memory; the last one reads them all, one
  // after another. A stream-K worker shares the tiles that its range begins and ends in.
  float partials = 0;
  if (schedule.slots() != 0) {
    const float shared_tiles = static_cast<float>(schedule.tiles - schedule.whole_tiles());
    const float left = schedule.streamed() ? std::min(2.0f * workgroups, workgroups + shared_tiles)
                                           : static_cast<float>(workgroups);
    const float contributors =
        schedule.streamed() ? 1 + workgroups / shared_tiles : static_cast<float>(c.split_k);
    partials = left * outputs * 4;
    time.sharing =
        kSharingUs +
        contributors * (outputs * 4 / kPartialBytesPerCycle + kHandoffCycles) / cycles_per_us +
        partials / kWriteBytesPerUs;
  }
  time.memory = std::max(infinity, (once + partials) / (target.terabytes_per_s * 1e6f));
  time.launch = kLaunchUs + out / kWriteBytesPerUs;
  return time;
}

}  // namespace rocm_kernels::cdna
