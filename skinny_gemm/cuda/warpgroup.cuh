// skinny_gemm for sm_90a and 17 to 64 tokens: FP8 x FP8 on the warpgroup instructions.
//
//   w [N, K]          a cluster of C blocks, rows = N / clusters
//   +------------+    +---------- block 0: K / C -----------+
//   | cluster 0  |    | weight producer -> ring -> warp-    |    sums of all who deal K -> shared
//   +------------+ -> | token producer  ->  of  -> groups:  | -> memory of the block that adds them
//   | cluster 1  |    |                  stages  64 rows    |    in order -> out
//   |  ...       |    | each; where rows are few, K dealt   |
//   +------------+    +---------- block 1: K / C -----------+ ...
//
// Why so. Both operands go to the tensor cores as they lie in shared memory: weights are the 64-row
// operand, tokens the columns, and nothing is widened or passes through registers. Each block reads
// all tokens of its K beside its rows of w; where rows are few (2304 x 16384: 18 an SM, beside 64
// tokens) these bytes are the bound, so that a cluster splits K and has C times the rows. Sums are
// added in a fixed order: no workspace, no atomics, the same bits every run.
//
// The FP8 tensor core adds in about 14 bits. So no instruction adds to a long sum: two give the sum
// of 64 products, and float32 does the rest. Next to one rounding to 16 bits that is not seen; an
// output in float32 goes to the ring kernel (docs/h200.md has the errors).
#pragma once

#include "ring.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Stores to the same place of another block's shared memory.
__device__ __forceinline__ void store_in_cluster(uint32_t address, int rank, float4 value) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// The sum of `count` vectors, `stride` bytes apart, in this order.
__device__ __forceinline__ float4 sum_shared(uint32_t address, int count, int stride) {
  float4 sum = {};
  for (int i = 0; i < count; ++i) {
    const uint4 bits = load_shared(address + i * stride);
    sum.x += __uint_as_float(bits.x), sum.y += __uint_as_float(bits.y);
    sum.z += __uint_as_float(bits.z), sum.w += __uint_as_float(bits.w);
  }
  return sum;
}

// An operand in shared memory: lines of 128 bytes of K, 128-byte swizzle, 8 lines to a pattern.
// What lies further along K within the line has a higher address.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  constexpr uint64_t kPatternStride = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return ((address & 0x3FFFF) >> 4) | (uint64_t{1} << 16) | kPatternStride | kSwizzle128;
}
ROCM_KERNELS_HOST_DEVICE constexpr uint64_t operand_offset(int bytes) { return bytes >> 4; }

// 64 rows of w times 32, 48 or 64 tokens over 32 elements of K, asynchronously; what sum holds is
// dropped or added to.
#define ROCM_KERNELS_SUMS(i)                                                               \
  "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3]), "+f"(sum[i + 1][0]), \
      "+f"(sum[i + 1][1]), "+f"(sum[i + 1][2]), "+f"(sum[i + 1][3])
template <bool kAdd>
__device__ __forceinline__ void multiply_group(float (&sum)[4][4], uint64_t w, uint64_t a) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, add, 1, 1;\n"
      "}"
      : ROCM_KERNELS_SUMS(0), ROCM_KERNELS_SUMS(2)
      : "l"(w), "l"(a), "n"(kAdd));
}
template <bool kAdd>
__device__ __forceinline__ void multiply_group(float (&sum)[6][4], uint64_t w, uint64_t a) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %26, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23}, "
      "%24, %25, add, 1, 1;\n"
      "}"
      : ROCM_KERNELS_SUMS(0), ROCM_KERNELS_SUMS(2), ROCM_KERNELS_SUMS(4)
      : "l"(w), "l"(a), "n"(kAdd));
}
template <bool kAdd>
__device__ __forceinline__ void multiply_group(float (&sum)[8][4], uint64_t w, uint64_t a) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, add, 1, 1;\n"
      "}"
      : ROCM_KERNELS_SUMS(0), ROCM_KERNELS_SUMS(2), ROCM_KERNELS_SUMS(4), ROCM_KERNELS_SUMS(6)
      : "l"(w), "l"(a), "n"(kAdd));
}
#undef ROCM_KERNELS_SUMS

// Before registers that an instruction will write are handed to it, and after the last of a group.
__device__ __forceinline__ void begin_group() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups are under way; `sum` is of one that is not.
template <int kPending, int kTiles>
__device__ __forceinline__ void await_group(float (&sum)[kTiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sum[i][j])::"memory");
  }
}
#endif

// Grid: ceil(N / rows) clusters of shape.cluster blocks of kGroups warpgroups and the producers.
// w_map: boxes of [chunks, box_rows, 128 B]; a_map: boxes of [chunks, tokens, 128 B].
template <int kTokens, int kGroups>
__global__ void __launch_bounds__((kGroups * 4 + kProducers) * 32, 1)
    skinny_gemm_warpgroup_kernel(const __grid_constant__ CUtensorMap w_map,
                                 const __grid_constant__ CUtensorMap a_map,
                                 const __grid_constant__ GemmArgs args, WarpgroupShape shape) {
#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "skinny_gemm: build for compute capability 9.0a; plain 9.0 has no warpgroup instructions"
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(kTokens == 32 || kTokens == 48 || kTokens == 64,
                "multiply_group is written for 32, 48 and 64 tokens");
  constexpr int kTokenTiles = kTokens / kTileTokens;
  constexpr int kConsumers = kGroups * 4;
  constexpr int kSteps = kChunkBytes / 32;
  constexpr int kChain = 2;  // instructions that add up in the tensor core
  // Results on their way at once: as many as the registers hold.
  constexpr int kParts = kTokens > 32 && kGroups == 4 ? 1 : 2;

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int rows = shape.rows;
  const int chunks = shape.chunks;
  const int cluster = shape.cluster;
  const int k_groups = kGroups / shape.row_groups;
  const int box_step = k_groups > chunks ? k_groups / chunks : 1;  // boxes that are dealt out
  const int tokens = warpgroup_tokens(args.m);
  const int token_tiles = tokens / kTileTokens;
  const int rank = cluster_rank();
  const int first_row = static_cast<int>(blockIdx.x) / cluster * rows;
  const int row_chunks = static_cast<int>(args.k / kChunkBytes);
  const int all_boxes = (row_chunks + chunks - 1) / chunks;
  const int first_box = all_boxes * rank / cluster;
  const int boxes = all_boxes * (rank + 1) / cluster - first_box;

  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kMaxStages], empty_barriers[kMaxStages];
  __shared__ float a_outer[kSkinnyGemmMaxRows], w_outer[kMaxGroupRows], bias[kMaxGroupRows];
  const uint32_t full = pinned_address(full_barriers);
  const uint32_t empty = pinned_address(empty_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & (kRingAlignment - 1);
  const uint32_t ring = pinned_address(dynamic_shared + padding);
  const int box_rows = warpgroup_box_rows(shape);
  const int a_bytes = tokens * chunks * kChunkBytes;
  const int stage_bytes = a_bytes + ring_w_bytes(box_rows, chunks);

  release_successor();
  if (cluster > 1) cluster_arrive();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < shape.stages; ++stage) {
      barrier_init(full + stage * 8, kProducers);
      barrier_init(empty + stage * 8, kConsumers / box_step);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  // Rounds and stores the sums of 16 rows of w and 8 tokens. A lane holds one row (and that 8
  // further) of two tokens; lanes four apart trade for two rows of one token.
  const auto finish_tile = [&](float4 sum, int slice, int tile) {
    const bool odd = lane / 4 % 2;
    const int m = tile * kTileTokens + lane % 4 * 2 + odd;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float even_token = half == 0 ? sum.x : sum.z, odd_token = half == 0 ? sum.y : sum.w;
      const float mine = odd ? odd_token : even_token;
      const float other = __shfl_xor_sync(~0u, odd ? even_token : odd_token, 4);
      const int row = slice * kSliceRows + half * 8 + lane / 8 * 2;
      const int64_t n = first_row + row;
      if (m < args.m && row < rows && n < args.n) {
        const float low = odd ? other : mine, high = odd ? mine : other;
        store_pair(args, m, n, low * a_outer[m] * w_outer[row] + bias[row],
                   high * a_outer[m] * w_outer[row + 1] + bias[row + 1], n + 1 < args.n);
      }
    }
  };
  const int slices = (rows + kSliceRows - 1) / kSliceRows;
  const int share = warpgroup_share(shape);  // slices that a block of the cluster finishes
  const uint32_t received = ring + warpgroup_ring_bytes(shape, args.m);  // their sums

  if (warp >= kConsumers) {
    if (lane == 0) {
      const bool is_w = warp == kConsumers;
      const CUtensorMap& map = is_w ? w_map : a_map;
      asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
      // Weights may be brought to L2 before the predecessor is done, though not read: L2 is where
      // its stores land.
      for (int i = 0; is_w && i < boxes && i < shape.prefetch; ++i) {
        prefetch_box(w_map, first_row, (first_box + i) * chunks);
      }
      await_predecessor();
      uint64_t policy;
      if (is_w) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      } else {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
      }
      const int bytes = is_w ? box_rows * chunks * kChunkBytes : a_bytes;
      const int row = is_w ? first_row : 0;
      const uint32_t to = ring + (is_w ? a_bytes : 0);
      for (int i = 0, stage = 0, parity = 1; i < boxes; ++i) {
        barrier_wait(empty + stage * 8, parity);
        barrier_expect(full + stage * 8, bytes);
        load_box(map, row, (first_box + i) * chunks, to + stage * stage_bytes, full + stage * 8,
                 policy);
        if (++stage == shape.stages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (cluster > 1) cluster_wait();
  } else {
    const int row_group = warp / 4 % shape.row_groups;
    const int k_group = warp / 4 / shape.row_groups;
    await_predecessor();
    // What the end needs from memory is fetched while the ring fills.
    for (int row = threadIdx.x; row < rows; row += kConsumers * 32) {
      const int64_t n = first_row + row;
      const bool exists = n < args.n;
      w_outer[row] = exists ? outer_scale(args.scale_w, n) : 0.0f;
      bias[row] = exists && args.bias != nullptr ? load_float(args.bias, args.bias_dtype, n) : 0.0f;
    }
    if (threadIdx.x < args.m) a_outer[threadIdx.x] = outer_scale(args.scale_a, threadIdx.x);

    float sums[kTokenTiles][4] = {};
    float parts[kParts][kTokenTiles][4] = {};
    const auto add = [&](const float (&part)[kTokenTiles][4]) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[tile][j] += part[tile][j];
      }
    };
    // A stage is always this warpgroup's or never: stages are a multiple of box_step.
    int stage = k_group / chunks % box_step, parity = 0;
    for (int i = stage; i < boxes; i += box_step) {
      const uint32_t data = ring + stage * stage_bytes;
      barrier_wait(full + stage * 8, parity);
      for (int chunk = k_group % chunks; chunk < chunks; chunk += k_groups) {
        const uint64_t a = operand(data + chunk * tokens * kChunkBytes);
        const uint64_t w =
            operand(data + a_bytes + (chunk * box_rows + row_group * kGroupRows) * kChunkBytes);
#pragma unroll
        for (int group = 0; group < kSteps / kChain; ++group) {
          if (group >= kParts) await_group<0>(parts[0]), add(parts[0]);
          float (&part)[kTokenTiles][4] = parts[group % kParts];
          const uint64_t offset = operand_offset(group * kChain * 32);
          begin_group();
          multiply_group<false>(part, w + offset, a + offset);
          multiply_group<true>(part, w + offset + operand_offset(32),
                               a + offset + operand_offset(32));
          end_group();
        }
        if constexpr (kParts == 2) await_group<1>(parts[0]), add(parts[0]);
        await_group<0>(parts[kParts - 1]), add(parts[kParts - 1]);
      }
      if (lane == 0) barrier_arrive(empty + stage * 8);
      stage += box_step;
      if (stage >= shape.stages) stage -= shape.stages, parity ^= 1;
    }

    const auto consumers_barrier = [] {
      asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * 32) : "memory");
    };
    const int slice = row_group * 4 + warp % 4;
    const auto for_each_tile = [&](auto body) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        if (slice < slices && tile < token_tiles) {
          body(tile, float4{sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]});
        }
      }
    };
    if (cluster > 1) {
      // [rank][k_group][slice of the share][tile][lane] of the block whose share it is.
      cluster_wait();  // every block of the cluster has begun, and so owns its shared memory
      const int to = slice / share;
      const int from = rank * k_groups + k_group;
      const int place = (from * share + slice - to * share) * token_tiles;
      for_each_tile([&](int tile, float4 sum) {
        store_in_cluster(received + ((place + tile) * 32 + lane) * 16, to, sum);
      });
    } else if (k_groups > 1) {
      // [k_group][slice][tile][lane], where the stages were.
      consumers_barrier();
      for_each_tile([&](int tile, float4 sum) {
        const int place = (k_group * slices + slice) * token_tiles + tile;
        store_shared(ring + (place * 32 + lane) * 16, sum);
      });
      consumers_barrier();
      for (int i = warp; i < slices * token_tiles; i += kConsumers) {
        finish_tile(sum_shared(ring + (i * 32 + lane) * 16, k_groups, slices * token_tiles * 512),
                    i / token_tiles, i % token_tiles);
      }
    } else {
      consumers_barrier();  // the scales are in place
      for_each_tile([&](int tile, float4 sum) { finish_tile(sum, slice, tile); });
    }
  }
  if (cluster == 1) return;
  cluster_arrive();
  cluster_wait();
  const int own = min(share, slices - rank * share);
  for (int i = warp; i < own * token_tiles; i += kConsumers + kProducers) {
    finish_tile(
        sum_shared(received + (i * 32 + lane) * 16, cluster * k_groups, share * token_tiles * 512),
        rank * share + i / token_tiles, i % token_tiles);
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
