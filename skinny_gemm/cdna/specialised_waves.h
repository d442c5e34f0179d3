// The LDS pipeline with specialised waves: producers load w and a into stages in LDS, consumers
// multiply.
//
// clang-format off
//   producers   HBM, L2 --> VGPRs --> stage n % num_stages, once it is empty --> "filled"
//   consumers   stage n % num_stages, once it is filled --> fragments --> "emptied" --> matrix instruction
// clang-format on
//
// A stage holds a K block of the workgroup's tile. K block n is loaded by producer n % producers
// and multiplied by consumer n % consumers, so each stage has one writer and one reader at a time.
// Two counters a stage say how often it was filled and emptied. A counter is stored with release
// order once the wave's own LDS operations are complete, and read with acquire order before the
// stage is touched: the compiler puts the waits there, and a late write to LDS cannot be overtaken
// by its counter.
//
// Beside the register pipeline: the same bytes cross L1 and LDS, only fewer waves have them in
// flight. A tuner would take it where multiplying costs a wave so many registers or so much time
// that it cannot keep its own loads going.
#pragma once

#include "../../blocks/product/cdna/tile_loader.h"
#include "../../blocks/product/cdna/waves_sink.h"
#include "../../common/cdna/arguments.h"

namespace rocm_kernels::cdna::skinny {

// kRegisterStages: K blocks that a producer has in flight in registers.
template <MmaKind kKind, int kBlockM, int kBlockN, int kRegisterStages>
__global__ void __launch_bounds__(512)
    skinny_gemm_specialised_waves([[maybe_unused]] const GemmProblem arguments) {
#if ROCM_KERNELS_CDNA
  using Loader = TileLoader<kKind, kBlockM, kBlockN, false>;
  using Sink = WavesSink<kKind, kBlockM, kBlockN>;
  static_assert(kIsSinkOf<Sink, typename Loader::Sums&>, "");
  constexpr int kStageBytes = (Loader::kTilesM + Loader::kTilesN) * Loader::kTileBytes;
  extern __shared__ __attribute__((aligned(16))) float lds[];
  uint8_t* const stages = reinterpret_cast<uint8_t*>(lds);
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int num_stages = arguments.num_stages, producers = arguments.producers;
  const int consumers = arguments.waves - producers;
  uint32_t* const counters = reinterpret_cast<uint32_t*>(stages + num_stages * kStageBytes);
  const auto filled = [&](int stage) { return WaveCounter(counters + stage); };
  const auto emptied = [&](int stage) { return WaveCounter(counters + num_stages + stage); };

  const int worker = arguments.schedule.worker_of(blockIdx.x);
  const Range units = arguments.schedule.units_of(worker);
  for (int unit = units.begin; unit < units.end;) {
    const GemmProblem& p = reread_problem<GemmProblem>();
    const WorkTile work = p.schedule.work_at(unit, units.end);
    const int n_begin = work.tile * kBlockN;
    const int k_blocks = p.schedule.k_blocks;
    const int first = work.k_begin, count = work.k_end - work.k_begin;

    TileFactors factors;
    factors.fetch(p, kBlockN, 0, n_begin);
    Loader loader(DenseRows::of_a(p, 0), DenseRows::of_w(p, n_begin), p.k, lane);
    loader.end_at(work.k_end);
    for (int i = threadIdx.x; i < 2 * num_stages; i += p.waves * kWaveSize) counters[i] = 0;
    workgroup_barrier();

    typename Loader::Sums sums = {};
    if (wave >= consumers) {
      typename Loader::KBlock blocks[kRegisterStages];
      int next = wave - consumers;
#pragma unroll
      for (int i = 0; i < kRegisterStages; ++i) {
        loader.load(blocks[i], first + next + i * producers);
      }
      for (; next < count; next += kRegisterStages * producers) {
#pragma unroll
        for (int i = 0; i < kRegisterStages; ++i) {
          const int n = next + i * producers;
          if (n < count) {
            const int stage = n % num_stages, round = n / num_stages;
            emptied(stage).wait_for(round);
            loader.write(blocks[i], stages + stage * kStageBytes);
            filled(stage).set(round + 1, lane);
          }
          asm volatile("" ::: "memory");
          __builtin_amdgcn_sched_barrier(0);
          loader.load(blocks[i], first + n + kRegisterStages * producers);
          __builtin_amdgcn_sched_barrier(0);
        }
      }
    } else {
      for (int n = wave; n < count; n += consumers) {
        const int stage = n % num_stages, round = n / num_stages;
        filled(stage).wait_for(round + 1);
        typename Loader::Fragments fragments;
        loader.read(fragments, stages + stage * kStageBytes);
        emptied(stage).set(round + 1, lane);
        loader.multiply_add(fragments, sums);
      }
    }
    workgroup_barrier();
    if (wave == 0 && loader.has_tail() && work.k_end == k_blocks) {
      typename Loader::KBlock tail;
      loader.load_tail_block(tail);
      loader.multiply_add(tail, stages, sums);
    }
    workgroup_barrier();
    const GemmProblem& late = reread_problem<GemmProblem>();
    Sink(late, work.tile, worker, wave, late.waves, consumers, 0, n_begin, late.m, factors, lds)
        .finish(sums);
    unit = work.next_unit;
    if (unit < units.end) workgroup_barrier();
  }
#endif
}

}  // namespace rocm_kernels::cdna::skinny
