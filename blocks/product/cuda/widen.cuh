// The warpgroup that widens weights for gemm's warpgroup kernel (warpgroup.cuh): wgmma multiplies
// two operands of one type, so weights narrower than a become a's type on their way.
//
//   memory --TMA--> narrow stage [rows of w][64 elements]     64 bytes a row, 32 of MXFP4
//     --one or two warpgroups--> the stage that wgmma reads [rows of w][128 bytes], swizzled
//
// Why not in registers: wgmma takes its 64-row operand from registers too, but then the warps that
// multiply would widen, and wait for it; here they run as they do for 16-bit weights. A chunk of
// 256 x 128 takes the tensor cores some 1,000 cycles, and widening it the schedulers 200.
#pragma once

#include "../../../common/cuda/mxfp4_exponents.cuh"
#include "../../../common/cuda/widen.cuh"
#include "problem.cuh"

namespace rocm_kernels {
namespace cuda {

// Shared memory and barriers of the first of the stages.
struct WideningStages {
  uint32_t narrow, narrow_full, narrow_empty;  // p.narrow_stages of them
  uint32_t wide, wide_full, wide_empty;        // p.num_stages
};

// 16 bytes of a row of w as kCount vectors of 16-bit elements; `exponent`: MXFP4's code of them.
template <class Tile, int kCount>
__device__ __forceinline__ void widen_vector(const uint4& codes, uint32_t exponent,
                                             uint4 (&wide)[kCount]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  if constexpr (Tile::kWType == DType::kFloat4E2M1x2) {
    static_assert(kCount == 4 && Tile::kType == DType::kBFloat16, "");
    const uint32_t scale = bfloats_of_exponent(exponent);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pairs[4];
      bfloats_from_fp4(words[i], scale, pairs);
      wide[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  } else {
    static_assert(kCount == 2, "");
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      halves_from_fp8(words[i], pairs[2 * i], pairs[2 * i + 1]);
    }
    if constexpr (Tile::kType == DType::kBFloat16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) pairs[i] = bfloats_from_halves(pairs[i]);
    }
    wide[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    wide[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
  }
}

// The work of thread `thread` of the warpgroups that widen, which take turns at stages. In each of
// its own a thread has the same rows of w, or the same half of one.
template <class Tile, class Tiles>
__device__ __forceinline__ void widen_weights(Tiles& tiles, const typename Tiles::Problem& p,
                                              int worker, int thread, const WideningStages& at) {
#if __CUDA_ARCH__ >= 900
  constexpr int kTileRows = Tile::kTileRowsOfW;
  constexpr int kThreads = Tile::kWidenWarps * 32 / Tile::kWidenTurns;  // of a turn
  constexpr int kRows = kTileRows > kThreads ? kTileRows / kThreads : 1;
  constexpr int kParts = kTileRows < kThreads ? kThreads / kTileRows : 1;  // of a row
  constexpr int kVectors = Tile::kWRowBytes / 16 / kParts;                 // of a part, narrow
  constexpr int kWidened = kChunkBytes / Tile::kWRowBytes;                 // that one becomes
  constexpr bool kMx = Tile::kWType == DType::kFloat4E2M1x2;
  static_assert(kRows * kThreads == kTileRows * kParts, "");
  const int own_turn = thread / kThreads;
  const int first_row = thread % kThreads % kTileRows;
  const int first_vector = thread % kThreads / kTileRows * kVectors;
  wait_for_previous_kernel();
  const auto& schedule = tiles.schedule();
  Units units(schedule, worker);
  Unit unit;
  PipelineState narrow = {0, 0}, wide = {0, 1};
  Mxfp4Exponents exponents[kRows];
  int turn = 0;
  while (units.take(unit)) {
    if constexpr (kMx) {
      const auto place = tiles.place_of(unit.tile);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        tiles.begin_exponents(exponents[i], place, first_row + i * kThreads, unit.begin);
      }
    }
    for (int chunk = unit.begin; chunk < unit.end; ++chunk) {
      uint32_t pairs[kRows] = {};
      if constexpr (kMx) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) pairs[i] = exponents[i].take();
      }
      // The warps whose turn it is not wait and arrive as well: a stage that went on without them
      // would come round to the parity that they wait for, of another chunk.
      const bool own = Tile::kWidenTurns == 1 || turn == own_turn;
      const uint32_t from = at.narrow + narrow.stage * Tile::kNarrowBytes;
      const uint32_t to = at.wide + wide.stage * Tile::kStageBytes;
      uint4 codes[kRows][kVectors];
      mbarrier_wait(at.narrow_full + narrow.stage * 8, narrow.parity);
      if (own) {
#pragma unroll
        for (int i = 0; i < kRows * kVectors; ++i) {
          const int row = first_row + i / kVectors * kThreads;
          codes[i / kVectors][i % kVectors] = load_shared(
              from + swizzled_narrow<Tile::kWRowBytes>(row, first_vector + i % kVectors));
        }
      }
      mbarrier_wait(at.wide_empty + wide.stage * 8, wide.parity);
      if (own) {
#pragma unroll
        for (int i = 0; i < kRows * kVectors; ++i) {
          const int row = first_row + i / kVectors * kThreads, vector = first_vector + i % kVectors;
          uint4 elements[kWidened];
          widen_vector<Tile>(codes[i / kVectors][i % kVectors],
                             pairs[i / kVectors] >> vector * 8 & 0xFF, elements);
#pragma unroll
          for (int j = 0; j < kWidened; ++j) {
            store_shared(to + swizzled(row, 0, 1, vector * kWidened + j), elements[j]);
          }
        }
        fence_async_proxy();
      }
      __syncwarp();
      if (thread % 32 == 0) {
        mbarrier_arrive(at.wide_full + wide.stage * 8);
        mbarrier_arrive(at.narrow_empty + narrow.stage * 8);
      }
      turn = turn + 1 == Tile::kWidenTurns ? 0 : turn + 1;
      narrow.advance(p.narrow_stages);
      wide.advance(p.num_stages);
    }
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
