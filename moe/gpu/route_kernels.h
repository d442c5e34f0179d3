// The kernels of routing.h.
//
//   route   a block a chunk of slots, which counts all slots for itself and places its own
//
// or, of more than kMostChunksTogether chunks:
//
//   count   a block a chunk of slots: how many each expert has of it
//   plan    one block: where each expert's rows begin, where each chunk's lie among them, the tiles
//   place   a block a chunk: row_slots, the slot of each row
//
// grouped_gemm comes with its rows in order: it takes the plan alone. Thread e of a block is expert
// e's. An expert's rows are in the order of slots, whatever order blocks run in.
#pragma once

#include "../../common/gpu/barrier.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/lanes.h"
#include "../../common/gpu/launch.h"
#include "routing.h"

namespace rocm_kernels {

constexpr int kStepsOfChunk = kSlotsPerChunk / kRouteThreads;  // slots of a thread
// Chunks that one launch routes: each block reads all ids, so that its time grows with them, and
// that of three launches less (docs/kernels/moe_journal.md).
constexpr int kMostChunksTogether = 32;

// What the threads of a block share.
struct RoutingScratch {
  int32_t rows[kRouteThreads];     // counts, then the rows that experts' slots go to
  int32_t ends[2][kRouteThreads];  // of the experts' rows, of their tiles
  int32_t totals[2][kRouteThreads / kWaveSize];
  int32_t of_waves[kRouteThreads / kWaveSize][kRouteThreads];  // each wave's slots of each expert
};

// ends[n][thread] becomes the sum of values[n] of all threads up to and with this one.
ROCM_KERNELS_DEVICE void add_up(const int32_t (&values)[2], RoutingScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  const int wave = thread / kWaveSize, lane = thread % kWaveSize;
  int32_t sums[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    sums[n] = sum_to_lane(values[n]);
    if (lane == kWaveSize - 1) scratch.totals[n][wave] = sums[n];
  }
  lds_barrier();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int other = 0; other < kRouteThreads / kWaveSize; ++other) {
      sums[n] += other < wave ? scratch.totals[n][other] : 0;
    }
    scratch.ends[n][thread] = sums[n];
  }
  lds_barrier();
}

// The experts of a thread's slots of a chunk, -1 for none.
ROCM_KERNELS_DEVICE void experts_of(const RoutingProblem& p, int chunk,
                                    int32_t (&experts)[kStepsOfChunk]) {
#pragma unroll
  for (int step = 0; step < kStepsOfChunk; ++step) {
    const int64_t slot = static_cast<int64_t>(chunk) * kSlotsPerChunk + step * kRouteThreads +
                         static_cast<int>(threadIdx.x);
    experts[step] = p.ids[slot < p.slots ? slot : p.slots - 1];
    if (slot >= p.slots || experts[step] < 0 || experts[step] >= p.experts) experts[step] = -1;
  }
}

// Adds a thread's slots to those of their experts.
ROCM_KERNELS_DEVICE void count_slots(const int32_t (&experts)[kStepsOfChunk],
                                     int32_t (&counts)[kRouteThreads]) {
#pragma unroll
  for (const int32_t expert : experts) {
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
}

// Block `block`'s share of the tiles, of `blocks`, and how many there are. `rows`: of expert
// threadIdx.x. Leaves the row where each expert's end in scratch.ends[0].
ROCM_KERNELS_DEVICE void plan_tiles(const RoutingProblem& p, int32_t rows, RoutingScratch& scratch,
                                    int block, int blocks) {
  const int thread = static_cast<int>(threadIdx.x);
  add_up({rows, (rows + p.block_m - 1) / p.block_m}, scratch);
  const int32_t tiles = scratch.ends[1][kRouteThreads - 1];
  for (int tile = block * kRouteThreads + thread; tile < tiles; tile += blocks * kRouteThreads) {
    // The first expert whose tiles end beyond this one.
    int expert = 0;
    for (int step = kRouteThreads / 2; step > 0; step /= 2) {
      if (scratch.ends[1][expert + step - 1] <= tile) expert += step;
    }
    const int32_t first = expert == 0 ? 0 : scratch.ends[1][expert - 1];
    const int32_t first_row = expert == 0 ? 0 : scratch.ends[0][expert - 1];
    const int32_t begin = first_row + (tile - first) * p.block_m;
    const int32_t end = scratch.ends[0][expert];
    p.tiles[tile] = {expert, begin, end < begin + p.block_m ? end : begin + p.block_m, 0};
    if (kNvidia && p.groups != nullptr) {
      p.groups[tile] = TileGroup::of(tile, expert, {first, scratch.ends[1][expert]},
                                     {first_row, end}, p.block_m, p.group_m);
    }
  }
  if (block == 0 && thread == 0) {
    p.tile_count[0] = tiles;
    p.tile_count[1] = scratch.ends[0][kRouteThreads - 1];
  }
}

// row_slots of a chunk. scratch.rows: the row that each expert's first slot of it goes to.
ROCM_KERNELS_DEVICE void place_chunk(const RoutingProblem& p, int chunk,
                                     const int32_t (&experts)[kStepsOfChunk],
                                     RoutingScratch& scratch) {
  constexpr int kWaves = kRouteThreads / kWaveSize;
  const int thread = static_cast<int>(threadIdx.x), wave = thread / kWaveSize;
#pragma unroll 1
  for (int step = 0; step < kStepsOfChunk; ++step) {
    const int64_t first = static_cast<int64_t>(chunk) * kSlotsPerChunk + step * kRouteThreads;
    if (first >= p.slots) return;
    const int32_t expert = step == 0 ? experts[0] : experts[1];
    static_assert(kStepsOfChunk == 2 && kMaxExperts <= 512,
                  "place_chunk: an id has nine bits, and is kept in a register");
#pragma unroll
    for (int other = 0; other < kWaves; ++other) scratch.of_waves[other][thread] = 0;
    const LaneMask same = same_lanes<9>(expert) & ballot(expert >= 0);
    const int before = bits_below(same);
    lds_barrier();
    if (expert >= 0 && before == 0) scratch.of_waves[wave][expert] = bits_of(same);
    lds_barrier();
    // Counts become rows: of the thread's expert.
    int32_t row = scratch.rows[thread];
    int32_t counts[kWaves];
#pragma unroll
    for (int other = 0; other < kWaves; ++other) counts[other] = scratch.of_waves[other][thread];
#pragma unroll
    for (int other = 0; other < kWaves; ++other) {
      scratch.of_waves[other][thread] = row;
      row += counts[other];
    }
    scratch.rows[thread] = row;
    lds_barrier();
    if (expert >= 0) {
      row = scratch.of_waves[wave][expert] + before;
      p.row_slots[row] = static_cast<int32_t>(first) + thread;
    }
    if (p.slot_rows != nullptr && first + thread < p.slots) {
      p.slot_rows[first + thread] = expert >= 0 ? row : -1;
    }
    lds_barrier();
  }
}

// Grid: p.chunks blocks of kRouteThreads.
__global__ void __launch_bounds__(kRouteThreads) moe_route_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch scratch;
  const int thread = static_cast<int>(threadIdx.x), chunk = static_cast<int>(blockIdx.x);
  constexpr int kAtOnce = 8;  // chunks whose ids are on their way together
  // How many slots each expert has in the chunks before this one; and from it on.
  auto& counts = scratch.ends;
  counts[0][thread] = counts[1][thread] = 0;
  begin_after_previous_kernel();
  int32_t experts[kStepsOfChunk];
  experts_of(p, chunk, experts);
  lds_barrier();
  if (p.chunks == 1) {
    count_slots(experts, counts[1]);
  } else {
#pragma unroll 1
    for (int first = 0; first < p.chunks; first += kAtOnce) {
      int32_t of_all[kAtOnce][kStepsOfChunk];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) experts_of(p, first + i, of_all[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) count_slots(of_all[i], counts[first + i >= chunk]);
    }
  }
  lds_barrier();
  const int32_t before = counts[0][thread], rows = before + counts[1][thread];
  plan_tiles(p, rows, scratch, chunk, p.chunks);
  scratch.rows[thread] = scratch.ends[0][thread] - rows + before;
  lds_barrier();
  place_chunk(p, chunk, experts, scratch);
}

// Grid: p.chunks blocks of kRouteThreads.
__global__ void __launch_bounds__(kRouteThreads) moe_count_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch scratch;
  const int thread = static_cast<int>(threadIdx.x), chunk = static_cast<int>(blockIdx.x);
  begin_after_previous_kernel();
  int32_t experts[kStepsOfChunk];
  scratch.rows[thread] = 0;
  experts_of(p, chunk, experts);
  lds_barrier();
  count_slots(experts, scratch.rows);
  lds_barrier();
  if (thread < p.experts) {
    p.counts[static_cast<int64_t>(chunk) * p.experts + thread] = scratch.rows[thread];
  }
}

// Grid: one block of kRouteThreads.
__global__ void __launch_bounds__(kRouteThreads) moe_plan_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch scratch;
  const int expert = static_cast<int>(threadIdx.x);
  begin_after_previous_kernel();
  int32_t rows = 0;
  if (p.ids == nullptr) {
    // Ends in any order but ascending, or beyond the rows, must not lead anywhere.
    int32_t end = 0;
    if (expert < p.experts) {
      const int32_t given = p.offsets[expert];
      end = given < 0 ? 0 : given > p.slots ? static_cast<int32_t>(p.slots) : given;
    }
    scratch.rows[expert] = end;
    lds_barrier();
    int32_t before = 0;
    for (int e = 0; e < expert && e < p.experts; ++e) {
      before = scratch.rows[e] > before ? scratch.rows[e] : before;
    }
    rows = end > before ? end - before : 0;
  } else if (expert < p.experts) {
#pragma unroll 8
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      rows += p.counts[static_cast<int64_t>(chunk) * p.experts + expert];
    }
  }
  plan_tiles(p, rows, scratch, 0, 1);
  if (p.ids == nullptr || expert >= p.experts) return;
  // Counts become rows, some chunks at a time: loads that follow stores wait for each other.
  constexpr int kAtOnce = 8;
  int32_t row = scratch.ends[0][expert] - rows;
  for (int first = 0; first < p.chunks; first += kAtOnce) {
    int32_t* const counts = p.counts + static_cast<int64_t>(first) * p.experts + expert;
    int32_t own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      own[i] = first + i < p.chunks ? counts[static_cast<int64_t>(i) * p.experts] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < p.chunks) counts[static_cast<int64_t>(i) * p.experts] = row;
      row += own[i];
    }
  }
}

// Grid: p.chunks blocks of kRouteThreads.
__global__ void __launch_bounds__(kRouteThreads) moe_place_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch scratch;
  const int thread = static_cast<int>(threadIdx.x), chunk = static_cast<int>(blockIdx.x);
  begin_after_previous_kernel();
  scratch.rows[thread] =
      thread < p.experts ? p.counts[static_cast<int64_t>(chunk) * p.experts + thread] : 0;
  int32_t experts[kStepsOfChunk];
  experts_of(p, chunk, experts);
  lds_barrier();
  place_chunk(p, chunk, experts, scratch);
}

inline Status launch_routing_kernels(const RoutingProblem& p, const DeviceFacts& facts,
                                     Stream stream) {
  Launch launch;
  launch.grid = dim3(1);
  launch.block = kRouteThreads;
  launch.stream = stream;
  launch.early = facts.is_hopper_or_later();
  if (p.ids == nullptr) return launch_kernel(moe_plan_kernel, launch, p);
  Launch spread = launch;
  spread.grid = dim3(static_cast<unsigned>(p.chunks));
  if (p.chunks <= kMostChunksTogether) return launch_kernel(moe_route_kernel, spread, p);
  if (const Status error = launch_kernel(moe_count_kernel, spread, p)) return error;
  if (const Status error = launch_kernel(moe_plan_kernel, launch, p)) return error;
  return launch_kernel(moe_place_kernel, spread, p);
}

}  // namespace rocm_kernels
