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
// bytes of x's codes one of eight "columns". Each further token has eight columns more.
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

// What a row's sums are scaled by, and what is added to them: results of an earlier product, of
// each token, or a bias. norms: the weight that the sums will meet in a norm.
struct RowEnds {
  float scales[kMostRows], addends[kMostRows], norms[kMostAdded];
};

// Those of a block's rows of a product: asked for while others wait, for they come from memory, and
// then in shared memory. By all warps that multiply. 1 << each_shift addends are a row's.
class AskedRowEnds {
 public:
  // scale_of(row), addend_of(row, i), norm_of(row): of a row of the product.
  template <typename T, typename ScaleOf, typename AddendOf, typename NormOf>
  __device__ __forceinline__ AskedRowEnds(const Product<T>& product, const Share& share,
                                          int each_shift, int thread, const ScaleOf& scale_of,
                                          const AddendOf& addend_of, const NormOf& norm_of)
      : thread_(thread),
        rows_((share.end - share.first) << product.unit_shift),
        addends_of_rows_(rows_ << each_shift) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = thread + i * kThreads, row = at >> each_shift;
      if (at < rows_) scales_[i] = scale_of(product.row(share.first, at));
      if (at < addends_of_rows_) {
        addends_[i] = addend_of(product.row(share.first, row), at - (row << each_shift));
      }
    }
    if (thread < min(rows_, kMostAdded)) norm_ = norm_of(product.row(share.first, thread));
  }
  // A barrier must follow.
  __device__ __forceinline__ void put(RowEnds& shared) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = thread_ + i * kThreads;
      if (at < rows_) shared.scales[at] = scales_[i];
      if (at < addends_of_rows_) shared.addends[at] = addends_[i];
    }
    if (thread_ < min(rows_, kMostAdded)) shared.norms[thread_] = norm_;
  }

 private:
  static constexpr int kHeld = kMostRows / kThreads;
  static_assert(kMostAdded <= kThreads);

  const int thread_, rows_, addends_of_rows_;
  float scales_[kHeld], addends_[kHeld], norm_;
};

// An operand as it lies in memory: core matrices of 128 bytes side by side, and `stride` bytes from
// eight rows to the next eight.
__device__ __forceinline__ uint64_t linear_operand(uint32_t address, int stride) {
  return ((address & 0x3FFFF) >> 4) | uint64_t{128 >> 4} << 16 |
         static_cast<uint64_t>(stride >> 4) << 32;
}

// The sum of a row and of a token: of the 8 x 8 of its pieces and those of x the diagonal, column g
// of row g. A warp has two rows of a tile, the first for lanes below 16, the second for the others;
// of these, token_of_lane() tells whose token's.
template <int kTokens>
__device__ __forceinline__ int token_of_lane(int lane) {
  return lane % 16 / (16 / kTokens);
}
template <int kTokens>
__device__ __forceinline__ float sum_of_row(const float (&sums)[kTokens][4], int lane) {
  const bool mine = lane % 4 == lane / 8, odd = lane & 4, second = lane & 16;
  float values[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const float first_sum = mine ? (odd ? sums[t][1] : sums[t][0]) : 0.0f;
    const float second_sum = mine ? (odd ? sums[t][3] : sums[t][2]) : 0.0f;
    const float other = __shfl_xor_sync(0xFFFFFFFFu, second ? first_sum : second_sum, 16);
    values[t] = (second ? second_sum : first_sum) + other;
  }
  int width = kTokens;  // of those that a lane still has
#pragma unroll
  for (int mask = 8; mask > 0; mask /= 2) {
    if (width == 1) {
      values[0] += __shfl_xor_sync(0xFFFFFFFFu, values[0], mask);
      continue;
    }
    width /= 2;
    const bool upper = lane & mask;
#pragma unroll
    for (int t = 0; t < width; ++t) {
      const float kept = upper ? values[t + width] : values[t];
      const float sent = upper ? values[t] : values[t + width];
      values[t] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, mask);
    }
  }
  return values[0];
}

// The warpgroup's part of a product, of which the block's begins with unit `first`. codes: of the
// rows, in shared memory. at_end(row, there, sum, i) takes a sum, of the lane's token, whether
// there is such a row, and which of the block's it is.
template <int kTokens, typename T, typename AtEnd>
__device__ __forceinline__ void multiply(const Product<T>& product, const Ring& ring,
                                         PipelineState& state, Tiles tiles, int first,
                                         uint32_t codes, int warp, int lane, const AtEnd& at_end) {
  constexpr int kAddedUp = 4;  // instructions: 128 products
  const int i = 2 * warp + lane / 16;
  if (warp == 0 && lane == 0) *ring.begun = *ring.begun + 1;
#pragma unroll 1
  for (; !tiles.is_over(); tiles.advance(product)) {
    float sums[kTokens][4] = {};
#pragma unroll 1
    for (int part = 0; part < product.parts; ++part) {
      float some[kSteps / kAddedUp][kTokens][4];
      const uint64_t x = linear_operand(codes + part * kPartBytes, product.row_bytes());
      const uint64_t w = linear_operand(ring.data_of(state.stage), kPartBytes);
      mbarrier_wait(ring.full_of(state.stage), state.parity);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        wgmma<DType::kFloat8E4M3FN>(some[s / kAddedUp], w + wgmma_offset(s * kStepBytes),
                                    x + wgmma_offset(s * kStepBytes), s % kAddedUp > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int s = 0; s < kSteps / kAddedUp; ++s) {
        wgmma_pin(some[s]);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[t][j] += some[s][t][j];
        }
      }
      if (lane == 0) mbarrier_arrive(ring.empty_of(state.stage));
      state.advance(ring.num_stages);
    }
    at_end(product.row(tiles.unit, i), tiles.has(product, i), sum_of_row(sums, lane),
           ((tiles.unit - first) << product.unit_shift) + i);
  }
}

#endif

}  // namespace rocm_kernels::cuda::decode
