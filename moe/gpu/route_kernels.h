// The kernels of routing.h.
//
//   count   a block a chunk of slots: how many each expert has of it
//   plan    one block: where each expert's rows begin, where each chunk's lie among them, the tiles
//   place   a block a chunk: row_slots, the slot of each row
//
// One block does all three where there is one chunk. grouped_gemm comes with its rows in order: it
// takes the plan alone. Thread e of a block is expert e's. An expert's rows are in the order of
// slots, whatever order blocks run in.
#pragma once

#include "../../common/gpu/barrier.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "routing.h"

namespace rocm_kernels {

// What the threads of a block share.
struct RoutingScratch {
  int32_t rows[kRouteThreads];     // counts, then the rows that experts' slots go to
  int32_t ends[2][kRouteThreads];  // of the experts' rows, of their tiles
};

// ends[i] becomes the sum of all up to and with i.
ROCM_KERNELS_DEVICE void add_up(int32_t (&ends)[kRouteThreads]) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int step = 1; step < kRouteThreads; step *= 2) {
    lds_barrier();
    const int32_t before = thread >= step ? ends[thread - step] : 0;
    lds_barrier();
    ends[thread] += before;
  }
  lds_barrier();
}

// The expert of slot `index` of a chunk's step, -1 for none.
ROCM_KERNELS_DEVICE int32_t expert_of(const RoutingProblem& p, int64_t slot) {
  if (slot >= p.slots) return -1;
  const int32_t id = p.ids[slot];
  return id >= 0 && id < p.experts ? id : -1;
}

// scratch.rows: how many slots of the chunk each expert has.
ROCM_KERNELS_DEVICE void count_chunk(const RoutingProblem& p, int chunk, RoutingScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  scratch.rows[thread] = 0;
  lds_barrier();
  for (int step = 0; step < kSlotsPerChunk; step += kRouteThreads) {
    const int64_t slot = static_cast<int64_t>(chunk) * kSlotsPerChunk + step + thread;
    const int32_t expert = expert_of(p, slot);
    if (expert >= 0) atomicAdd(&scratch.rows[expert], 1);
  }
  lds_barrier();
}

// The tiles, and how many. `rows`: of expert threadIdx.x. Leaves the row where each expert's end in
// scratch.ends[0].
ROCM_KERNELS_DEVICE void plan_tiles(const RoutingProblem& p, int32_t rows,
                                    RoutingScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  scratch.ends[0][thread] = rows;
  scratch.ends[1][thread] = (rows + p.block_m - 1) / p.block_m;
  add_up(scratch.ends[0]);
  add_up(scratch.ends[1]);
  const int32_t tiles = scratch.ends[1][kRouteThreads - 1];
  for (int tile = thread; tile < tiles; tile += kRouteThreads) {
    // The first expert whose tiles end beyond this one.
    int expert = 0;
    for (int step = kRouteThreads / 2; step > 0; step /= 2) {
      if (scratch.ends[1][expert + step - 1] <= tile) expert += step;
    }
    const int32_t first = expert == 0 ? 0 : scratch.ends[1][expert - 1];
    const int32_t begin =
        (expert == 0 ? 0 : scratch.ends[0][expert - 1]) + (tile - first) * p.block_m;
    const int32_t end = scratch.ends[0][expert];
    p.tiles[tile] = {expert, begin, end < begin + p.block_m ? end : begin + p.block_m, 0};
  }
  if (thread == 0) {
    p.tile_count[0] = tiles;
    p.tile_count[1] = scratch.ends[0][kRouteThreads - 1];
  }
}

// The lanes of this wave whose expert is this lane's: how many there are, and how many before it.
struct SameExpert {
  int all, before;
};
ROCM_KERNELS_DEVICE SameExpert same_expert(int32_t expert) {
  const unsigned lane = threadIdx.x % kWaveSize;
#if defined(__CUDACC__)
  const uint64_t same = __match_any_sync(~0u, expert);
#else
  // Of -1 to 511, a bit at a time: the lanes that have this lane's.
  uint64_t same = ~uint64_t{0} >> (64 - kWaveSize);
#pragma unroll
  for (int bit = 0; bit < 10; ++bit) {
    const bool is_set = expert >> bit & 1;
    const uint64_t set = __builtin_amdgcn_ballot_w64(is_set);
    same &= is_set ? set : ~set;
  }
#endif
  const uint64_t before = same & ((uint64_t{1} << lane) - 1);
#if defined(__CUDACC__)
  return {__popc(static_cast<unsigned>(same)), __popc(static_cast<unsigned>(before))};
#else
  return {__builtin_popcountll(same), __builtin_popcountll(before)};
#endif
}

// row_slots of a chunk. scratch.rows: the row that each expert's first slot of it goes to. Waves
// take turns, so an expert's rows are in the order of slots.
ROCM_KERNELS_DEVICE void place_chunk(const RoutingProblem& p, int chunk, RoutingScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int step = 0; step < kSlotsPerChunk; step += kRouteThreads) {
    const int64_t first = static_cast<int64_t>(chunk) * kSlotsPerChunk + step;
    if (first >= p.slots) return;
    const int64_t slot = first + thread;
    const int32_t expert = expert_of(p, slot);
    const SameExpert same = same_expert(expert);
    int32_t row = -1;
    for (int wave = 0; wave < kRouteThreads / kWaveSize; ++wave) {
      if (thread / kWaveSize == wave) {
        if (expert >= 0) row = scratch.rows[expert] + same.before;
        wave_barrier();  // all lanes have read what one of them now writes
        if (expert >= 0 && same.before == same.all - 1) scratch.rows[expert] = row + 1;
      }
      lds_barrier();
    }
    if (slot >= p.slots) continue;
    if (expert >= 0) p.row_slots[row] = static_cast<int32_t>(slot);
    if (p.slot_rows != nullptr) p.slot_rows[slot] = row;
  }
}

// One chunk of slots. Grid: one block of kRouteThreads.
__global__ void __launch_bounds__(kRouteThreads) moe_route_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch scratch;
  const int thread = static_cast<int>(threadIdx.x);
  begin_after_previous_kernel();
  count_chunk(p, 0, scratch);
  const int32_t rows = scratch.rows[thread];
  plan_tiles(p, rows, scratch);
  scratch.rows[thread] = scratch.ends[0][thread] - rows;
  lds_barrier();
  place_chunk(p, 0, scratch);
}

// Grid: p.chunks blocks of kRouteThreads.
__global__ void __launch_bounds__(kRouteThreads) moe_count_kernel(const RoutingProblem p) {
  __shared__ RoutingScratch scratch;
  const int thread = static_cast<int>(threadIdx.x), chunk = static_cast<int>(blockIdx.x);
  begin_after_previous_kernel();
  count_chunk(p, chunk, scratch);
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
  plan_tiles(p, rows, scratch);
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
  if (thread < p.experts) {
    scratch.rows[thread] = p.counts[static_cast<int64_t>(chunk) * p.experts + thread];
  }
  lds_barrier();
  place_chunk(p, chunk, scratch);
}

inline Status launch_routing_kernels(const RoutingProblem& p, const DeviceFacts& facts,
                                     Stream stream) {
  Launch launch;
  launch.grid = dim3(1);
  launch.block = kRouteThreads;
  launch.stream = stream;
  launch.early = facts.is_hopper_or_later();
  if (p.ids == nullptr) return launch_kernel(moe_plan_kernel, launch, p);
  if (p.chunks == 1) return launch_kernel(moe_route_kernel, launch, p);
  Launch spread = launch;
  spread.grid = dim3(static_cast<unsigned>(p.chunks));
  if (const Status error = launch_kernel(moe_count_kernel, spread, p)) return error;
  if (const Status error = launch_kernel(moe_plan_kernel, launch, p)) return error;
  return launch_kernel(moe_place_kernel, spread, p);
}

}  // namespace rocm_kernels
