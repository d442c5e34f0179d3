// The register pipeline: each wave streams its part of K from memory into registers.
//
// clang-format off
//   HBM --(w: 16 B a lane, non-temporal)--> VGPRs --> LDS --> matrix instruction --> accumulators
//   L2  --(a: 16 B a lane)----------------> VGPRs --> LDS ----^
//
//   accumulators of the workgroup's waves --> LDS --> one sum --> out, or a partial sum
// clang-format on
//
// A workgroup owns tiles of kBlockN rows of w and all rows of a; its waves divide K among them. A
// wave has kNumStages K blocks in flight (stream_k_blocks()). The way through LDS is within a wave
// (LdsTranspose): there is no barrier, and no wave waits for another, until the tile's sums meet.
#pragma once

#include <algorithm>

#include "../../blocks/product/cdna/tile_loader.h"
#include "../../blocks/product/cdna/waves_sink.h"
#include "../../common/cdna/arguments.h"
#include "tiles.h"

namespace rocm_kernels::cdna::skinny {

// Block scales take registers that the choice of a config does not count: the compiler is told.
template <MmaKind kKind, int kBlockM, int kBlockN, bool kBlockScaled>
constexpr int kLeastWaves =
    kBlockScaled ? std::max(2, waves_per_simd(kBlockM, kBlockN, a_bytes(kKind), w_bytes(kKind)))
                 : 2;

template <MmaKind kKind, int kBlockM, int kBlockN, int kNumStages, bool kBlockScaled>
__global__ void __launch_bounds__(512, (kLeastWaves<kKind, kBlockM, kBlockN, kBlockScaled>))
    skinny_gemm_register_pipeline([[maybe_unused]] const GemmProblem arguments) {
  static_assert(kKind != MmaKind::kFp8Sparse || (kBlockM == 16 && !kBlockScaled),
                "the sparse operand holds 8 rows, and its sums have no layout for block scales");
#if ROCM_KERNELS_CDNA
  using Loader = TileLoader<kKind, kBlockM, kBlockN, kBlockScaled>;
  using Sink = WavesSink<kKind, kBlockM, kBlockN>;
  static_assert(kIsSinkOf<Sink, typename Loader::Sums&>, "");
  extern __shared__ __attribute__((aligned(16))) float lds[];
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  uint8_t* place = reinterpret_cast<uint8_t*>(lds) + wave * Loader::kTileBytes;

  const int worker = arguments.schedule.worker_of(blockIdx.x);
  const Range units = arguments.schedule.units_of(worker);
  for (int unit = units.begin; unit < units.end;) {
    const GemmProblem& p = reread_problem<GemmProblem>();
    const WorkTile work = p.schedule.work_at(unit, units.end);
    const int k_blocks = p.schedule.k_blocks;
    const int n_begin = work.tile * kBlockN;

    TileFactors factors;
    factors.fetch(p, kBlockN, 0, n_begin);
    Loader loader(DenseRows::of_a(p, 0), DenseRows::of_w(p, n_begin), p.k, lane);
    const EvenSplit parts = EvenSplit::of(work.k_end - work.k_begin, p.waves);
    const int begin = work.k_begin + parts.begin_of(wave);
    const int end = work.k_begin + parts.begin_of(wave + 1);
    typename Loader::Sums sums = {};
    stream_k_blocks<kNumStages>(loader, begin, end, k_blocks, place, sums);

    workgroup_barrier();  // the sums lie where other waves may still transpose tiles
    const GemmProblem& late = reread_problem<GemmProblem>();
    Sink(late, work.tile, worker, wave, late.waves, late.waves, 0, n_begin, late.m, factors, lds)
        .finish(sums);
    unit = work.next_unit;
    if (unit < units.end) workgroup_barrier();
  }
#endif
}

}  // namespace rocm_kernels::cdna::skinny
