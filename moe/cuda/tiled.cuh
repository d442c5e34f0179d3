// Grouped products by tiles, on any tensor core (sm_80 and later): mma.sync, FP8 widened to float16
// exactly, rows of a gathered as they are copied to shared memory.
//
//   a block: a tile of rows of one expert (gpu/product.h) x a tile of rows of w x a part of K
//   K goes by in steps of 64 bytes of w, num_stages of them under way to shared memory
//
//   sums[row, n] = sum_k a[row of x, or of h, k] * w[expert, n, k]
//   out = sums with scales and biases: h = act(gate, up), or rows where they belong
//
// clang-format off
// Timeline of a block, whose threads all do the same. | is a barrier of all.
//
//   the kernel before; the block's place in the order: none, and it leaves
//   ask for num_stages - 1 steps of K
//   each step: its copies have arrived | ask for another, to the stage that was read last;
//              read, widen, multiply; behind each 64 elements of K add, by their scales
//   scales, bias, activation, stores of elements
// clang-format on
//
// A lane reads 16 consecutive bytes of a row as its share of several mma (common/cuda/mma.cuh). The
// tensor core truncates where float32 rounds, so the sums of each 64 elements of K are added apart;
// there block scales are applied.
#pragma once

#include "../../common/core/math.h"
#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mma.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "../gpu/order.h"
#include "../gpu/problem.h"
#include "operands.cuh"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda::moe {

// Grid: as many blocks as there can be tiles; those that the routing leaves without one leave at
// once. Shared memory: num_stages * stage_bytes(). Rows of both operands start at multiples of 16
// bytes.
template <class Types, int kTile, bool kGateUp>
__global__ void __launch_bounds__(kMoeTiles[kTile].threads())
    moe_tiled_kernel(const __grid_constant__ GroupedProblem p, const GroupedOrder order) {
  constexpr MoeTile kShape = kMoeTiles[kTile];
  constexpr int kThreads = kShape.threads();
  constexpr int kStepElements = Types::kStepElements;
  constexpr int kARowBytes = kStepElements * Types::kABytes;
  constexpr int kWBytes = kShape.block_n * kMoeStepBytes;
  constexpr int kStageBytes = kShape.stage_bytes(kARowBytes);
  constexpr int kStages = kShape.num_stages;
  constexpr int kStepsPerBlock = kScaleBlock / kStepElements;
  constexpr int kStepsPerSum = Types::kParts > 1 ? 1 : 64 / kStepElements;
  constexpr int kRowTiles = kMoeWarpN / kMmaN;  // of w: a gate's and an up's
  constexpr int kWarpM = kShape.block_m / kShape.warps_m;
  constexpr int kColumnTiles = kWarpM / kMmaM;  // of a
  constexpr int kARows = (kShape.block_m * (kARowBytes / 16) + kThreads - 1) / kThreads;
  constexpr int kWRows = kWBytes / 16 / kThreads;
  static_assert(kRowTiles == 2, "moe_tiled_kernel: a warp has a gate's rows and an up's");

  extern __shared__ __align__(16) uint8_t shared[];
  begin_after_previous_kernel();
  const GroupedOrder::Place place = order.place_of(blockIdx.x, *p.tile_count);
  if (place.m < 0) return;
  const RowTile tile = p.tiles[place.m];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, quad = lane % 4;
  const int first_n = place.n * kShape.block_n;
  const int warp_n = warp % kShape.warps_n() * kMoeWarpN;
  const int warp_m = warp / kShape.warps_n() * kWarpM;
  const int steps = static_cast<int>(ceil_div(p.k, kStepElements));
  // Parts of K are cut at scale blocks, so that each of them has its sums in one part.
  const EvenSplit parts =
      EvenSplit::of(static_cast<int>(ceil_div(steps, kStepsPerBlock)), order.split_k);
  const int first_step = parts.begin_of(place.part) * kStepsPerBlock;
  const int last_part = parts.begin_of(place.part + 1) * kStepsPerBlock;
  const int last_step = last_part < steps ? last_part : steps;

  // The 16-byte vectors that this thread copies of each step: where their rows begin, nullptr for a
  // row that is not there.
  const uint8_t *w_rows[kWRows], *a_rows[kARows];
  const auto* const w_data =
      static_cast<const uint8_t*>(p.w.data) + tile.expert * p.w.expert_stride * Types::kWBytes;
#pragma unroll
  for (int i = 0; i < kWRows; ++i) {
    const int vector = threadIdx.x + i * kThreads;
    const int row =
        w_row_of<kGateUp, kMmaN>(first_n, vector / (kMoeStepBytes / 16), p.n, p.interleaved);
    w_rows[i] = row < 0 ? nullptr : w_data + row * p.w.row_stride * Types::kWBytes;
  }
#pragma unroll
  for (int i = 0; i < kARows; ++i) {
    const int row = tile.begin + (threadIdx.x + i * kThreads) / (kARowBytes / 16);
    a_rows[i] = row < tile.end
                    ? static_cast<const uint8_t*>(p.a) + p.a_row(row) * p.a_stride * Types::kABytes
                    : nullptr;
  }
  const uint32_t base = shared_address(shared);
  const auto fetch_step = [&](int step) {
    if (step < last_step) {
      const uint32_t to = base + static_cast<uint32_t>(step % kStages) * kStageBytes;
      const auto fetch = [&](const uint8_t* row, const void* any, int byte, int row_bytes,
                             uint32_t place) {
        const int left = row == nullptr ? 0 : row_bytes - byte;
        const int count = left >= 16 ? 16 : left > 0 ? left : 0;
        copy_vector(place, count > 0 ? row + byte : any, count);
      };
#pragma unroll
      for (int i = 0; i < kWRows; ++i) {
        const int vector = threadIdx.x + i * kThreads;
        const int byte = step * kMoeStepBytes + vector % (kMoeStepBytes / 16) * 16;
        fetch(w_rows[i], p.w.data, byte, p.k / Types::kPacked * Types::kWBytes, to + vector * 16);
      }
#pragma unroll
      for (int i = 0; i < kARows; ++i) {
        const int vector = threadIdx.x + i * kThreads;
        if (vector >= kShape.block_m * (kARowBytes / 16)) continue;
        const int byte = step * kARowBytes + vector % (kARowBytes / 16) * 16;
        fetch(a_rows[i], p.a, byte, p.k * Types::kABytes, to + kWBytes + vector * 16);
      }
    }
    copies_commit();  // empty groups keep the count
  };
  for (int i = 0; i < kStages - 1; ++i) fetch_step(first_step + i);

  const ScaleView scale_w = p.w.scale_of(tile.expert);
  const bool block_scaled = scale_w.is_blocked() || p.scale_a.is_blocked();
  // The rows of w whose sums a lane has, and the rows of a.
  int own_n[kRowTiles][2];
  int64_t own_a[kColumnTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own_n[i][half] = w_row_of<kGateUp, kMmaN>(first_n, warp_n + i * kMmaN + half * 8 + group, p.n,
                                                p.interleaved);
    }
  }
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = tile.begin + warp_m + j * kMmaM + quad * 2 + e;
      own_a[j][e] = row < tile.end ? p.a_row(row) : -1;
    }
  }

  float sums[kRowTiles][kColumnTiles][4] = {};
  float part[kRowTiles][kColumnTiles][4] = {};
  for (int step = first_step; step < last_step; ++step) {
    copies_wait<kStages - 2>();
    __syncthreads();  // this step is there, and the stage of the last one has been read
    fetch_step(step + kStages - 1);
    const uint32_t data = base + static_cast<uint32_t>(step % kStages) * kStageBytes;
    WeightVector<Types> vectors_w[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_n + i * kMmaN + half * 8 + group;
        vectors_w[i][half].load(
            data + row * kMoeStepBytes + quad * 16,
            exponent_code<Types>(p, tile.expert, own_n[i][half], step * 4 + quad));
      }
    }
#pragma unroll
    for (int half_step = 0; half_step < Types::kParts; ++half_step) {
      Fragment<Types::kVectorMmas> w[kRowTiles][2];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) w[i][half] = vectors_w[i][half].fragment(half_step);
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        uint4 vectors[Types::kAVectors];
#pragma unroll
        for (int v = 0; v < Types::kAVectors; ++v) {
          const int vector = (quad * Types::kParts + half_step) * Types::kAVectors + v;
          vectors[v] =
              load_shared(data + kWBytes + (warp_m + j * kMmaM + group) * kARowBytes + vector * 16);
        }
        const auto a = widen_a<Types>(vectors);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) mma<Types>(part[i][j], w[i][0], w[i][1], a);
      }
      if ((step + 1) % kStepsPerSum != 0 && step + 1 != last_step) continue;
      const int64_t k_block = step / kStepsPerBlock;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float factor = 1.0f;
            if (block_scaled) {
              const int n = own_n[i][e / 2];
              const int64_t row = own_a[j][e % 2];
              factor = n >= 0 && row >= 0
                           ? scale_w.block(n / kScaleBlock, k_block) * p.scale_a.block(row, k_block)
                           : 0.0f;
            }
            sums[i][j][e] = fmaf(part[i][j][e], factor, sums[i][j][e]);
            part[i][j][e] = 0.0f;
          }
        }
      }
    }
  }
  copies_wait<0>();

  const auto value_of = [&](int i, int j, int e) {
    const int n = own_n[i][e / 2];
    const float value = sums[i][j][e] * p.scale_a.outer(own_a[j][e % 2]) * scale_w.outer(n);
    return place.part == 0 ? value + p.bias(tile.expert, n) : value;
  };
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = tile.begin + warp_m + j * kMmaM + quad * 2 + e % 2;
      if (row >= tile.end) continue;
      const int64_t start = p.out_row(row, place.part);
      if constexpr (kGateUp) {
        if (own_n[0][e / 2] < 0) continue;
        const int column = first_n / 2 + warp_n / 2 + e / 2 * 8 + group;
        store_element(p.out, p.out_dtype, start + column,
                      gated(p.activation, p.limit, value_of(0, j, e), value_of(1, j, e)));
      } else {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const int n = own_n[i][e / 2];
          if (n >= 0) store_element(p.out, p.out_dtype, start + n, value_of(i, j, e));
        }
      }
    }
  }
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
