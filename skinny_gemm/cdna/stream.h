// The plain design: each wave streams its part of K from memory into registers.
//
//   HBM --(w: 16 B a lane, non-temporal)--> VGPR ring --> LDS --> matrix instruction -->
//   accumulators L2  --(a: 16 B a lane)----------------> VGPR ring --> LDS ------^ accumulators of
//   the block's waves --> LDS --> one sum --> out, or a partial sum
//
// A block owns tiles of kRowsW rows of w, its waves split K between them. A wave keeps
// kDepth granules in flight: it waits for the oldest, multiplies it and asks for the next into the
// same registers, so the number of bytes under way never drops until its part ends. The way through
// LDS is within a wave (see Turntable): there is no barrier, and no wave waits for another, until
// the tile's sums meet.
#pragma once

#include "config.h"
#include "finish.h"
#include "granule.h"

namespace rocm_kernels {

constexpr int kStreamThreads = 512;  // of a block, at most

template <Operands kKind, int kRowTilesA, int kRowsW, int kDepth, bool kBlockScaled>
__global__ void __launch_bounds__(kStreamThreads)
    skinny_gemm_stream([[maybe_unused]] const SkinnyGemmProblem arguments) {
  static_assert(kKind != Operands::kFp8Sparse || (kRowTilesA == 1 && !kBlockScaled),
                "the sparse operand holds 8 rows, and its sums have no layout for block scales");
#if SKINNY_GEMM_CDNA
  using Source = TileSource<kKind, kRowTilesA, kRowsW, kBlockScaled>;
  extern __shared__ __attribute__((aligned(16))) float lds[];
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  uint8_t* place =
      reinterpret_cast<uint8_t*>(lds) + wave * turn_bytes(a_bytes(kKind), w_bytes(kKind));

  const int interval = arguments.schedule.interval_of(blockIdx.x);
  const Interval work = arguments.schedule.work_of(interval);
  for (int begin = work.begin; begin < work.end;) {
    const SkinnyGemmProblem& p = reread_arguments();
    const int granules = p.schedule.granules;
    const int tile = begin / granules, tile_begin = tile * granules;
    const int end = work.end < tile_begin + granules ? work.end : tile_begin + granules;
    const int row_begin = tile * kRowsW;

    TileFactors factors;
    factors.fetch(p, kRowsW, row_begin);
    Source source(p, row_begin, lane);
    const Cut parts = Cut::of(end - begin, p.waves);
    int index = begin - tile_begin + parts.begin_of(wave);
    const int last = begin - tile_begin + parts.begin_of(wave + 1);
    const bool has_tail = index < last && last == granules && source.has_tail();
    source.end_at(last);

    Accumulator sums[kRowTilesA][Source::kRowTilesW] = {};
    typename Source::GranuleType ring[kDepth];
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) {
      source.load(ring[slot], index + slot);
      // Slot after slot, as in the loop: its first wait must fit the requests of both.
      __builtin_amdgcn_sched_barrier(0);
    }
    for (; index + kDepth < last; index += kDepth) {
#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) {
        source.multiply_add(ring[slot], place, sums);
        keep_order(sums);
        source.load(ring[slot], index + slot + kDepth);
        __builtin_amdgcn_sched_barrier(0);
      }
    }
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) source.multiply_add(ring[slot], place, sums);
    if (has_tail) {
      typename Source::GranuleType tail;
      source.load_cut_granule(tail);
      source.multiply_add(tail, place, sums);
    }

    block_barrier();  // the sums lie where other waves may still turn tiles
    const SkinnyGemmProblem& late = reread_arguments();
    finish_tile<kKind, kRowTilesA, kRowsW>(late, wave, late.waves, late.waves, interval, tile,
                                           factors, sums, lds);
    begin = end;
    if (begin < work.end) block_barrier();
  }
#endif
}

}  // namespace rocm_kernels
