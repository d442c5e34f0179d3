// The plain design: each wave streams its part of K straight from memory into registers.
//
//   HBM --(16 B a lane, non-temporal)--> VGPR ring --> matrix instruction --> accumulators
//   L2  --(a: 16 B a lane, the same layout)--> VGPR ring --^
//   accumulators of the block's waves --> LDS --> one sum --> out, or a partial sum
//
// A block owns tiles of kRowTilesW * 16 rows of w, its waves split K between them. A wave keeps
// kDepth granules in flight: it waits for the oldest, multiplies it and asks for the next into the
// same registers, so the number of bytes under way never drops until its part ends. There is no
// barrier, and no wave waits for another, until the tile's sums meet.
#pragma once

#include "finish.h"

namespace rocm_kernels {

#if SKINNY_GEMM_CDNA
// The kernel's one argument, from memory again: what only the end needs would otherwise sit in
// scalar registers through the loop, or be spilled.
ROCM_KERNELS_DEVICE const SkinnyGemmProblem& reread_arguments() {
  auto arguments = __builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *(const SkinnyGemmProblem*)arguments;
}
#endif

template <Operands kKind, int kRowTilesA, int kRowTilesW, int kDepth, bool kBlockScaled>
__global__ void __launch_bounds__(512)
    skinny_gemm_stream([[maybe_unused]] const SkinnyGemmProblem arguments) {
  static_assert(kKind != Operands::kFp8Sparse || (kRowTilesA == 1 && !kBlockScaled),
                "the sparse operand holds 8 rows, and its sums have no layout for block scales");
#if SKINNY_GEMM_CDNA
  extern __shared__ __attribute__((aligned(16))) float lds[];
  constexpr int kLoadsW = w_loads(kKind), kLoadsA = a_loads(kKind);
  constexpr int kGranuleBytesW = kGranule * w_bytes(kKind);
  constexpr int kGranuleBytesA = kGranule * a_bytes(kKind);
  constexpr int kStepElements = kStepBytes / w_bytes(kKind);

  struct Granule {
    Words w[kRowTilesW][kLoadsW];
    Words a[kRowTilesA][kLoadsA];
    float scale_w[kBlockScaled ? kRowTilesW : 1];
    float scale_a[kBlockScaled ? kRowTilesA : 1];
  };

  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int waves = arguments.waves;
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const int group = lane / kTile;

  const int interval = arguments.schedule.interval_of(blockIdx.x);
  const Interval work = arguments.schedule.work_of(interval);
  for (int begin = work.begin; begin < work.end;) {
    const SkinnyGemmProblem& p = reread_arguments();
    const int granules = p.schedule.granules;
    const int tile = begin / granules;
    const int tile_begin = tile * granules;
    const int end = work.end < tile_begin + granules ? work.end : tile_begin + granules;
    const int row_begin = tile * kRowTilesW * kTile;

    TileFactors factors;
    factors.fetch(p, kRowTilesW * kTile, row_begin);

    const Buffer a = buffer_at(p.a);
    uint32_t a_lane[kRowTilesA];  // byte of the lane's row
#pragma unroll
    for (int i = 0; i < kRowTilesA; ++i) {
      const int row = i * kTile + a_row<kKind>(lane);
      a_lane[i] = row < p.m ? static_cast<uint32_t>(row * p.a_stride) : kOutside;
    }
    const Buffer w = buffer_at(p.w + row_begin * p.w_stride);
    uint32_t w_lane[kRowTilesW];
#pragma unroll
    for (int j = 0; j < kRowTilesW; ++j) {
      const int row = j * kTile + lane % kTile;
      w_lane[j] = row_begin + row < p.n ? static_cast<uint32_t>(row * p.w_stride) : kOutside;
    }
    const int k = p.k;
    const bool blocks_a = kBlockScaled && p.scale_a.kind == GemmScale::Kind::kBlock;
    const bool blocks_w = kBlockScaled && p.scale_w.kind == GemmScale::Kind::kBlock;
    const Buffer scales_a = buffer_at(p.scale_a.data);
    const Buffer scales_w = buffer_at(p.scale_w.data);
    uint32_t scale_a_lane[kRowTilesA], scale_w_tile[kRowTilesW];
#pragma unroll
    for (int i = 0; i < kRowTilesA; ++i) {
      const int row = i * kTile + lane % kTile;
      scale_a_lane[i] =
          blocks_a && row < p.m ? static_cast<uint32_t>(row * p.scale_a.row_stride * 4) : kOutside;
    }
#pragma unroll
    for (int j = 0; j < kRowTilesW; ++j) {
      const int row = row_begin + j * kTile;
      scale_w_tile[j] = blocks_w && row < p.n
                            ? static_cast<uint32_t>(row / kScaleBlock * p.scale_w.row_stride * 4)
                            : kOutside;
    }
    const uint32_t scale_a_step = static_cast<uint32_t>(p.scale_a.block_stride * 4);
    const uint32_t scale_w_step = static_cast<uint32_t>(p.scale_w.block_stride * 4);

    const auto load_scales = [&](Granule& granule, int index, uint32_t hide) {
      if constexpr (kBlockScaled) {
#pragma unroll
        for (int i = 0; i < kRowTilesA; ++i) {
          const float scale = load_float(scales_a, scale_a_lane[i] | hide, index * scale_a_step);
          granule.scale_a[i] = blocks_a ? scale : 1.0f;
        }
#pragma unroll
        for (int j = 0; j < kRowTilesW; ++j) {
          const float scale = load_float(scales_w, scale_w_tile[j] | hide, index * scale_w_step);
          granule.scale_w[j] = blocks_w ? scale : 1.0f;
        }
      }
    };
    const Cut parts = Cut::of(end - begin, waves);
    const int first = begin - tile_begin + parts.begin_of(wave);
    const int last = begin - tile_begin + parts.begin_of(wave + 1);
    const int whole_steps = k / kStepElements;
    const int step_end = last * kLoadsW < whole_steps ? last * kLoadsW : whole_steps;

    // Asks for a granule of this tile; what lies beyond the wave's part, or in a step that K cuts,
    // comes as zeros.
    const auto load_granule = [&](Granule& granule, int index) {
#pragma unroll
      for (int step = 0; step < kLoadsW; ++step) {
        const uint32_t hide = index * kLoadsW + step < step_end ? 0 : kOutside;
#pragma unroll
        for (int j = 0; j < kRowTilesW; ++j) {
          granule.w[j][step] =
              load_words<Cache::kNonTemporal>(w, (w_lane[j] + w_offset(kKind, 0, group)) | hide,
                                              index * kGranuleBytesW + w_offset(kKind, step, 0));
        }
        constexpr int kRatio = kLoadsA / kLoadsW;
#pragma unroll
        for (int i = 0; i < kRowTilesA; ++i) {
#pragma unroll
          for (int load = step * kRatio; load < (step + 1) * kRatio; ++load) {
            granule.a[i][load] =
                load_words<Cache::kKeep>(a, (a_lane[i] + a_offset(kKind, 0, group)) | hide,
                                         index * kGranuleBytesA + a_offset(kKind, load, 0));
          }
        }
      }
      load_scales(granule, index, index < last ? 0 : kOutside);
    };

    Accumulator sums[kRowTilesA][kRowTilesW] = {};
    const auto multiply_granule = [&](const Granule& granule) {
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
#pragma unroll
        for (int j = 0; j < kRowTilesW; ++j) {
          if constexpr (kBlockScaled) {
            const Accumulator part =
                multiply<kKind>(granule.w[j], granule.a[i], lane, Accumulator{});
            sums[i][j] += part * (granule.scale_a[i] * granule.scale_w[j]);
          } else {
            sums[i][j] = multiply<kKind>(granule.w[j], granule.a[i], lane, sums[i][j]);
          }
        }
      }
    };

    Granule ring[kDepth];
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) load_granule(ring[slot], first + slot);
    int index = first;
    for (; index + kDepth < last; index += kDepth) {
#pragma unroll
      for (int slot = 0; slot < kDepth; ++slot) {
        multiply_granule(ring[slot]);
        load_granule(ring[slot], index + slot + kDepth);
        // Left alone, the scheduler lets requests sink to the end of the loop: fewer in flight.
        __builtin_amdgcn_sched_barrier(0);
      }
    }
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) multiply_granule(ring[slot]);

    // The step that K cuts, byte by byte, by the wave that has the last granule.
    if (k % kStepElements != 0 && first < last && last == granules) {
      Granule tail = {};
      constexpr int kRatio = kLoadsA / kLoadsW;
      const int w_row_bytes = k * w_bytes(kKind), a_row_bytes = k * a_bytes(kKind);
#pragma unroll
      for (int j = 0; j < kRowTilesW; ++j) {
        const int at = whole_steps * kStepBytes + group * 16;
        // Which step of a granule the bytes stand in makes no difference to the product.
        tail.w[j][0] = load_tail(w, w_lane[j], at, w_row_bytes);
      }
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
#pragma unroll
        for (int load = 0; load < kRatio; ++load) {
          const int at = whole_steps * kStepBytes * kRatio + a_offset(kKind, load, group);
          tail.a[i][load] = load_tail(a, a_lane[i], at, a_row_bytes);
        }
      }
      load_scales(tail, last - 1, 0);
      multiply_granule(tail);
    }

    finish_tile<kKind, kRowTilesA, kRowTilesW>(reread_arguments(), waves, interval, tile, factors,
                                               sums, lds);
    begin = end;
    if (begin < work.end) block_barrier();
  }
#endif
}

}  // namespace rocm_kernels
