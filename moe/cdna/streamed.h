// Grouped products of few rows an expert: weights stream from memory into registers, each once for
// all rows of its expert that a tile holds. skinny_gemm's register pipeline over gathered rows.
//
// A workgroup has up to kBlockM rows of one expert and 32 rows of w: 32 columns, or the gates and
// the ups of 16 columns of h. Its waves divide its part of K among them; their sums meet in LDS, in
// the order of k.
#pragma once

#include "../../common/cdna/sync.h"
#include "../../gemm/cdna/epilogue_lds.h"
#include "../../gemm/cdna/store.h"
#include "../../gemm/cdna/tile_loader.h"
#include "../gpu/order.h"
#include "rows.h"
#include "tiles.h"

namespace rocm_kernels::cdna {

// The waves' sums, from registers to where they belong. An item is four neighbouring columns of a
// row.
template <MmaKind kKind, int kBlockM, bool kGateUp>
class StreamedEnd {
 public:
  static constexpr int kPitch = kStreamedBlockN + kSumPad;
  static constexpr int kColumns = kGateUp ? kStreamedBlockN / 2 : kStreamedBlockN;
  // LDS: [waves][kBlockM][kPitch] sums, then factors of rows of w, biases, factors of rows of a.
  static constexpr int kWaveFloats = kBlockM * kPitch;

#if ROCM_KERNELS_CDNA
  using Sums = Accumulator[mma_tiles_of(kBlockM)][mma_tiles_of(kStreamedBlockN)];
  using RowsW = ExpertRows<kGateUp, kMmaRows>;

  // All threads of the workgroup call it, after a barrier. `part`: of K.
  static ROCM_KERNELS_DEVICE void finish(const GroupedProblem& p, const RowTile& tile, int n_begin,
                                         int part, int wave, int lane, const Sums& sums,
                                         float* lds) {
    float* const scale_w = lds + kStreamedWaves * kWaveFloats;
    float* const bias = scale_w + kStreamedBlockN;
    float* const scale_a = bias + kStreamedBlockN;
    const RowsW rows_w(p, tile.expert, n_begin, 1);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kStreamedBlockN) {
      const int row = rows_w.w_row(thread);
      scale_w[thread] = row >= 0 ? rows_w.scale.outer(row) : 0.0f;
      bias[thread] = row >= 0 && part == 0 ? p.bias(tile.expert, row) : 0.0f;
    } else if (thread < kStreamedBlockN + kBlockM) {
      const int row = tile.begin + thread - kStreamedBlockN;
      scale_a[thread - kStreamedBlockN] = row < tile.end ? p.scale_a.outer(p.a_row(row)) : 0.0f;
    }
    const int rows = tile.end - tile.begin;
#pragma unroll
    for (int i = 0; i < mma_tiles_of(kBlockM); ++i) {
#pragma unroll
      for (int j = 0; j < mma_tiles_of(kStreamedBlockN); ++j) {
        Mma<kKind>::template store_sums<kPitch>(lds + wave * kWaveFloats, i, j, rows,
                                                kStreamedBlockN, lane, sums[i][j]);
      }
    }
    workgroup_barrier();
    for (int item = thread; item < rows * (kColumns / 4); item += kStreamedWaves * kWaveSize) {
      const int row = item / (kColumns / 4), at = item % (kColumns / 4) * 4;
      const int column = (kGateUp ? n_begin / 2 : n_begin) + at;
      const int columns = kGateUp ? p.n / 2 : p.n;
      if (column >= columns) continue;
      const auto value_of = [&](int from) {
        Accumulator value = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int other = 0; other < kStreamedWaves; ++other) {
          value += *reinterpret_cast<const Accumulator*>(lds + other * kWaveFloats + row * kPitch +
                                                         from);
        }
        value *= scale_a[row];
        value *= *reinterpret_cast<const Accumulator*>(scale_w + from);
        value += *reinterpret_cast<const Accumulator*>(bias + from);
        return value;
      };
      Accumulator value = value_of(at);
      if constexpr (kGateUp) {
        const Accumulator up = value_of(kMmaRows + at);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float one = value[e], other = up[e];
          value[e] = gated(p.activation, p.limit, one, other);
        }
      }
      store_four(p.out, p.out_dtype, p.out_row(tile.begin + row, part) + column, value,
                 columns - column, p.wide_stores);
    }
  }
#endif
};

// LDS: streamed_lds_bytes().
template <MmaKind kKind, int kBlockM, bool kBlockScales, bool kGateUp>
__global__ void __launch_bounds__(kStreamedWaves * 64)
    moe_streamed([[maybe_unused]] const GroupedProblem p,
                 [[maybe_unused]] const GroupedOrder order) {
#if ROCM_KERNELS_CDNA
  using Loader = TileLoader<kKind, kBlockM, kStreamedBlockN, kBlockScales>;
  using End = StreamedEnd<kKind, kBlockM, kGateUp>;
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const GroupedOrder::Place place = order.place_of(blockIdx.x, *p.tile_count);
  if (place.m < 0) return;
  const RowTile tile = p.tiles[place.m];
  const int n_begin = place.n * kStreamedBlockN;

  typename Loader::Sums sums = {};
  {
    Loader loader(rows_of_a<kGateUp>(p, tile, a_bytes(kKind)),
                  typename End::RowsW(p, tile.expert, n_begin, w_bytes(kKind)), p.k, lane);
    const int k_blocks = k_blocks_of(p.k);
    const EvenSplit parts = EvenSplit::of(k_blocks, order.split_k);
    const int begin = parts.begin_of(place.part), end = parts.begin_of(place.part + 1);
    const EvenSplit waves = EvenSplit::of(end - begin, kStreamedWaves);
    stream_k_blocks<streamed_stages(kKind, kBlockM)>(loader, begin + waves.begin_of(wave),
                                                     begin + waves.begin_of(wave + 1), k_blocks,
                                                     lds + wave * Loader::kTileBytes, sums);
  }
  workgroup_barrier();  // the sums lie where other waves may still transpose tiles
  End::finish(reread_problem(), tile, n_begin, place.part, wave, lane, sums,
              reinterpret_cast<float*>(lds));
#endif
}

}  // namespace rocm_kernels::cdna
