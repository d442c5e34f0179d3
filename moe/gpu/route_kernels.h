// The kernels of routing (product.h).
//
//   route   a block a chunk of slots, which counts all slots for itself and places its own
//
// or, of more than kMostChunksTogether chunks:
//
//   count   a block a chunk of slots: how many each expert has of it
//   plan    one block: where each expert's rows begin, where each chunk's lie among them, the tiles
//   place   a block a chunk: row_slots, the slot of each row
//
// Timeline. Blocks meet where a launch ends, nowhere else. | is a barrier of the block.
//
//   route   ids of the own chunk | ids of all chunks, 8 chunks at once: how many slots each expert
//           has, before the own chunk and from it on, counted in LDS
//           | plan_tiles: where experts' rows end (add_up | |), the block's share of the tiles
//           | place_chunk, kRouteThreads slots at a time: the row of each slot, to row_slots |
//   count   ids of the own chunk | counted in LDS | to memory
//   plan    counts of all chunks, or grouped_gemm's ends; plan_tiles; counts in memory become the
//           row of each chunk's first slot of each expert
//   place   these rows, ids of the own chunk | place_chunk
//
// grouped_gemm comes with its rows in order: it takes the plan alone. An expert's rows are in the
// order of slots, whatever order blocks run in.
//
// Thread t of a block is that of experts kEach * t and the kEach - 1 that follow: of one expert
// each where they are few.
#pragma once

#include "../../common/gpu/barrier.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/lanes.h"
#include "../../common/gpu/launch.h"
#include "product.h"

namespace rocm_kernels {

constexpr int kStepsOfChunk = kSlotsPerChunk / kRouteThreads;  // slots of a thread
// Chunks that one launch routes: each block reads all ids, so that its time grows with them, and
// that of three launches less (docs/kernels/moe_journal.md).
constexpr int kMostChunksTogether = 32;

constexpr int kMostEach = kMaxExperts / kRouteThreads;  // experts of a thread

// What the threads of a block share.
template <int kEach>
struct RoutingScratch {
  static constexpr int kExperts = kEach * kRouteThreads;
  int32_t rows[kExperts];     // counts, then the rows that experts' slots go to
  int32_t ends[2][kExperts];  // of the experts' rows, of their tiles
  int32_t totals[2][kRouteThreads / kWaveSize];
  // Each wave's slots of each expert. Of more experts shared memory does not hold it.
  int32_t of_waves[kEach == 1 ? kRouteThreads / kWaveSize : 1][kEach == 1 ? kExperts : 1];
};

// ends[n][e] becomes the sum of values[n] of all experts up to and with e.
template <int kEach>
ROCM_KERNELS_DEVICE void add_up(const int32_t (&values)[2][kEach], RoutingScratch<kEach>& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  const int wave = thread / kWaveSize, lane = thread % kWaveSize;
  int32_t sums[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int32_t own = 0;
#pragma unroll
    for (const int32_t value : values[n]) own += value;
    sums[n] = sum_to_lane(own);
    if (lane == kWaveSize - 1) scratch.totals[n][wave] = sums[n];
  }
  lds_barrier();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int other = 0; other < kRouteThreads / kWaveSize; ++other) {
      sums[n] += other < wave ? scratch.totals[n][other] : 0;
    }
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      scratch.ends[n][thread * kEach + i] = sums[n];
      sums[n] -= values[n][i];
    }
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
ROCM_KERNELS_DEVICE void count_slots(const int32_t (&experts)[kStepsOfChunk], int32_t* counts) {
#pragma unroll
  for (const int32_t expert : experts) {
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
}

// Block `block`'s share of the tiles, of `blocks`, and how many there are. `rows`: of the thread's
// experts. Leaves the row where each expert's end in scratch.ends[0].
template <int kEach>
ROCM_KERNELS_DEVICE void plan_tiles(const RoutingProblem& p, const int32_t (&rows)[kEach],
                                    RoutingScratch<kEach>& scratch, int block, int blocks) {
  constexpr int kExperts = RoutingScratch<kEach>::kExperts;
  const int thread = static_cast<int>(threadIdx.x);
  int32_t sizes[2][kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    sizes[0][i] = rows[i];
    sizes[1][i] = (rows[i] + p.block_m - 1) / p.block_m;
  }
  add_up(sizes, scratch);
  const int32_t tiles = scratch.ends[1][kExperts - 1];
  for (int tile = block * kRouteThreads + thread; tile < tiles; tile += blocks * kRouteThreads) {
    // The first expert whose tiles end beyond this one.
    int expert = 0;
    for (int step = kExperts / 2; step > 0; step /= 2) {
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
    p.tile_count[1] = scratch.ends[0][kExperts - 1];
  }
}

// The row of a slot of `expert`, -1 for none: slots come by wave, then by lane. All threads of the
// block call it. scratch.rows, where each expert's next slot goes, moves on behind these.
template <int kEach>
ROCM_KERNELS_DEVICE int32_t row_of_slot(int32_t expert, RoutingScratch<kEach>& scratch) {
  constexpr int kWaves = kRouteThreads / kWaveSize, kIdBits = kEach == 1 ? 9 : 11;
  static_assert(RoutingScratch<kEach>::kExperts <= 1 << kIdBits, "row_of_slot: bits of an id");
  const int thread = static_cast<int>(threadIdx.x), wave = thread / kWaveSize;
  int32_t row = 0;
  if constexpr (kEach == 1) {
#pragma unroll
    for (int other = 0; other < kWaves; ++other) scratch.of_waves[other][thread] = 0;
  }
  const LaneMask same = same_lanes<kIdBits>(expert) & ballot(expert >= 0);
  const int before = bits_below(same);
  lds_barrier();
  if constexpr (kEach == 1) {
    if (expert >= 0 && before == 0) scratch.of_waves[wave][expert] = bits_of(same);
    lds_barrier();
    // Counts become rows: of the thread's expert.
    row = scratch.rows[thread];
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
    row = expert >= 0 ? scratch.of_waves[wave][expert] + before : -1;
  } else {
    // Waves take turns.
    for (int turn = 0; turn < kWaves; ++turn) {
      const bool own = wave == turn && expert >= 0;
      if (own) row = scratch.rows[expert] + before;
      lds_barrier();
      if (own && before == 0) scratch.rows[expert] = row + bits_of(same);
      lds_barrier();
    }
    row = expert >= 0 ? row : -1;
  }
  return row;
}

// row_slots of a chunk. scratch.rows: the row that each expert's first slot of it goes to.
template <int kEach>
ROCM_KERNELS_DEVICE void place_chunk(const RoutingProblem& p, int chunk,
                                     const int32_t (&experts)[kStepsOfChunk],
                                     RoutingScratch<kEach>& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int step = 0; step < kStepsOfChunk; ++step) {
    const int64_t first = static_cast<int64_t>(chunk) * kSlotsPerChunk + step * kRouteThreads;
    if (first >= p.slots) return;
    static_assert(kStepsOfChunk == 2, "place_chunk: an id is kept in a register");
    const int32_t row = row_of_slot(step == 0 ? experts[0] : experts[1], scratch);
    if (row >= 0) p.row_slots[row] = static_cast<int32_t>(first) + thread;
    if (p.slot_rows != nullptr && first + thread < p.slots) p.slot_rows[first + thread] = row;
    lds_barrier();
  }
}

// Grid: p.chunks blocks of kRouteThreads.
template <int kEach>
__global__ void __launch_bounds__(kRouteThreads) moe_route_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch<kEach> scratch;
  const int thread = static_cast<int>(threadIdx.x), chunk = static_cast<int>(blockIdx.x);
  constexpr int kAtOnce = 8;  // chunks whose ids are on their way together
  // How many slots each expert has in the chunks before this one; and from it on.
  auto& counts = scratch.ends;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    counts[0][thread * kEach + i] = counts[1][thread * kEach + i] = 0;
  }
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
  int32_t before[kEach], rows[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    before[i] = counts[0][thread * kEach + i];
    rows[i] = before[i] + counts[1][thread * kEach + i];
  }
  plan_tiles(p, rows, scratch, chunk, p.chunks);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = thread * kEach + i;
    scratch.rows[expert] = scratch.ends[0][expert] - rows[i] + before[i];
  }
  lds_barrier();
  place_chunk(p, chunk, experts, scratch);
}

// Grid: p.chunks blocks of kRouteThreads.
template <int kEach>
__global__ void __launch_bounds__(kRouteThreads) moe_count_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch<kEach> scratch;
  const int thread = static_cast<int>(threadIdx.x), chunk = static_cast<int>(blockIdx.x);
  begin_after_previous_kernel();
  int32_t experts[kStepsOfChunk];
#pragma unroll
  for (int i = 0; i < kEach; ++i) scratch.rows[thread * kEach + i] = 0;
  experts_of(p, chunk, experts);
  lds_barrier();
  count_slots(experts, scratch.rows);
  lds_barrier();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = thread * kEach + i;
    if (expert < p.experts) {
      p.counts[static_cast<int64_t>(chunk) * p.experts + expert] = scratch.rows[expert];
    }
  }
}

// grouped_gemm's rows of the thread's experts. Ends in any order but ascending, or beyond the rows,
// must not lead anywhere.
template <int kEach>
ROCM_KERNELS_DEVICE void rows_of_offsets(const RoutingProblem& p, RoutingScratch<kEach>& scratch,
                                         int32_t (&rows)[kEach]) {
  const int thread = static_cast<int>(threadIdx.x);
  int32_t ends[kEach], greatest = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = thread * kEach + i;
    const int32_t given = expert < p.experts ? p.offsets[expert] : 0;
    ends[i] = given < 0 ? 0 : given > p.slots ? static_cast<int32_t>(p.slots) : given;
    greatest = ends[i] > greatest ? ends[i] : greatest;
  }
  scratch.rows[thread] = greatest;
  lds_barrier();
  int32_t before = 0;
  for (int other = 0; other < thread && other * kEach < p.experts; ++other) {
    before = scratch.rows[other] > before ? scratch.rows[other] : before;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    rows[i] = ends[i] > before ? ends[i] - before : 0;
    before = ends[i] > before ? ends[i] : before;
  }
}

// Grid: one block of kRouteThreads.
template <int kEach>
__global__ void __launch_bounds__(kRouteThreads) moe_plan_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch<kEach> scratch;
  const int thread = static_cast<int>(threadIdx.x);
  begin_after_previous_kernel();
  int32_t rows[kEach] = {};
  if (p.ids == nullptr) {
    rows_of_offsets(p, scratch, rows);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = thread * kEach + i;
      if (expert >= p.experts) continue;
#pragma unroll 8
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        rows[i] += p.counts[static_cast<int64_t>(chunk) * p.experts + expert];
      }
    }
  }
  plan_tiles(p, rows, scratch, 0, 1);
  if (p.ids == nullptr) return;
  // Counts become rows, some chunks at a time: loads that follow stores wait for each other.
  constexpr int kAtOnce = 8;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = thread * kEach + i;
    if (expert >= p.experts) return;
    int32_t row = scratch.ends[0][expert] - rows[i];
    for (int first = 0; first < p.chunks; first += kAtOnce) {
      int32_t* const counts = p.counts + static_cast<int64_t>(first) * p.experts + expert;
      int32_t own[kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        own[c] = first + c < p.chunks ? counts[static_cast<int64_t>(c) * p.experts] : 0;
      }
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (first + c < p.chunks) counts[static_cast<int64_t>(c) * p.experts] = row;
        row += own[c];
      }
    }
  }
}

// Grid: p.chunks blocks of kRouteThreads.
template <int kEach>
__global__ void __launch_bounds__(kRouteThreads) moe_place_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch<kEach> scratch;
  const int thread = static_cast<int>(threadIdx.x), chunk = static_cast<int>(blockIdx.x);
  begin_after_previous_kernel();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = thread * kEach + i;
    scratch.rows[expert] =
        expert < p.experts ? p.counts[static_cast<int64_t>(chunk) * p.experts + expert] : 0;
  }
  int32_t experts[kStepsOfChunk];
  experts_of(p, chunk, experts);
  lds_barrier();
  place_chunk(p, chunk, experts, scratch);
}

template <int kEach>
Status launch_routing_kernels(const RoutingProblem& p, const DeviceFacts& facts, Stream stream) {
  Launch launch;
  launch.grid = dim3(1);
  launch.block = kRouteThreads;
  launch.stream = stream;
  launch.early = facts.is_hopper_or_later();
  if (p.ids == nullptr) return launch_kernel(moe_plan_kernel<kEach>, launch, p);
  Launch spread = launch;
  spread.grid = dim3(static_cast<unsigned>(p.chunks));
  if (p.chunks <= kMostChunksTogether) return launch_kernel(moe_route_kernel<kEach>, spread, p);
  if (const Status error = launch_kernel(moe_count_kernel<kEach>, spread, p)) return error;
  if (const Status error = launch_kernel(moe_plan_kernel<kEach>, launch, p)) return error;
  return launch_kernel(moe_place_kernel<kEach>, spread, p);
}

inline Status launch_routing_kernels(const RoutingProblem& p, const DeviceFacts& facts,
                                     Stream stream) {
  return p.experts <= kRouteThreads ? launch_routing_kernels<1>(p, facts, stream)
                                    : launch_routing_kernels<kMostEach>(p, facts, stream);
}

}  // namespace rocm_kernels
