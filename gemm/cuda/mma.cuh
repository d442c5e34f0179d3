// gemm on any GPU with tensor cores (sm_80 and later): mma.sync, FP8 widened to float16 exactly. On
// sm_90a it serves what wgmma does not: FP8 operands with a float32 output, 16-bit a with FP8 w,
// and rows that are not aligned to 16 bytes.
//
//   a block: 128 rows of w x 128 rows of a x all of K, 8 warps of 32 x 64
//   K goes by in steps of 64 bytes of w, kStages of them under way to shared memory
//
// Timeline of a block, whose threads all do the same. | is a barrier of all.
//
//   the kernel before; fetch kStages - 1 steps of K
//   each step: its copies have arrived | fetch another, to the stage that was read last;
//              multiply: read, widen, mma; behind each 64 elements of K add, by their scales
//   end: scales, bias, stores of elements
//
// A lane reads 16 consecutive bytes of a row as its share of several mma (common/cuda/mma.cuh). The
// tensor core truncates where float32 rounds, so the sums of each 64 elements of K are added apart
// (of 128, and of 32, they come out 3 times as far off as float32 sums); there block scales are
// applied.
#pragma once

#include "../../blocks/product/cuda/output.cuh"
#include "../../blocks/product/cuda/shape.h"
#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mma.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/gpu/dependent_launch.h"

namespace rocm_kernels {
namespace cuda {

// The steps of a block, and what they share.
template <class Types, bool kAligned>
struct MmaBlock {
  static constexpr int kStepElements = kMmaStepBytes / Types::kWBytes;
  static constexpr int kARowBytes = kStepElements * Types::kABytes;
  static constexpr int kWBytes = kMmaBlockN * kMmaStepBytes;
  static constexpr int kStageBytes = kWBytes + kMmaBlockM * kARowBytes;
  static constexpr int kStages = kMmaStages;
  static constexpr int kStepsPerBlock = kScaleBlock / kStepElements;
  static constexpr int kStepsPerSum = 64 / kStepElements;
  static constexpr int kWarpsN = 4;  // times 2 along m
  static constexpr int kRowTiles = kMmaBlockN / kWarpsN / kMmaN;
  static constexpr int kColumnTiles = kMmaBlockM / 2 / kMmaM;
  using Sums = float[kRowTiles][kColumnTiles][4];  // of a lane: mma()

  const GemmArgs& args;
  uint32_t shared;           // the stages
  int64_t first_m, first_n;  // of the block
  int warp_m, warp_n;        // of the warp, in the block
  int group, quad;           // of the lane
  int64_t steps;

  // ---- Fetch: a step of both operands to its stage ----------------------------------------------

  // One 16-byte vector of a row; zeros beyond the matrix.
  template <int kBytes>
  __device__ __forceinline__ void fetch_vector(const void* data, int64_t row, int64_t rows,
                                               int64_t stride, int64_t k, uint32_t to) const {
    const auto* from = static_cast<const uint8_t*>(data) + (row * stride + k) * kBytes;
    const int64_t left = row < rows ? (args.k - k) * kBytes : 0;
    const int count = left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
    if constexpr (kAligned) {
      copy_vector(to, count > 0 ? from : data, count);
    } else {
      alignas(16) uint8_t bytes[16];
#pragma unroll
      for (int i = 0; i < 16; i += kBytes) {
        if constexpr (kBytes == 1) {
          bytes[i] = i < count ? from[i] : 0;
        } else {
          *reinterpret_cast<uint16_t*>(bytes + i) =
              i < count ? *reinterpret_cast<const uint16_t*>(from + i) : 0;
        }
      }
      store_shared(to, *reinterpret_cast<const float4*>(bytes));
    }
  }

  // Where a step's operands lie: w, then a.
  __device__ __forceinline__ uint32_t stage_of(int64_t step) const {
    return shared + static_cast<uint32_t>(step % kStages) * kStageBytes;
  }

  __device__ __forceinline__ void fetch(int64_t step) const {
    const uint32_t to = stage_of(step);
    const int64_t k = step * kStepElements;
    if (step < steps) {
      for (int i = threadIdx.x; i < kWBytes / 16; i += kMmaThreads) {
        const int row = i / (kMmaStepBytes / 16), vector = i % (kMmaStepBytes / 16);
        fetch_vector<Types::kWBytes>(args.w, first_n + row, args.n, args.w_stride,
                                     k + vector * 16 / Types::kWBytes, to + i * 16);
      }
      for (int i = threadIdx.x; i < kMmaBlockM * kARowBytes / 16; i += kMmaThreads) {
        const int row = i / (kARowBytes / 16), vector = i % (kARowBytes / 16);
        fetch_vector<Types::kABytes>(args.a, first_m + row, args.m, args.a_stride,
                                     k + vector * 16 / Types::kABytes, to + kWBytes + i * 16);
      }
    }
    copies_commit();  // empty groups keep the count
  }

  // ---- Multiply: part += the step's products ----------------------------------------------------

  __device__ __forceinline__ void multiply(int64_t step, Sums& part) const {
    const uint32_t data = stage_of(step);
    Fragment<Types::kVectorMmas> w[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_n + i * kMmaN + half * 8 + group;
        w[i][half] = widen_w<Types>(load_shared(data + row * kMmaStepBytes + quad * 16));
      }
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      uint4 vectors[Types::kAVectors];
#pragma unroll
      for (int v = 0; v < Types::kAVectors; ++v) {
        vectors[v] = load_shared(data + kWBytes + (warp_m + j * kMmaM + group) * kARowBytes +
                                 (quad * Types::kAVectors + v) * 16);
      }
      const auto a = widen_a<Types>(vectors);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) mma<Types>(part[i][j], w[i][0], w[i][1], a);
    }
  }

  // ---- Add: sums += part, by the scales of its block of K; part = 0 -----------------------------

  __device__ __forceinline__ void add(int64_t k_block, Sums& part, Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float w_scale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t n = first_n + warp_n + i * kMmaN + half * 8 + group;
        w_scale[half] = n < args.n ? args.scale_w.block(n / kScaleBlock, k_block) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64_t m = first_m + warp_m + j * kMmaM + quad * 2 + e;
          const float scale = m < args.m ? args.scale_a.block(m, k_block) : 0.0f;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& from = part[i][j][half * 2 + e];
            float& sum = sums[i][j][half * 2 + e];
            sum = fmaf(from, scale * w_scale[half], sum);
            from = 0.0f;
          }
        }
      }
    }
  }

  // ---- End: outputs that exist ------------------------------------------------------------------

  __device__ __forceinline__ void end(const Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t n = first_n + warp_n + i * kMmaN + e / 2 * 8 + group;
          const int64_t m = first_m + warp_m + j * kMmaM + quad * 2 + e % 2;
          if (m < args.m && n < args.n) finish_output(args, m, n, sums[i][j][e]);
        }
      }
    }
  }
};

// Grid: ceil(M / 128) * ceil(N / 128) blocks of kMmaThreads; shared memory mma_shared_bytes().
// kAligned: rows of both operands start at multiples of 16 bytes.
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kMmaThreads, 1)
    gemm_mma_kernel(const __grid_constant__ GemmArgs args) {
  using Block = MmaBlock<Types, kAligned>;
  constexpr int kStages = Block::kStages, kWarpsN = Block::kWarpsN;

  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t tiles_m = ceil_div(args.m, kMmaBlockM);
  const int64_t first_m = static_cast<int64_t>(blockIdx.x) % tiles_m * kMmaBlockM;
  const int64_t first_n = static_cast<int64_t>(blockIdx.x) / tiles_m * kMmaBlockN;
  const int warp_n = warp % kWarpsN * (kMmaBlockN / kWarpsN);
  const int warp_m = warp / kWarpsN * (kMmaBlockM / 2);
  const int64_t steps = ceil_div(args.k, Block::kStepElements);
  begin_after_previous_kernel();

  const Block block{
      args, shared_address(shared), first_m, first_n, warp_m, warp_n, lane / 4, lane % 4, steps};
  for (int step = 0; step < kStages - 1; ++step) block.fetch(step);

  typename Block::Sums sums = {}, part = {};
  for (int64_t step = 0; step < steps; ++step) {
    copies_wait<kStages - 2>();
    __syncthreads();  // this step is there, and the stage of the last one has been read
    block.fetch(step + kStages - 1);
    block.multiply(step, part);
    if ((step + 1) % Block::kStepsPerSum == 0 || step + 1 == steps) {
      block.add(step / Block::kStepsPerBlock, part, sums);
    }
  }
  copies_wait_all();
  block.end(sums);
}

}  // namespace cuda
}  // namespace rocm_kernels
