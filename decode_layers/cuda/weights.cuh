// The stream of weights: a ring of stages in shared memory for each warpgroup that multiplies,
// which others fill in the order in which it multiplies; and the product of a row with them.
//
// A warpgroup takes eight rows of w at a time, and a stage holds a part of each. Whoever fetches
// goes on to the next product, and to the next layer, and waits for a free stage alone; but of a
// product that has not begun it asks for one stage at a time. A ring that is asked for at once
// takes 6 us to arrive, and whatever else the multiprocessor loads or stores stands in line behind
// it: the meetings, rows and keys that all blocks wait for.
//
// One row of x leaves 7 of the 8 columns of wgmma.m64n8k32 idle, so they take pieces of K: 128
// bytes of a row, as they lie in memory, are a core matrix of eight "rows" of 16 bytes, and 128
// bytes of x's codes one of eight "columns".
//
//            128 bytes of x:   x0 x1 ... x7
//   128 bytes of row r:  w0     .                  the sum of row r: the diagonal of its 8 x 8,
//                        w1        .               w0 x0 + w1 x1 + ... + w7 x7
//                        ..           .
//                        w7              .         and so for eight rows, 256 bytes of K at once
//
// FP8 is multiplied as it is, from shared memory without a conflict of banks, and in no thread's
// time: widening it for mma.sync takes longer than the memory does. Sums are added up in float32
// after 128 products, as in gemm: the tensor cores' own are shorter.
#pragma once

#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/tma.cuh"
#include "../../common/cuda/wgmma.cuh"
#include "../../common/gpu/reduce.h"
#include "problem.h"

namespace rocm_kernels::cuda::decode {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The units of a product that are a block's.
struct Share {
  template <typename T>
  static __device__ __forceinline__ Share of(const Product<T>& product) {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const auto begin = [&](int b) { return static_cast<int>(int64_t{product.units} * b / blocks); };
    return {begin(block), begin(block + 1)};
  }

  int first, end;
};

// Of these a warpgroup's tiles: every second. Which is the first goes on from product to product
// (`turn`), lest the same warpgroup always have one more.
struct Tiles {
  template <typename T>
  __device__ __forceinline__ Tiles(const Product<T>& product, const Share& share, int group,
                                   int& turn) {
    const int tile = product.tile_units();
    unit = share.first + ((group - turn) & (kGroups - 1)) * tile;
    end = share.end;
    turn += (share.end - share.first + tile - 1) >> (product.unit_shift ? 2 : 3);
  }
  __device__ __forceinline__ bool is_over() const { return unit >= end; }
  template <typename T>
  __device__ __forceinline__ void advance(const Product<T>& product) {
    unit += kGroups * product.tile_units();
  }
  // Of the tile's rows, which may not be there.
  template <typename T>
  __device__ __forceinline__ bool has(const Product<T>& product, int i) const {
    return unit + (i >> product.unit_shift) < end;
  }

  int unit, end;
};
static_assert(kTileRows == 8, "Tiles: shifts");

// A warpgroup's stages.
struct Ring {
  uint32_t full, empty;  // the first stage's barriers
  uint32_t data;
  int num_stages;
  volatile int* begun;  // how many products the warpgroup has begun to multiply

  __device__ __forceinline__ uint32_t full_of(int stage) const {
    return full + stage * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t empty_of(int stage) const {
    return empty + stage * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t data_of(int stage) const {
    return data + stage * kStageBytes;
  }
};

// Fetches every kFetchers-th part of a warpgroup's weights, of all layers; a warp's work. A copy
// for each row, by as many lanes, since a lane takes 60 cycles to order one.
template <typename T>
__device__ __forceinline__ void fetch_weights(const StackProblem<T>& p, const Ring& ring,
                                              const Share (&shares)[kProducts], int group,
                                              int fetcher, int lane) {
  if (lane >= kTileRows) return;
  const uint64_t policy = l2_policy(L2Policy::kEvictFirst);
  PipelineState state{0, 1}, before{0, 0};
  int turn = 0, skip = fetcher, product_number = 0;
  for (int layer = 0; layer < p.count; ++layer) {
    for (int i = 0; i < p.products_of(layer); ++i) {
      const Product<T>& product = p.products[i];
      const uint8_t* const w = p.layers[layer].products[i].w;
      ++product_number;
      for (Tiles tiles(product, shares[i], group, turn); !tiles.is_over(); tiles.advance(product)) {
        const int there = min(kTileRows, (tiles.end - tiles.unit) << product.unit_shift);
        const uint8_t* const row = w + int64_t{product.row(tiles.unit, lane)} * product.k;
        for (int part = 0; part < product.parts; ++part) {
          if (skip == 0) {
            const uint32_t full = ring.full_of(state.stage);
            const int bytes = product.bytes_of(part);
            mbarrier_wait(ring.empty_of(state.stage), state.parity);
            // Asked again each time: once the product has begun, the stage before may be refilled,
            // and its barrier be two phases on.
            while (product_number > *ring.begun &&
                   !mbarrier_is_over(ring.full_of(before.stage), before.parity ^ 1)) {
            }
            if (lane == 0) mbarrier_arrive_expect(full, there * bytes);
            __syncwarp((1u << kTileRows) - 1);
            if (lane < there) {
              load_bulk(row + part * kPartBytes, ring.data_of(state.stage) + lane * kPartBytes,
                        bytes, full, policy);
            }
            skip = kFetchers;
          }
          --skip;
          before = state;
          state.advance(ring.num_stages);
        }
      }
    }
  }
}

// What a row's sum is scaled by, and what is added: the result of an earlier product, or a bias.
struct RowEnd {
  float scale, addend;
};

// The RowEnds of a block's rows of a product: asked for while others wait, for they come from
// memory, and then in shared memory. By all warps that multiply.
class RowEnds {
 public:
  // of_row(row) gives a row's.
  template <typename T, typename OfRow>
  __device__ __forceinline__ RowEnds(const Product<T>& product, const Share& share, int thread,
                                     const OfRow& of_row)
      : thread_(thread), rows_((share.end - share.first) << product.unit_shift) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = thread + i * kThreads;
      if (row < rows_) {
        held_[i] = of_row(product.row(share.first, row));
      }
    }
  }
  // A barrier must follow.
  __device__ __forceinline__ void put(RowEnd* shared) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = thread_ + i * kThreads;
      if (row < rows_) shared[row] = held_[i];
    }
  }

 private:
  static constexpr int kHeld = kMostRows / kThreads;

  const int thread_, rows_;
  RowEnd held_[kHeld];
};

// An operand as it lies in memory: core matrices of 128 bytes side by side, and `stride` bytes from
// eight rows to the next eight.
__device__ __forceinline__ uint64_t linear_operand(uint32_t address, int stride) {
  return ((address & 0x3FFFF) >> 4) | uint64_t{128 >> 4} << 16 |
         static_cast<uint64_t>(stride >> 4) << 32;
}

// The sum of a row: of the 8 x 8 of its pieces and those of x the diagonal, column g of row g. A
// warp has two rows of a tile, the first for lanes below 16, the second for the others.
__device__ __forceinline__ float sum_of_row(const float (&sums)[4], int lane) {
  const bool mine = lane % 4 == lane / 8, odd = lane & 4, second = lane & 16;
  const float first_sum = mine ? (odd ? sums[1] : sums[0]) : 0.0f;
  const float second_sum = mine ? (odd ? sums[3] : sums[2]) : 0.0f;
  const float other = __shfl_xor_sync(0xFFFFFFFFu, second ? first_sum : second_sum, 16);
  return reduce_lanes<16>((second ? second_sum : first_sum) + other, Sum{});
}

// The warpgroup's part of a product, of which the block's begins with unit `first`. codes: of the
// row, in shared memory, as are `ends`. at_end(row, there, sum, its RowEnd) takes a sum, the same
// in all lanes of its row, whether there is such a row or not. The products of a stage are under
// way while those of the one before are added up.
template <typename T, typename AtEnd>
__device__ __forceinline__ void multiply(const Product<T>& product, const Ring& ring,
                                         PipelineState& state, Tiles tiles, int first,
                                         uint32_t codes, int warp, int lane, const RowEnd* ends,
                                         const AtEnd& at_end) {
  constexpr int kAddedUp = 4;  // instructions: 128 products
  using Some = float[kSteps / kAddedUp][1][4];
  const int i = 2 * warp + lane / 16, tile_shift = 4 - product.unit_shift;
  int left = ((tiles.end - tiles.unit + (1 << tile_shift) - 1) >> tile_shift) * product.parts;
  if (warp == 0 && lane == 0) *ring.begun = *ring.begun + 1;
  if (left <= 0) return;
  PipelineState next = state;  // to begin
  int begun = 0, part = 0;
  float sums[4] = {};
  const auto begin = [&](Some& some) {
    const uint64_t x = linear_operand(codes + begun * kPartBytes, 0);
    const uint64_t w = linear_operand(ring.data_of(next.stage), kPartBytes);
    mbarrier_wait(ring.full_of(next.stage), next.parity);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      wgmma<DType::kFloat8E4M3FN>(some[s / kAddedUp], w + wgmma_offset(s * kStepBytes),
                                  x + wgmma_offset(s * kStepBytes), s % kAddedUp > 0);
    }
    wgmma_commit();
    next.advance(ring.num_stages);
    if (++begun == product.parts) begun = 0;
  };
  const auto finish = [&](Some& some) {
#pragma unroll
    for (int s = 0; s < kSteps / kAddedUp; ++s) {
      wgmma_pin(some[s]);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] += some[s][0][j];
    }
    if (lane == 0) mbarrier_arrive(ring.empty_of(state.stage));
    state.advance(ring.num_stages);
    if (++part < product.parts) return;
    const bool there = tiles.has(product, i);
    at_end(product.row(tiles.unit, i), there, sum_of_row(sums, lane),
           there ? ends[((tiles.unit - first) << product.unit_shift) + i] : RowEnd{});
    tiles.advance(product);
    part = 0;
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
  };
  Some even, odd;
  begin(even);
#pragma unroll 1
  for (; left > 2; left -= 2) {
    begin(odd);
    wgmma_wait<1>();
    finish(even);
    begin(even);
    wgmma_wait<1>();
    finish(odd);
  }
  if (left == 2) {
    begin(odd);
    wgmma_wait<1>();
    finish(even);
    wgmma_wait<0>();
    finish(odd);
  } else {
    wgmma_wait<0>();
    finish(even);
  }
}

#endif

}  // namespace rocm_kernels::cuda::decode
