// The main loop of a warpgroup: chunks of K from stages in shared memory by wgmma, to sums in
// registers. sm_90a alone.
//
//   sums[r, c] += sum_k rows[r, k] * columns[c, k]      64 * kWaves rows x block_c columns
//
// Why promote. The FP8 tensor core adds in about 14 bits, so its sums of 128 elements of K (64 for
// a float16 output) are added to float32 registers; where scales are blocks of 128 the same step
// multiplies. A warpgroup's additions run while its next products do, in a second set of registers
// (for 256 x 128 there is none, and the other warpgroup's products must fill the gap): for 128 x
// 128 x 128 the products take 512 cycles of the tensor cores and the additions 128 of the
// schedulers. 16-bit operands whose output is 16-bit need none, and sum in place.
#pragma once

#include <type_traits>

#include "../../../common/cuda/mbarrier.cuh"
#include "../../../common/cuda/wgmma.cuh"
#include "problem.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Where the operands of a warpgroup lie: in stage 0, and the barriers that say that a stage is
// full.
struct StagedOperands {
  uint32_t first_rows, first_columns;  // as wgmma takes them: low words
  uint32_t full;
  const int32_t& num_stages;
};

// Sums a unit's chunks in the registers that wgmma adds to. `release(stage)` tells that a stage is
// read.
template <class Tile, class Release>
__device__ __forceinline__ void multiply_in_place(
    const StagedOperands& operands, int chunks, PipelineState& state, const Release& release,
    float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
  // One group of instructions stays under way while the next is issued.
  int previous = -1;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    mbarrier_wait(operands.full + state.stage * 8, state.parity);
    const uint32_t rows = operands.first_rows + state.stage * wgmma_offset(Tile::kStageBytes);
    const uint32_t columns = operands.first_columns + state.stage * wgmma_offset(Tile::kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunkBytes / kWgmmaKBytes; ++i) {
#pragma unroll
      for (int wave = 0; wave < Tile::kWaves; ++wave) {
        wgmma_by_low_words<Tile::kType>(
            sums[wave], rows + wgmma_offset(wave * kWgmmaRows * kChunkBytes + i * kWgmmaKBytes),
            columns + wgmma_offset(i * kWgmmaKBytes), chunk > 0 || i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0) release(previous);
    previous = state.stage;
    state.advance(operands.num_stages);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int wave = 0; wave < Tile::kWaves; ++wave) wgmma_pin(sums[wave]);
  release(previous);
}

// Sums Tile::kChain instructions in registers of their own, scales these sums, and adds them to
// `sums`.
template <class Tile, class Tiles, class Scales, class Release>
__device__ __forceinline__ void multiply_and_promote(
    const StagedOperands& operands, Tiles& tiles, const UnitInfo& unit, int chunks, Scales& scales,
    PipelineState& state, const Release& release,
    float (&sums)[Tile::kWaves][Tile::kColumnTiles][4]) {
  // A piece is what one group of instructions sums: a wave's part of a chunk.
  constexpr int kChains = kChunkBytes / kWgmmaKBytes / Tile::kChain;
  constexpr int kPieces = Tile::kWaves * kChains;
  constexpr int kLoopChunks = Tile::kParts;
  float part[Tile::kParts][Tile::kColumnTiles][4];
  scales.begin(tiles, unit);
  float low[Tile::kWScales], high[Tile::kWScales];  // of the thread's two rows of a wave
  int collected = state.stage, left = chunks;       // stage of, and chunks that await, collect()
#pragma unroll
  for (int wave = 0; wave < Tile::kWaves; ++wave) {
#pragma unroll
    for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[wave][tile][j] = 0.0f;
    }
  }
  const auto issue = [&](auto constant) {
    constexpr int piece = decltype(constant)::value % kPieces;
    constexpr int to = decltype(constant)::value % Tile::kParts;
    constexpr int wave = piece / kChains, begin = piece % kChains * Tile::kChain;
    if constexpr (piece == 0) mbarrier_wait(operands.full + state.stage * 8, state.parity);
    const uint32_t rows = operands.first_rows + state.stage * wgmma_offset(Tile::kStageBytes);
    const uint32_t columns = operands.first_columns + state.stage * wgmma_offset(Tile::kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int i = begin; i < begin + Tile::kChain; ++i) {
      wgmma_by_low_words<Tile::kType>(
          part[to], rows + wgmma_offset(wave * kWgmmaRows * kChunkBytes + i * kWgmmaKBytes),
          columns + wgmma_offset(i * kWgmmaKBytes), i > begin);
    }
    wgmma_commit();
    if constexpr (piece + 1 == kPieces) {
      state.advance(operands.num_stages);
    }
  };
  const auto read_scales = [&](auto constant) {
    constexpr int piece = decltype(constant)::value % kPieces;
    if constexpr (Tile::kBlockScales) {
      if constexpr (piece == 0) {
        scales.template advance<decltype(constant)::value / kPieces, kLoopChunks>(tiles);
      }
      if constexpr (!Tile::kSwapAb && piece % kChains == 0) {
        scales.read_rows(piece / kChains, low, high);
      }
    }
  };
  // `pending`: groups that may stay under way.
  const auto collect = [&](auto constant, auto pending) {
    constexpr int piece = decltype(constant)::value % kPieces;
    constexpr int from = decltype(constant)::value % Tile::kParts;
    constexpr int wave = piece / kChains;
    wgmma_wait<decltype(pending)::value>(part[from]);
    if constexpr (piece + 1 == kPieces) {
      release(collected);
      if (++collected == operands.num_stages) collected = 0;
      --left;
    }
#pragma unroll
    for (int tile = 0; tile < Tile::kColumnTiles; ++tile) {
      float (&sum)[4] = sums[wave][tile];
      if constexpr (!Tile::kBlockScales) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += part[from][tile][j];
      } else if constexpr (Tile::kSwapAb) {
        const float2 of = scales.read_columns(tile, Tile::kWScales > 1 ? wave : 0);
        sum[0] = fmaf(part[from][tile][0], of.x, sum[0]);
        sum[1] = fmaf(part[from][tile][1], of.y, sum[1]);
        sum[2] = fmaf(part[from][tile][2], of.x, sum[2]);
        sum[3] = fmaf(part[from][tile][3], of.y, sum[3]);
      } else {
        constexpr int kTiles = Tile::kScaleGroup / 8;  // of a group of columns
        sum[0] = fmaf(part[from][tile][0], low[tile / kTiles], sum[0]);
        sum[1] = fmaf(part[from][tile][1], low[tile / kTiles], sum[1]);
        sum[2] = fmaf(part[from][tile][2], high[tile / kTiles], sum[2]);
        sum[3] = fmaf(part[from][tile][3], high[tile / kTiles], sum[3]);
      }
    }
  };
  if constexpr (Tile::kParts == 1) {
    while (left > 0) {
      for_each_step<kPieces>([&](auto piece) {
        issue(piece);
        read_scales(piece);
        collect(piece, std::integral_constant<int, 0>());
      });
    }
  } else {
    // The next piece's products run while this one's sums are added up. The loop goes by two
    // chunks, so that a piece's registers are always the same.
    const auto collect_and_issue = [&](auto piece) {
      read_scales(piece);  // first, for its latency hides behind the issue
      issue(std::integral_constant<int, (decltype(piece)::value + 1) % (2 * kPieces)>());
      collect(piece, std::integral_constant<int, 1>());
    };
    const auto collect_last = [&](auto piece) {
      read_scales(piece);
      collect(piece, std::integral_constant<int, 0>());
    };
    issue(std::integral_constant<int, 0>());
    while (left > 2) for_each_step<2 * kPieces>(collect_and_issue);
    if (left == 2) {
      for_each_step<2 * kPieces - 1>(collect_and_issue);
      collect_last(std::integral_constant<int, 2 * kPieces - 1>());
    } else {
      for_each_step<kPieces - 1>(collect_and_issue);
      collect_last(std::integral_constant<int, kPieces - 1>());
    }
  }
}

#endif

}  // namespace cuda
}  // namespace rocm_kernels
