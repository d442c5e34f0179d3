// skinny_gemm on any GPU with tensor cores: w goes straight from memory to registers.
//
// A block owns block_n rows of w. Its warps share the K of these rows, 64 bytes of every row at a
// time in turn, and add their partial sums in shared memory, in the order of the warps.
//
// Timeline of a block, whose warps all do the same. | is a barrier of all.
//
//   the kernel before; load kNumStages steps of w, one of a
//   each step: widen a, load its next step; widen w, load w kNumStages steps on; multiply,
//              and with block scales add apart
//   sums to shared memory | add those of the warps, scales, bias, stores of elements
//
// A lane's 16-byte load is its share of several mma (common/cuda/mma.cuh), so that w passes through
// no shared memory and no shuffle. Each warp keeps kNumStages such steps in flight; a comes through
// L1, one step ahead.
#pragma once

#include "../../common/cuda/mma.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "epilogue.cuh"

namespace rocm_kernels {
namespace cuda::skinny {

constexpr int kRegisterPipelineWarps = 8;
constexpr int kStepBytes = 64;  // four lanes x 16 bytes

// w is read once: it passes L1 by and leaves L2 first.
__device__ __forceinline__ uint4 load_once(const uint8_t* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// Grid: ceil(N / block_n) x ceil(M / block_m) blocks of kRegisterPipelineWarps warps. Rows of both
// operands start at multiples of 16 bytes and K is a multiple of a lane's load.
template <class Types, int kBlockM, int kBlockN, int kNumStages, bool kBlockScales>
__global__ void __launch_bounds__(kRegisterPipelineWarps * 32)
    skinny_gemm_register_pipeline_kernel(const __grid_constant__ GemmArgs args) {
  constexpr int kMTiles = kBlockM / kMmaM;
  constexpr int kNTiles = kBlockN / kMmaN;
  constexpr int kPartialStride = kBlockN + 8;
  constexpr int kStepElements = kStepBytes / Types::kWBytes;
  static_assert(kScaleBlock % kStepElements == 0, "a step must lie within one scale block");
  __shared__ float partial[kRegisterPipelineWarps][kBlockM][kPartialStride];

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int64_t first_n = static_cast<int64_t>(blockIdx.x) * kBlockN;
  const int64_t first_m = static_cast<int64_t>(blockIdx.y) * kBlockM;
  const int lane_k = quad * Types::kVectorElements;
  const int k_limit = static_cast<int>(args.k) - lane_k;  // this lane's loads start below it

  // Rows of w past the edge read the last one; their sums are dropped.
  const uint8_t* w_rows[kNTiles][2];
#pragma unroll
  for (int i = 0; i < kNTiles * 2; ++i) {
    int64_t row = first_n + i * 8 + group;
    if (row >= args.n) row = args.n - 1;
    w_rows[i / 2][i % 2] =
        static_cast<const uint8_t*>(args.w) + (row * args.w_stride + lane_k) * Types::kWBytes;
  }
  const uint8_t* a_rows[kMTiles];
  bool a_present[kMTiles];
#pragma unroll
  for (int i = 0; i < kMTiles; ++i) {
    const int64_t m = first_m + i * kMmaM + group;
    a_present[i] = m < args.m;
    a_rows[i] = static_cast<const uint8_t*>(args.a) +
                ((a_present[i] ? m : 0) * args.a_stride + lane_k) * Types::kABytes;
  }

  const uint4 zero = {0, 0, 0, 0};
  uint4 w_stages[kNumStages][kNTiles][2];
  uint4 a_next[kMTiles][Types::kAVectors];
  auto load_w = [&](uint4(&vectors)[kNTiles][2], int k) {
#pragma unroll
    for (int i = 0; i < kNTiles * 2; ++i) {
      vectors[i / 2][i % 2] = zero;
      if (k < k_limit) {
        vectors[i / 2][i % 2] =
            load_once(w_rows[i / 2][i % 2] + static_cast<int64_t>(k) * Types::kWBytes);
      }
    }
  };
  auto load_a = [&](int k) {
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
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

  constexpr int kStride = kRegisterPipelineWarps * kStepElements;
  begin_after_previous_kernel();
  int k = warp * kStepElements;
#pragma unroll
  for (int d = 0; d < kNumStages; ++d) load_w(w_stages[d], k + d * kStride);
  load_a(k);

  float sums[kNTiles][kMTiles][4] = {};
  while (k < args.k) {
#pragma unroll
    for (int d = 0; d < kNumStages; ++d, k += kStride) {
      if (k >= args.k) break;
      Fragment<Types::kVectorMmas> a_fragments[kMTiles];
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) a_fragments[i] = widen_a<Types>(a_next[i]);
      load_a(k + kStride);
      Fragment<Types::kVectorMmas> w_fragments[kNTiles][2];
#pragma unroll
      for (int i = 0; i < kNTiles * 2; ++i) {
        w_fragments[i / 2][i % 2] = widen_w<Types>(w_stages[d][i / 2][i % 2]);
      }
      load_w(w_stages[d], k + kNumStages * kStride);
#pragma unroll
      for (int tile = 0; tile < kMTiles; ++tile) {
        float scale[2];
        if constexpr (kBlockScales) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int64_t m = first_m + tile * kMmaM + 2 * quad + i;
            scale[i] = m < args.m ? args.scale_a.block(m, k / kScaleBlock) *
                                        args.scale_w.block(first_n / kScaleBlock, k / kScaleBlock)
                                  : 0.0f;
          }
        }
#pragma unroll
        for (int r = 0; r < kNTiles; ++r) {
          if constexpr (kBlockScales) {
            float step_sum[4] = {};
            mma<Types>(step_sum, w_fragments[r][0], w_fragments[r][1], a_fragments[tile]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums[r][tile][i] = fmaf(step_sum[i], scale[i % 2], sums[r][tile][i]);
            }
          } else {
            mma<Types>(sums[r][tile], w_fragments[r][0], w_fragments[r][1], a_fragments[tile]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kMTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < kNTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        partial[warp][tile * kMmaM + 2 * quad + i % 2][r * kMmaN + i / 2 * 8 + group] =
            sums[r][tile][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBlockM * kBlockN; i += kRegisterPipelineWarps * 32) {
    const int m = i / kBlockN;
    const int n = i % kBlockN;
    if (first_m + m >= args.m || first_n + n >= args.n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kRegisterPipelineWarps; ++w) sum += partial[w][m][n];
    finish_output(args, first_m + m, first_n + n, sum);
  }
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
