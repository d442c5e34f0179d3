// skinny_gemm on any GPU with tensor cores: weights go straight from memory to registers.
//
//   block = 16 * kRowTiles rows of w; its warps deal the K of these rows among themselves, 64 bytes
//   of every row at a time, and add their partial sums in shared memory, in warp order.
//
// A lane's 16-byte load is its share of several mma (fragments.cuh), so a weight passes
// through no shared memory and no shuffle. Each warp keeps kDepth such steps in flight; activations
// come through L1, one step ahead.
#pragma once

#include "fragments.cuh"

namespace rocm_kernels {
namespace cuda {

constexpr int kStreamWarps = 8;
constexpr int kStepRowBytes = 64;  // four lanes x 16 bytes

// Weights are read once: they pass L1 by and leave L2 first.
__device__ __forceinline__ uint4 load_streamed(const uint8_t* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// Grid: ceil(N / rows) x ceil(M / tokens) blocks of kStreamWarps warps. Rows of both operands start
// at multiples of 16 bytes and K is a multiple of a lane's load.
template <class Types, int kTokenTiles, int kRowTiles, int kDepth, bool kBlockScales>
__global__ void __launch_bounds__(kStreamWarps * 32)
    skinny_gemm_stream_kernel(const __grid_constant__ GemmArgs args) {
  constexpr int kTokens = kTokenTiles * kTileTokens;
  constexpr int kRows = kRowTiles * 16;
  constexpr int kRowStride = kRows + 8;
  constexpr int kStepElements = kStepRowBytes / Types::kWBytes;
  static_assert(kScaleBlock % kStepElements == 0, "a step must lie within one scale block");
  __shared__ float partial[kStreamWarps][kTokens][kRowStride];

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * kTokens;
  const int lane_k = quad * Types::kVectorElements;
  const int k_limit = static_cast<int>(args.k) - lane_k;  // this lane's loads start below it

  // Rows and tokens past the edge read the last one; their sums are dropped.
  const uint8_t* w_rows[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
    int64_t row = first_row + i * 8 + group;
    if (row >= args.n) row = args.n - 1;
    w_rows[i / 2][i % 2] =
        static_cast<const uint8_t*>(args.w) + (row * args.w_stride + lane_k) * Types::kWBytes;
  }
  const uint8_t* a_rows[kTokenTiles];
  bool a_present[kTokenTiles];
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    const int64_t token = first_token + i * kTileTokens + group;
    a_present[i] = token < args.m;
    a_rows[i] = static_cast<const uint8_t*>(args.a) +
                ((a_present[i] ? token : 0) * args.a_stride + lane_k) * Types::kABytes;
  }

  const uint4 zero = {0, 0, 0, 0};
  uint4 w_ring[kDepth][kRowTiles][2];
  uint4 a_next[kTokenTiles][Types::kAVectors];
  auto load_w = [&](uint4(&vectors)[kRowTiles][2], int k) {
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      vectors[i / 2][i % 2] = zero;
      if (k < k_limit) {
        vectors[i / 2][i % 2] =
            load_streamed(w_rows[i / 2][i % 2] + static_cast<int64_t>(k) * Types::kWBytes);
      }
    }
  };
  auto load_a = [&](int k) {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
#pragma unroll
      for (int v = 0; v < Types::kAVectors; ++v) {
        a_next[i][v] = zero;
        if (k < k_limit && a_present[i]) {
          a_next[i][v] = __ldg(reinterpret_cast<const uint4*>(
              a_rows[i] + static_cast<int64_t>(k) * Types::kABytes + v * 16));
        }
      }
    }
  };

  constexpr int kStride = kStreamWarps * kStepElements;
  release_successor();
  await_predecessor();
  int k = warp * kStepElements;
#pragma unroll
  for (int d = 0; d < kDepth; ++d) load_w(w_ring[d], k + d * kStride);
  load_a(k);

  float sums[kRowTiles][kTokenTiles][4] = {};
  while (k < args.k) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d, k += kStride) {
      if (k >= args.k) break;
      Fragment<Types::kVectorMmas> a_fragments[kTokenTiles];
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) a_fragments[i] = widen_a<Types>(a_next[i]);
      load_a(k + kStride);
      Fragment<Types::kVectorMmas> w_fragments[kRowTiles][2];
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i) {
        w_fragments[i / 2][i % 2] = widen_w<Types>(w_ring[d][i / 2][i % 2]);
      }
      load_w(w_ring[d], k + kDepth * kStride);
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        float scale[2];
        if constexpr (kBlockScales) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int64_t token = first_token + tile * kTileTokens + 2 * quad + i;
            scale[i] = token < args.m
                           ? block_scale(args.scale_a, token, k / kScaleBlock) *
                                 block_scale(args.scale_w, first_row / kScaleBlock, k / kScaleBlock)
                           : 0.0f;
          }
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if constexpr (kBlockScales) {
            float step_sum[4] = {};
            multiply<Types>(step_sum, w_fragments[r][0], w_fragments[r][1], a_fragments[tile]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums[r][tile][i] = fmaf(step_sum[i], scale[i % 2], sums[r][tile][i]);
            }
          } else {
            multiply<Types>(sums[r][tile], w_fragments[r][0], w_fragments[r][1], a_fragments[tile]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[warp][tile * kTileTokens + 2 * quad + i % 2][r * 16 + i / 2 * 8 + group] =
            sums[r][tile][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kRows; i += kStreamWarps * 32) {
    const int token = i / kRows;
    const int row = i % kRows;
    if (first_token + token >= args.m || first_row + row >= args.n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) sum += partial[w][token][row];
    finish(args, first_token + token, first_row + row, sum);
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
