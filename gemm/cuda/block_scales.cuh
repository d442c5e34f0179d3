// The warp that fetches scales of blocks of 128 for gemm's warpgroup kernel (warpgroup.cuh).
//
// A run of chunks at a time: rows of scales lie along K, and one word of each would cost as much as
// four. A buffer is [rows of a of a tile, then kMaxScaleGroups of w][kScaleRun].
#pragma once

#include "problem.cuh"

namespace rocm_kernels {
namespace cuda {

// All lanes of one warp. `block_scales`: kScaleBuffers of Tile::kBufferScales; what is not a
// block's scale there stays as it was.
template <class Tile, class Tiles>
__device__ __forceinline__ void fetch_block_scales(Tiles& tiles, const typename Tiles::Problem& p,
                                                   int worker, int lane, float* block_scales,
                                                   uint32_t scale_full, uint32_t scale_empty) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLaneRows = (Tile::kScaleRows + 31) / 32;
  constexpr int kGroups = Tile::kWGroups;
  static_assert(kGroups <= kMaxScaleGroups, "");
  wait_for_previous_kernel();
  const auto& schedule = tiles.schedule();
  const auto copy_run = [&](const ScaleView& scale, bool wide, int64_t row, bool there, int first,
                            uint32_t to) {
    const int count = there ? min(kScaleRun, schedule.chunks - first) : 0;
    const float* const from = there ? scale.data + row * scale.row_stride : scale.data;
    const auto of_chunk = [&](int chunk) {
      return from + chunk / Tile::kChunksOfBlock * scale.block_stride;
    };
    if (wide && Tile::kChunksOfBlock == 1) {
      copy_vector(to, there ? of_chunk(first) : from, count * 4);
    } else {
      for (int i = 0; i < kScaleRun; ++i) {
        copy_word(to + i * 4, i < count ? of_chunk(first + i) : from, i < count);
      }
    }
  };
  Units units(schedule, worker);
  Unit unit;
  int buffer = 0, parity = 1;
  while (units.take(unit)) {
    const auto place = tiles.place_of(unit.tile);
    const int first_a = Tile::kSwapped ? place.first_column : place.first_row;
    const int a_rows = Tile::kSwapped ? place.end_column : place.end_row;
    const ScaleView& scale_w = tiles.scale_w(place);
    const int w_row = lane < kGroups ? tiles.w_row_of_group(place, lane, Tile::kWGroup) : -1;
    for (int first = unit.begin / kScaleRun * kScaleRun; first < unit.end; first += kScaleRun) {
      mbarrier_wait(scale_empty + buffer * 8, parity);
      const uint32_t to = shared_address(block_scales + buffer * Tile::kBufferScales);
      if (p.scale_a.is_blocked()) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          const int row = lane + i * 32;
          if (row < Tile::kScaleRows) {
            copy_run(p.scale_a, p.wide_scale_a, first_a + row, first_a + row < a_rows, first,
                     to + row * kScaleRun * 4);
          }
        }
      }
      if (scale_w.is_blocked() && lane < kGroups) {
        copy_run(scale_w, p.wide_scale_w, w_row / kScaleBlock, w_row >= 0, first,
                 to + (Tile::kScaleRows + lane) * kScaleRun * 4);
      }
      mbarrier_arrive_after_copies(scale_full + buffer * 8);
      buffer ^= 1;
      if (buffer == 0) parity ^= 1;
    }
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
