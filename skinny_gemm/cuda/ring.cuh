// skinny_gemm for sm_90 and later: the copy engine streams both operands through a ring in shared
// memory, and each block owns its rows of w for the whole of K.
//
//   w [N, K]          one block an SM, rows = N / SMs              consumer warps
//   +------------+    +--------------------------------------+     +------------------------+
//   | block 0    |    | weight producer: boxes of            |     | each: 32 rows x        |
//   +------------+ -> |   rows x chunks x 128 B of w         | --> | one 64-byte slice of K |
//   | block 1    |    | token producer: boxes of             |     | of the stage, widened  |
//   |  ...       |    |   tokens x chunks x 128 B of a       |     | and multiplied         |
//   +------------+    +--------------- `stages` of them -----+     +-----------+------------+
//                     slices' partial sums -> shared memory -> added in order -> out
//
// Why so. An SM of an H200 cannot take in more than 35 GB/s, and its share of 4.4 TB/s is 33: every
// SM must stream all the time, and the same amount. So there are as many blocks as SMs, with rows
// to the nearest one, and the K of a row is divided inside a block only: no cluster (clusters of
// four leave 12 SMs idle, and cost a barrier), no workspace, no atomics, and one order of additions
// for all M up to 32. Boxes are 16 to 32 KB, because a producer issues one each 300 ns or so.
#pragma once

#include <cuda.h>

#include "config.h"
#include "fragments.cuh"

namespace rocm_kernels {
namespace cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Keeps a shared-memory address in a register; the compiler would ask for the block's place in its
// cluster again each time.
__device__ __forceinline__ uint32_t pinned_address(const void* pointer) {
  uint32_t address = shared_address(pointer);
  asm volatile("mov.b32 %0, %0;" : "+r"(address));
  return address;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Byte offset of a 16-byte vector in a swizzled box of `chunks` chunks a row.
__device__ __forceinline__ int swizzled(int row, int chunk, int chunks, int vector) {
  const int line = row * chunks + chunk;
  return line * kChunkBytes + ((vector ^ (line & 7)) * 16);
}

// Eight lanes, so two groups of a warp, read shared memory at once. Their two rows must differ in
// bit 2 of `line` above, or their 64-byte halves fall on the same banks. So the rows (or tokens)
// that the eight slots of an mma stand for are dealt in such an order. With 8 chunks a row no order
// helps.
__device__ __forceinline__ int slot_row(int slot, int chunks) {
  if (chunks == 1) return (slot & 1) * 4 + slot / 2;
  if (chunks == 2) return (slot & 1) * 2 + (slot & 2) / 2 + (slot & 4);
  return slot;
}

// Which token of its tile a slot stands for. Wide activations are read two vectors apart, and lie
// best in their own order.
template <class Types>
__device__ __forceinline__ int token_of_slot(int slot, int chunks) {
  return Types::kWideA ? slot : slot_row(slot, chunks);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Orders this thread's accesses to shared memory before those of the copy engine.
__device__ __forceinline__ void fence_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Boxes of a matrix of 128-byte chunks, at the place `at` of its second dimension and `above` of
// its third: [row][chunk] here, [chunk][row] in warpgroup.cuh.
__device__ __forceinline__ void load_box(const CUtensorMap& map, int at, int above, uint32_t to,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {0, %2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(at), "r"(above), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int at, int above) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {0, %1, %2}];" ::"l"(&map), "r"(at),
               "r"(above)
               : "memory");
}
#endif

// Grid: ceil(N / rows) blocks of ring_consumers(shape) + kProducers warps.
// w_map: boxes of [rows, chunks, 128 B]; a_map: boxes of [tokens, chunks, 128 B], of twice the
// chunks if kWideA.
template <class Types, int kTokenTiles, bool kBlockScales>
__global__ void __launch_bounds__((kMaxConsumers + kProducers) * 32, 1)
    skinny_gemm_ring_kernel(const __grid_constant__ CUtensorMap w_map,
                            const __grid_constant__ CUtensorMap a_map,
                            const __grid_constant__ GemmArgs args, RingShape shape) {
#if __CUDA_ARCH__ >= 900
  static_assert(!kBlockScales || Types::kFp8W, "a chunk must be one scale block of K");
  // The tensor cores truncate what float32 would round, so long sums drift: 3.4 times the error of
  // a float32 product for 16-bit operands. Then each stage is summed apart and added in float32.
  // FP8 products are too short for it to show.
  constexpr bool kSumStages = kBlockScales || !Types::kFp8A;
  constexpr int kWarpTokens = kTokenTiles * kTileTokens;

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int consumers = blockDim.x / 32 - kProducers;
  const int rows = shape.rows;
  const int w_chunks = shape.chunks;
  const int a_chunks = shape.chunks * Types::kAVectors;
  const int slices = w_chunks * kSlicesPerChunk;
  const int tokens = kWarpTokens * shape.token_groups;
  const int first_row = blockIdx.x * rows;
  const int row_chunks = static_cast<int>(args.k * Types::kWBytes / kChunkBytes);
  const int boxes = (row_chunks + w_chunks - 1) / w_chunks;

  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kMaxStages], empty_barriers[kMaxStages];
  __shared__ float a_outer[kSkinnyGemmMaxRows], w_outer[kMaxRingRows], bias[kMaxRingRows];
  const uint32_t full = pinned_address(full_barriers);
  const uint32_t empty = pinned_address(empty_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & (kRingAlignment - 1);
  const uint32_t ring = pinned_address(dynamic_shared + padding);
  const int w_bytes = ring_w_bytes(rows, w_chunks);
  const int stage_bytes = w_bytes + tokens * a_chunks * kChunkBytes;
  float* partial = reinterpret_cast<float*>(dynamic_shared + padding + shape.stages * stage_bytes);
  const int row_stride = partial_stride(tokens);

  release_successor();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < shape.stages; ++stage) {
      barrier_init(full + stage * 8, kProducers);
      barrier_init(empty + stage * 8, consumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp >= consumers) {
    if (lane == 0) {
      const bool is_w = warp == consumers;
      // Weights may be brought to L2 before the predecessor is done, though not read: L2 is where
      // its stores land.
      for (int i = 0; is_w && i < boxes && i < shape.prefetch; ++i) {
        prefetch_box(w_map, i * w_chunks, first_row);
      }
      await_predecessor();
      uint64_t policy;
      if (is_w) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      } else {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
      }
      const CUtensorMap& map = is_w ? w_map : a_map;
      const int chunks = is_w ? w_chunks : a_chunks;
      const int bytes = (is_w ? rows : tokens) * chunks * kChunkBytes;
      const int row = is_w ? first_row : 0;
      const uint32_t to = ring + (is_w ? 0 : w_bytes);
      for (int i = 0, stage = 0, parity = 1; i < boxes; ++i) {
        barrier_wait(empty + stage * 8, parity);
        barrier_expect(full + stage * 8, bytes);
        load_box(map, i * chunks, row, to + stage * stage_bytes, full + stage * 8, policy);
        if (++stage == shape.stages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    const int group = lane / 4;
    const int quad = lane % 4;
    const int slice = warp % slices;
    const int token_group = warp / slices % shape.token_groups;
    const int warp_token = token_group * kWarpTokens;
    const int warp_row = warp / slices / shape.token_groups * kWarpRows;

    const int w_slot = slot_row(group, w_chunks);
    const int w_offset = warp_row * w_chunks * kChunkBytes +
                         swizzled(w_slot, slice / 2, w_chunks, slice % 2 * 4 + quad);
    const int w_step = 8 * w_chunks * kChunkBytes;
    const int a_slot = token_of_slot<Types>(group, a_chunks);
    const int a_step = 8 * a_chunks * kChunkBytes;
    int a_offset[Types::kAVectors];
#pragma unroll
    for (int v = 0; v < Types::kAVectors; ++v) {
      a_offset[v] = w_bytes + warp_token * a_chunks * kChunkBytes +
                    (Types::kWideA ? swizzled(a_slot, slice, a_chunks, 2 * quad + v)
                                   : swizzled(a_slot, slice / 2, a_chunks, slice % 2 * 4 + quad));
    }
    await_predecessor();
    // What the end needs from memory is fetched while the ring fills.
    for (int row = threadIdx.x; row < rows; row += consumers * 32) {
      const int64_t n = first_row + row;
      const bool exists = n < args.n;
      w_outer[row] = exists ? outer_scale(args.scale_w, n) : 0.0f;
      bias[row] = exists && args.bias != nullptr ? load_float(args.bias, args.bias_dtype, n) : 0.0f;
    }
    for (int m = threadIdx.x; m < args.m; m += consumers * 32) {
      a_outer[m] = outer_scale(args.scale_a, m);
    }

    float sums[kRowTiles][kTokenTiles][4] = {};
    for (int i = 0, stage = 0, parity = 0; i < boxes; ++i) {
      float w_scale[kRowTiles * 2], a_scale[kTokenTiles][2];
      if constexpr (kBlockScales) {
        const int64_t block = i * w_chunks + slice / 2;
#pragma unroll
        for (int half = 0; half < kRowTiles * 2; ++half) {
          const int64_t row = first_row + warp_row + half * 8 + w_slot;
          w_scale[half] = block < row_chunks && row < args.n
                              ? block_scale(args.scale_w, row / kScaleBlock, block)
                              : 0.0f;
        }
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int64_t token =
                warp_token + tile * kTileTokens + token_of_slot<Types>(2 * quad + j, a_chunks);
            a_scale[tile][j] = token < args.m && block < row_chunks
                                   ? block_scale(args.scale_a, token, block)
                                   : 0.0f;
          }
        }
      }

      const uint32_t data = ring + stage * stage_bytes;
      barrier_wait(full + stage * 8, parity);
      uint4 w_vectors[kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        w_vectors[tile][0] = load_shared(data + w_offset + tile * 2 * w_step);
        w_vectors[tile][1] = load_shared(data + w_offset + (tile * 2 + 1) * w_step);
      }
      Fragment<Types::kVectorMmas> w_fragments[kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        w_fragments[tile][0] = widen_w<Types>(w_vectors[tile][0]);
        w_fragments[tile][1] = widen_w<Types>(w_vectors[tile][1]);
      }
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        uint4 a_vectors[Types::kAVectors];
#pragma unroll
        for (int v = 0; v < Types::kAVectors; ++v) {
          a_vectors[v] = load_shared(data + a_offset[v] + tile * a_step);
        }
        const auto a_fragment = widen_a<Types>(a_vectors);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if constexpr (kSumStages) {
            float stage_sum[4] = {};
            multiply<Types>(stage_sum, w_fragments[r][0], w_fragments[r][1], a_fragment);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float scale =
                  kBlockScales ? a_scale[tile][j % 2] * w_scale[r * 2 + j / 2] : 1.0f;
              sums[r][tile][j] = fmaf(stage_sum[j], scale, sums[r][tile][j]);
            }
          } else {
            multiply<Types>(sums[r][tile], w_fragments[r][0], w_fragments[r][1], a_fragment);
          }
        }
      }
      // The copy engine is another proxy: without a fence its next box can overtake loads that wait
      // in the queue (seen: a third of the outputs wrong with 16-bit operands and 8 chunks).
      fence_copy_engine();
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage * 8);
      if (++stage == shape.stages) stage = 0, parity ^= 1;
    }

    float* sink = partial + (slice * rows + warp_row + w_slot) * row_stride + warp_token + 2 * quad;
#pragma unroll
    for (int half = 0; half < kRowTiles * 2; ++half) {
      if (warp_row + half * 8 + w_slot < rows) {
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          *reinterpret_cast<float2*>(sink + half * 8 * row_stride + tile * kTileTokens) =
              make_float2(sums[half / 2][tile][half % 2 * 2],
                          sums[half / 2][tile][half % 2 * 2 + 1]);
        }
      }
    }
  }
  __syncthreads();

  // A warp finishes 32 rows of a few token slots: for each token, consecutive outputs.
  constexpr int kSlots = kTokenTiles;
  struct alignas(kSlots * sizeof(float)) SlotVector {
    float value[kSlots];
  };
  const int slot_sets = tokens / kSlots;
  for (int i = warp; i < (rows + 31) / 32 * slot_sets; i += blockDim.x / 32) {
    const int row = i / slot_sets * 32 + lane;
    const int slot = i % slot_sets * kSlots;
    if (row >= rows || first_row + row >= args.n) continue;
    float sum[kSlots] = {};
#pragma unroll 4
    for (int s = 0; s < slices; ++s) {
      const SlotVector part =
          *reinterpret_cast<const SlotVector*>(partial + (s * rows + row) * row_stride + slot);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) sum[j] += part.value[j];
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const int token = slot / 8 * 8 + token_of_slot<Types>(slot % 8 + j, a_chunks);
      if (token < args.m) {
        store_output(args, token, first_row + row,
                     sum[j] * a_outer[token] * w_outer[row] + bias[row]);
      }
    }
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
