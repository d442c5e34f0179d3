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
//   find the rows to copy; fetch num_stages - 1 steps of K; find the rows whose sums a lane has
//   each step: its copies have arrived | fetch another, to the stage that was read last;
//              read_weights; multiply: widen, mma; behind each 64 elements of K add, by their scales
//   end: scales, bias, activation, stores of elements
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

// The steps of a block, and what they share.
template <class Types, int kTile, bool kGateUp>
struct TiledBlock {
  static constexpr MoeTile kShape = kMoeTiles[kTile];
  static constexpr int kThreads = kShape.threads();
  static constexpr int kStepElements = Types::kStepElements;
  static constexpr int kARowBytes = kStepElements * Types::kABytes;
  static constexpr int kWBytes = kShape.block_n * kMoeStepBytes;
  static constexpr int kStageBytes = kShape.stage_bytes(kARowBytes);
  static constexpr int kStages = kShape.num_stages;
  static constexpr int kStepsPerBlock = kScaleBlock / kStepElements;
  static constexpr int kStepsPerSum = Types::kParts > 1 ? 1 : 64 / kStepElements;
  static constexpr int kRowTiles = kMoeWarpN / kMmaN;  // of w: a gate's and an up's
  static constexpr int kWarpM = kShape.block_m / kShape.warps_m;
  static constexpr int kColumnTiles = kWarpM / kMmaM;  // of a
  static constexpr int kARows = (kShape.block_m * (kARowBytes / 16) + kThreads - 1) / kThreads;
  static constexpr int kWRows = kWBytes / 16 / kThreads;
  static_assert(kRowTiles == 2, "moe_tiled_kernel: a warp has a gate's rows and an up's");

  // Of the 16-byte vectors that a thread copies of each step: where their rows begin, nullptr for a
  // row that is not there.
  struct Sources {
    const uint8_t *w[kWRows], *a[kARows];
  };
  // The rows of w whose sums a lane has, and the rows of a: -1 for one that is not there.
  struct OwnRows {
    int n[kRowTiles][2];
    int64_t a[kColumnTiles][2];
  };
  using Weights = WeightVector<Types>[kRowTiles][2];
  using Sums = float[kRowTiles][kColumnTiles][4];  // of a lane: mma()

  const GroupedProblem& p;
  const RowTile& tile;
  uint32_t shared;     // the stages
  int first_n;         // of the block
  int warp_m, warp_n;  // of the warp, in the block
  int group, quad;     // of the lane
  int last_step;       // of the part of K, exclusive

  // ---- Fetch: a step of both operands to its stage ----------------------------------------------

  __device__ __forceinline__ void find_sources(Sources& from) const {
    const auto* const w_data =
        static_cast<const uint8_t*>(p.w.data) + tile.expert * p.w.expert_stride * Types::kWBytes;
#pragma unroll
    for (int i = 0; i < kWRows; ++i) {
      const int vector = threadIdx.x + i * kThreads;
      const int row =
          w_row_of<kGateUp, kMmaN>(first_n, vector / (kMoeStepBytes / 16), p.n, p.interleaved);
      from.w[i] = row < 0 ? nullptr : w_data + row * p.w.row_stride * Types::kWBytes;
    }
#pragma unroll
    for (int i = 0; i < kARows; ++i) {
      const int row = tile.begin + (threadIdx.x + i * kThreads) / (kARowBytes / 16);
      from.a[i] = row < tile.end ? static_cast<const uint8_t*>(p.a) +
                                       p.a_row(row) * p.a_stride * Types::kABytes
                                 : nullptr;
    }
  }

  // 16 bytes of a row from `byte` on; zeros beyond its `row_bytes`. `any`: an address that exists.
  __device__ __forceinline__ static void fetch_vector(const uint8_t* row, const void* any, int byte,
                                                      int row_bytes, uint32_t to) {
    const int left = row == nullptr ? 0 : row_bytes - byte;
    const int count = left >= 16 ? 16 : left > 0 ? left : 0;
    copy_vector(to, count > 0 ? row + byte : any, count);
  }

  // Where a step's operands lie: w, then a.
  __device__ __forceinline__ uint32_t stage_of(int step) const {
    return shared + static_cast<uint32_t>(step % kStages) * kStageBytes;
  }

  __device__ __forceinline__ void fetch(int step, const Sources& from) const {
    if (step < last_step) {
      const uint32_t to = stage_of(step);
#pragma unroll
      for (int i = 0; i < kWRows; ++i) {
        const int vector = threadIdx.x + i * kThreads;
        const int byte = step * kMoeStepBytes + vector % (kMoeStepBytes / 16) * 16;
        fetch_vector(from.w[i], p.w.data, byte, p.k / Types::kPacked * Types::kWBytes,
                     to + vector * 16);
      }
#pragma unroll
      for (int i = 0; i < kARows; ++i) {
        const int vector = threadIdx.x + i * kThreads;
        if (vector >= kShape.block_m * (kARowBytes / 16)) continue;
        const int byte = step * kARowBytes + vector % (kARowBytes / 16) * 16;
        fetch_vector(from.a[i], p.a, byte, p.k * Types::kABytes, to + kWBytes + vector * 16);
      }
    }
    copies_commit();  // empty groups keep the count
  }

  // ---- Multiply: part += products of a step -----------------------------------------------------

  __device__ __forceinline__ void find_own_rows(OwnRows& own) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own.n[i][half] = w_row_of<kGateUp, kMmaN>(first_n, warp_n + i * kMmaN + half * 8 + group,
                                                  p.n, p.interleaved);
      }
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = tile.begin + warp_m + j * kMmaM + quad * 2 + e;
        own.a[j][e] = row < tile.end ? p.a_row(row) : -1;
      }
    }
  }

  __device__ __forceinline__ void read_weights(int step, const OwnRows& own, Weights& w) const {
    const uint32_t data = stage_of(step);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_n + i * kMmaN + half * 8 + group;
        w[i][half].load(data + row * kMoeStepBytes + quad * 16,
                        exponent_code<Types>(p, tile.expert, own.n[i][half], step * 4 + quad));
      }
    }
  }

  // The products of part `step_part` of Types::kParts of a step.
  __device__ __forceinline__ void multiply(int step, int step_part, const Weights& weights,
                                           Sums& part) const {
    const uint32_t data = stage_of(step);
    Fragment<Types::kVectorMmas> w[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) w[i][half] = weights[i][half].fragment(step_part);
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      uint4 vectors[Types::kAVectors];
#pragma unroll
      for (int v = 0; v < Types::kAVectors; ++v) {
        const int vector = (quad * Types::kParts + step_part) * Types::kAVectors + v;
        vectors[v] =
            load_shared(data + kWBytes + (warp_m + j * kMmaM + group) * kARowBytes + vector * 16);
      }
      const auto a = widen_a<Types>(vectors);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) mma<Types>(part[i][j], w[i][0], w[i][1], a);
    }
  }

  // ---- Add: sums += part, by the scales of its block of K; part = 0 -----------------------------

  __device__ __forceinline__ void add(int64_t k_block, const ScaleView& scale_w, bool block_scaled,
                                      const OwnRows& own, Sums& part, Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float factor = 1.0f;
          if (block_scaled) {
            const int n = own.n[i][e / 2];
            const int64_t row = own.a[j][e % 2];
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

  // ---- End: elements of h, or of rows where they belong -----------------------------------------

  __device__ __forceinline__ void end(int part_of_k, const ScaleView& scale_w, const OwnRows& own,
                                      const Sums& sums) const {
    // With its scales of whole rows and, of the first part of K, its bias.
    const auto value_of = [&](int i, int j, int e) {
      const int n = own.n[i][e / 2];
      const float value = sums[i][j][e] * p.scale_a.outer(own.a[j][e % 2]) * scale_w.outer(n);
      return part_of_k == 0 ? value + p.bias(tile.expert, n) : value;
    };
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = tile.begin + warp_m + j * kMmaM + quad * 2 + e % 2;
        if (row >= tile.end) continue;
        const int64_t start = p.out_row(row, part_of_k);
        if constexpr (kGateUp) {
          if (own.n[0][e / 2] < 0) continue;
          const int column = first_n / 2 + warp_n / 2 + e / 2 * 8 + group;
          store_element(p.out, p.out_dtype, start + column,
                        gated(p.activation, p.limit, value_of(0, j, e), value_of(1, j, e)));
        } else {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            const int n = own.n[i][e / 2];
            if (n >= 0) store_element(p.out, p.out_dtype, start + n, value_of(i, j, e));
          }
        }
      }
    }
  }
};

// Grid: as many blocks as there can be tiles; those that the routing leaves without one leave at
// once. Shared memory: num_stages * stage_bytes(). Rows of both operands start at multiples of 16
// bytes.
template <class Types, int kTile, bool kGateUp>
__global__ void __launch_bounds__(kMoeTiles[kTile].threads())
    moe_tiled_kernel(const __grid_constant__ GroupedProblem p, const GroupedOrder order) {
  using Block = TiledBlock<Types, kTile, kGateUp>;
  constexpr MoeTile kShape = Block::kShape;
  constexpr int kStages = Block::kStages, kStepsPerBlock = Block::kStepsPerBlock;

  extern __shared__ __align__(16) uint8_t shared[];
  begin_after_previous_kernel();
  const GroupedOrder::Place place = order.place_of(blockIdx.x, *p.tile_count);
  if (place.m < 0) return;
  const RowTile tile = p.tiles[place.m];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_n = warp % kShape.warps_n() * kMoeWarpN;
  const int warp_m = warp / kShape.warps_n() * Block::kWarpM;
  const int steps = static_cast<int>(ceil_div(p.k, Block::kStepElements));
  // Parts of K are cut at scale blocks, so that each of them has its sums in one part.
  const EvenSplit parts =
      EvenSplit::of(static_cast<int>(ceil_div(steps, kStepsPerBlock)), order.split_k);
  const int first_step = parts.begin_of(place.part) * kStepsPerBlock;
  const int last_part = parts.begin_of(place.part + 1) * kStepsPerBlock;
  const int last_step = last_part < steps ? last_part : steps;

  const Block block{p,
                    tile,
                    shared_address(shared),
                    place.n * kShape.block_n,
                    warp_m,
                    warp_n,
                    lane / 4,
                    lane % 4,
                    last_step};
  typename Block::Sources from;
  block.find_sources(from);
  for (int i = 0; i < kStages - 1; ++i) block.fetch(first_step + i, from);

  const ScaleView scale_w = p.w.scale_of(tile.expert);
  const bool block_scaled = scale_w.is_blocked() || p.scale_a.is_blocked();
  typename Block::OwnRows own;
  block.find_own_rows(own);

  typename Block::Sums sums = {}, part = {};
  for (int step = first_step; step < last_step; ++step) {
    copies_wait<kStages - 2>();
    __syncthreads();  // this step is there, and the stage of the last one has been read
    block.fetch(step + kStages - 1, from);
    typename Block::Weights w;
    block.read_weights(step, own, w);
#pragma unroll
    for (int step_part = 0; step_part < Types::kParts; ++step_part) {
      block.multiply(step, step_part, w, part);
      if ((step + 1) % Block::kStepsPerSum != 0 && step + 1 != last_step) continue;
      block.add(step / kStepsPerBlock, scale_w, block_scaled, own, part, sums);
    }
  }
  copies_wait_all();
  block.end(place.part, scale_w, own, sums);
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
