// The design with specialised waves: producers stream w and a into a queue in LDS, consumers
// multiply.
//
//   producers   HBM, L2 --> VGPR ring --> slot n % slots, once it is empty --> "filled"
//   consumers   slot n % slots, once it is filled --> fragments --> "empty" --> matrix instruction
//
// A slot holds a granule of the block's tile: granule n is loaded by producer n % producers and
// multiplied by consumer n % consumers, so each slot has one writer and one reader at a time. Two
// counters a slot say how often it was filled and emptied. A counter is stored with release order
// once the wave's own LDS operations are complete, and read with acquire order before the slot is
// touched: the compiler puts the waits there, and a late write to LDS cannot be overtaken by its
// flag.
//
// Beside the plain design: the same bytes cross L1 and LDS, only fewer waves have them in flight.
#pragma once

#include "config.h"
#include "finish.h"
#include "granule.h"

namespace rocm_kernels {

#if SKINNY_GEMM_CDNA

// How often a slot was filled or emptied.
class SlotCounter {
 public:
  explicit ROCM_KERNELS_DEVICE SlotCounter(uint32_t* counter) : counter_(counter) {}

  ROCM_KERNELS_DEVICE void wait_for(uint32_t count) const {
    while (static_cast<uint32_t>(__builtin_amdgcn_readfirstlane(__hip_atomic_load(
               counter_, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP))) < count) {
      __builtin_amdgcn_s_sleep(1);
    }
  }
  ROCM_KERNELS_DEVICE void set(uint32_t count, int lane) const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");  // of all lanes, then one tells
    if (lane == 0) {
      __hip_atomic_store(counter_, count, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    }
  }

 private:
  uint32_t* counter_;
};

#endif

template <Operands kKind, int kRowTilesA, int kRowsW, int kDepth>
__global__ void __launch_bounds__(512)
    skinny_gemm_queue([[maybe_unused]] const SkinnyGemmProblem arguments) {
#if SKINNY_GEMM_CDNA
  using Source = TileSource<kKind, kRowTilesA, kRowsW, false>;
  constexpr int kTileBytes = turn_bytes(a_bytes(kKind), w_bytes(kKind));
  constexpr int kSlotBytes = (kRowTilesA + Source::kRowTilesW) * kTileBytes;
  extern __shared__ __attribute__((aligned(16))) float lds[];
  uint8_t* const queue = reinterpret_cast<uint8_t*>(lds);
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int slots = arguments.slots, producers = arguments.producers;
  const int consumers = arguments.waves - producers;
  uint32_t* const counters = reinterpret_cast<uint32_t*>(queue + slots * kSlotBytes);
  const auto filled = [&](int slot) { return SlotCounter(counters + slot); };
  const auto emptied = [&](int slot) { return SlotCounter(counters + slots + slot); };

  const int interval = arguments.schedule.interval_of(blockIdx.x);
  const Interval work = arguments.schedule.work_of(interval);
  for (int begin = work.begin; begin < work.end;) {
    const SkinnyGemmProblem& p = reread_arguments();
    const int granules = p.schedule.granules;
    const int tile = begin / granules, tile_begin = tile * granules;
    const int end = work.end < tile_begin + granules ? work.end : tile_begin + granules;
    const int row_begin = tile * kRowsW;
    const int first = begin - tile_begin, count = end - begin;

    TileFactors factors;
    factors.fetch(p, kRowsW, row_begin);
    Source source(p, row_begin, lane);
    source.end_at(end - tile_begin);
    for (int i = threadIdx.x; i < 2 * slots; i += p.waves * kWaveSize) counters[i] = 0;
    block_barrier();

    Accumulator sums[kRowTilesA][Source::kRowTilesW] = {};
    if (wave >= consumers) {
      typename Source::GranuleType ring[kDepth];
      int next = wave - consumers;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) source.load(ring[i], first + next + i * producers);
      for (; next < count; next += kDepth * producers) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
          const int n = next + i * producers;
          if (n < count) {
            const int slot = n % slots, round = n / slots;
            emptied(slot).wait_for(round);
            source.turn(ring[i], queue + slot * kSlotBytes);
            filled(slot).set(round + 1, lane);
          }
          asm volatile("" ::: "memory");
          __builtin_amdgcn_sched_barrier(0);
          source.load(ring[i], first + n + kDepth * producers);
          __builtin_amdgcn_sched_barrier(0);
        }
      }
    } else {
      for (int n = wave; n < count; n += consumers) {
        const int slot = n % slots, round = n / slots;
        filled(slot).wait_for(round + 1);
        typename Source::Fragments fragments;
        source.read(fragments, queue + slot * kSlotBytes);
        emptied(slot).set(round + 1, lane);
        source.multiply_add(fragments, sums);
      }
    }
    block_barrier();
    if (wave == 0 && source.has_tail() && end == tile_begin + granules) {
      typename Source::GranuleType tail;
      source.load_cut_granule(tail);
      source.multiply_add(tail, queue, sums);
    }
    block_barrier();
    const SkinnyGemmProblem& late = reread_arguments();
    finish_tile<kKind, kRowTilesA, kRowsW>(late, wave, late.waves, consumers, interval, tile,
                                           factors, sums, lds);
    begin = end;
    if (begin < work.end) block_barrier();
  }
#endif
}

}  // namespace rocm_kernels
