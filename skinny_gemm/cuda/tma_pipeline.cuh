// skinny_gemm for sm_90 and later: TMA streams both operands through stages in
// shared memory into mma.sync, and each block owns block_n rows of w for the whole of K.
//
// clang-format off
//   w [N, K]          one block an SM, block_n = N / SMs, or more  consumer warps
//   +------------+    +--------------------------------------+     +------------------------+
//   | block 0    |    | producer of w: boxes of              |     | each: 32 rows of w x   |
//   +------------+ -> |   block_n x k_chunks x 128 B         | --> | one 64-byte slice of K |
//   | block 1    |    | producer of a: boxes of              |     | of the stage, widened  |
//   |  ...       |    |   block_m x k_chunks x 128 B         |     | and multiplied         |
//   +------------+    +------------- num_stages of them -----+     +-----------+------------+
//                     slices' partial sums -> shared memory -> added in order -> out
// Timeline of a block. Barriers: full and empty of each stage.
//
//   who                waits for             does                                  then tells
//   fetch: a lane      the kernel before,    (the first boxes of w go to L2 before that)
//   for w, one for a   but not for settled w
//                      empty[stage]          orders a box                          full[stage]: its bytes
//   fetch: w's warp    its last box          asks L2 for the next product's weight
//   multiply: the      the kernel before,    fetches the factors of the end
//   other warps        but as above
//                      full[stage]           a slice: reads, widens, multiplies    empty[stage]
//                                            behind the last: sums to shared memory
//   end: all warps     all                   adds slices in order; scales, bias, stores
// clang-format on
//
// Why so. An SM of an H200 cannot take in more than 35 GB/s, and its share of 4.4 TB/s is 33: every
// SM must stream all the time, and the same amount. So there are as many blocks as SMs, or a small
// multiple of that where N is large, with N divided to the nearest row. K is divided inside a block
// only: no cluster (clusters of four leave 12 SMs idle, and cost a barrier), no workspace, no
// atomics, and one order of additions for all M up to 32. Boxes are 16 to 32 KB, because a producer
// issues one each 300 ns or so.
#pragma once

#include "../../common/cuda/mma.cuh"
#include "epilogue.cuh"
#include "quantized_rows.cuh"
#include "tma_producer.cuh"

namespace rocm_kernels {
namespace cuda::skinny {

// Eight lanes, so two groups of a warp, read shared memory at once. Their two lines (swizzle.h)
// must differ in bit 2, or their 64-byte halves fall on the same banks. So the eight slots of an
// mma stand for rows in such an order. With 8 chunks a row no order helps.
__device__ __forceinline__ int slot_row(int slot, int chunks) {
  if (chunks == 1) return (slot & 1) * 4 + slot / 2;
  if (chunks == 2) return (slot & 1) * 2 + (slot & 2) / 2 + (slot & 4);
  return slot;
}

// Which row of a, of its tile, a slot stands for. 16-bit a beside FP8 w is read two vectors apart,
// and lies best in its own order.
template <class Types>
__device__ __forceinline__ int a_row_of_slot(int slot, int chunks) {
  return Types::kWideA ? slot : slot_row(slot, chunks);
}

#if __CUDA_ARCH__ >= 900

// The roles of a block's warps, and what they share.
template <class Types, int kWarpM, bool kBlockScales, class Outputs, class Rows>
struct TmaBlock {
  static_assert(!kBlockScales || Types::kFp8W, "a chunk must be one scale block of K");
  // The tensor cores truncate what float32 would round, so long sums drift: 3.4 times the error of
  // a float32 product for 16-bit operands. Then each stage is summed apart and added in float32.
  // FP8 products are too short for it to show.
  static constexpr bool kSumStages = kBlockScales || !Types::kFp8A;
  static constexpr int kMTiles = kWarpM / kMmaM;
  static constexpr int kNTiles = kWarpN / kMmaN;

  const GemmArgs& args;
  const SkinnyGemmConfig& config;
  const Pipeline& pipeline;
  SharedFactors<kMaxTmaBlockN>& factors;
  const Outputs& outputs;
  float* partial;  // [slice][block_n][row_stride]: sums of slices, the rows of a in order of slots
  const Rows& rows;
  int warp, lane;
  int helpers;  // warps in front of the producers: those that multiply, or quantise rows of a
  int block_n, block_m, first_n;
  int w_chunks, a_chunks, slices;  // of K, in a box
  int row_chunks, boxes;           // in all of K
  int w_bytes;                     // of a stage's box of w
  int row_stride;

  // ---- Who fetches an operand: a lane for w, a lane for a ---------------------------------------

  __device__ __forceinline__ void fetch(const CUtensorMap& w_map, const CUtensorMap& a_map) const {
    const bool is_w = warp == helpers;
    if (!is_w && !Rows::kFetched) return;
    const int chunks = is_w ? w_chunks : a_chunks;
    using Operand = Boxes<BoxOrder::kRowsOfChunks>;
    if (!is_w || !args.w_is_settled) {
      Operand{first_n, 0, w_chunks, boxes}.prefetch(w_map, is_w, config.prefetch);
      wait_for_previous_kernel();
    }
    const int up_row = Outputs::kGates ? first_up_row(block_n) : 0;
    const int w_rows = Outputs::kGates ? 2 * (block_n - up_row) : block_n;
    Operand{is_w ? first_n : 0, 0, chunks, boxes}.produce(
        is_w ? w_map : a_map, pipeline, is_w ? 0 : w_bytes,
        (is_w ? w_rows : block_m) * chunks * kChunkBytes, policy_of(is_w),
        Outputs::kGates && is_w ? static_cast<int>(args.n / 2) : 0, up_row * chunks * kChunkBytes);
    if (!is_w) outputs.begin_next();
  }

  // The row of w that the block's row `row` is.
  __device__ __forceinline__ int64_t row_of_w(int row) const {
    const int up_row = first_up_row(block_n);
    if (!Outputs::kGates || row < up_row) return first_n + row;
    return args.n / 2 + first_n + row - up_row;
  }

  // By the first `threads` threads.
  __device__ __forceinline__ void fetch_factors(int threads) const {
    factors.fetch(
        args, [this](int row) { return row_of_w(row); }, block_n, threads, Rows::kFetched);
  }

  // ---- Who multiplies: the other warps, each 32 rows of w by a slice of K -----------------------

  __device__ __forceinline__ void multiply() const {
    const int group = lane / 4;
    const int quad = lane % 4;
    const int slice = warp % slices;
    const int m_group = warp / slices % config.m_groups;
    const int warp_m = m_group * kWarpM;
    const int warp_n = warp / slices / config.m_groups * kWarpN;

    const int w_slot = slot_row(group, w_chunks);
    const int w_offset = warp_n * w_chunks * kChunkBytes +
                         swizzled(w_slot, slice / 2, w_chunks, slice % 2 * 4 + quad);
    const int w_step = 8 * w_chunks * kChunkBytes;
    const int a_slot = a_row_of_slot<Types>(group, a_chunks);
    const int a_step = 8 * a_chunks * kChunkBytes;
    int a_offset[Types::kAVectors];
#pragma unroll
    for (int v = 0; v < Types::kAVectors; ++v) {
      a_offset[v] = w_bytes + warp_m * a_chunks * kChunkBytes +
                    (Types::kWideA ? swizzled(a_slot, slice, a_chunks, 2 * quad + v)
                                   : swizzled(a_slot, slice / 2, a_chunks, slice % 2 * 4 + quad));
      if constexpr (!Rows::kFetched) {
        a_offset[v] = rows.place_of(a_slot, slice * kSliceBytes + quad * 16);
      }
    }
    // What the end needs from memory is fetched while the pipeline fills.
    if constexpr (Rows::kFetched) fetch_factors(helpers * 32);

    float sums[kNTiles][kMTiles][4] = {};
    PipelineState state{0, 0};
    for (int i = 0; i < boxes; ++i) {
      float w_scale[kNTiles * 2], a_scale[kMTiles][2];
      if constexpr (kBlockScales) {
        const int64_t block = i * w_chunks + slice / 2;
#pragma unroll
        for (int half = 0; half < kNTiles * 2; ++half) {
          const int64_t row = first_n + warp_n + half * 8 + w_slot;
          w_scale[half] = block < row_chunks && row < args.n
                              ? args.scale_w.block(row / kScaleBlock, block)
                              : 0.0f;
        }
#pragma unroll
        for (int tile = 0; tile < kMTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int64_t m = warp_m + tile * kMmaM + a_row_of_slot<Types>(2 * quad + j, a_chunks);
            a_scale[tile][j] =
                m < args.m && block < row_chunks ? args.scale_a.block(m, block) : 0.0f;
          }
        }
      }

      const uint32_t data = pipeline.data_of(state.stage);
      const uint32_t a_data = Rows::kFetched ? data : i * w_chunks * kChunkBytes;
      mbarrier_wait(pipeline.full_of(state.stage), state.parity);
      uint4 w_vectors[kNTiles][2];
#pragma unroll
      for (int tile = 0; tile < kNTiles; ++tile) {
        w_vectors[tile][0] = load_shared(data + w_offset + tile * 2 * w_step);
        w_vectors[tile][1] = load_shared(data + w_offset + (tile * 2 + 1) * w_step);
      }
      Fragment<Types::kVectorMmas> w_fragments[kNTiles][2];
#pragma unroll
      for (int tile = 0; tile < kNTiles; ++tile) {
        w_fragments[tile][0] = widen_w<Types>(w_vectors[tile][0]);
        w_fragments[tile][1] = widen_w<Types>(w_vectors[tile][1]);
      }
#pragma unroll
      for (int tile = 0; tile < kMTiles; ++tile) {
        uint4 a_vectors[Types::kAVectors];
#pragma unroll
        for (int v = 0; v < Types::kAVectors; ++v) {
          a_vectors[v] = load_shared(a_data + a_offset[v] + tile * a_step);
        }
        const auto a_fragment = widen_a<Types>(a_vectors);
#pragma unroll
        for (int r = 0; r < kNTiles; ++r) {
          if constexpr (kSumStages) {
            float stage_sum[4] = {};
            mma<Types>(stage_sum, w_fragments[r][0], w_fragments[r][1], a_fragment);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float scale =
                  kBlockScales ? a_scale[tile][j % 2] * w_scale[r * 2 + j / 2] : 1.0f;
              sums[r][tile][j] = fmaf(stage_sum[j], scale, sums[r][tile][j]);
            }
          } else {
            mma<Types>(sums[r][tile], w_fragments[r][0], w_fragments[r][1], a_fragment);
          }
        }
      }
      // TMA is another proxy: without a fence its next box can overtake loads that wait
      // in the queue (seen: a third of the outputs wrong with 16-bit operands and 8 chunks).
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(pipeline.empty_of(state.stage));
      state.advance(config.num_stages);
    }

    float* sink = partial + (slice * block_n + warp_n + w_slot) * row_stride + warp_m + 2 * quad;
#pragma unroll
    for (int half = 0; half < kNTiles * 2; ++half) {
      if (warp_n + half * 8 + w_slot < block_n) {
#pragma unroll
        for (int tile = 0; tile < kMTiles; ++tile) {
          *reinterpret_cast<float2*>(sink + half * 8 * row_stride + tile * kMmaM) = make_float2(
              sums[half / 2][tile][half % 2 * 2], sums[half / 2][tile][half % 2 * 2 + 1]);
        }
      }
    }
  }

  // ---- Who adds up the slices and ends the outputs: all warps -----------------------------------

  // A warp finishes 32 rows of w for a few rows of a: consecutive outputs for each of these.
  __device__ __forceinline__ void end() const {
    constexpr int kSlots = kMTiles;
    struct alignas(kSlots * sizeof(float)) SlotVector {
      float value[kSlots];
    };
    const int slot_sets = block_m / kSlots;
    for (int i = warp; i < (block_n + 31) / 32 * slot_sets; i += blockDim.x / 32) {
      const int row = i / slot_sets * 32 + lane;
      const int slot = i % slot_sets * kSlots;
      if (row >= block_n || first_n + row >= args.n) continue;
      float sum[kSlots] = {};
#pragma unroll 4
      for (int s = 0; s < slices; ++s) {
        const SlotVector part =
            *reinterpret_cast<const SlotVector*>(partial + (s * block_n + row) * row_stride + slot);
#pragma unroll
        for (int j = 0; j < kSlots; ++j) sum[j] += part.value[j];
      }
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const int m = slot / 8 * 8 + a_row_of_slot<Types>(slot % 8 + j, a_chunks);
        if (m < args.m) {
          outputs.put(m, first_n + row, factors.apply(sum[j], m, row));
        }
      }
    }
  }

  // A warp finishes 32 rows of gate and those of up for a row of a.
  __device__ __forceinline__ void end_gated() const {
    static_assert(kMTiles == 1, "a slot at a time");
    const int up_row = first_up_row(block_n), own = block_n - up_row;
    const int m_count = static_cast<int>(args.m);
    for (int i = warp; i < (own + 31) / 32 * m_count; i += blockDim.x / 32) {
      const int row = i / m_count * 32 + lane, m = i % m_count;
      if (row >= own || first_n + row >= args.n / 2) continue;
      int slot = 0;
      while (a_row_of_slot<Types>(slot, a_chunks) != m) ++slot;
      float gate = 0.0f, up = 0.0f;
#pragma unroll 2
      for (int s = 0; s < slices; ++s) {
        gate += partial[(s * block_n + row) * row_stride + slot];
        up += partial[(s * block_n + up_row + row) * row_stride + slot];
      }
      outputs.put_gated(m, first_n + row, factors.apply(gate, m, row),
                        factors.apply(up, m, up_row + row));
    }
  }
};

#endif

// Grid: ceil(N / block_n) blocks of tma_consumers(config) + kProducers warps; if outputs are gated,
// N / 2 and the rows of gate; if rows are quantised, kQuantizers warps.
// w_map: boxes of [block_n, k_chunks, 128 B], or the rows of gate; a_map: boxes of [block_m,
// k_chunks, 128 B], of twice the chunks if kWideA.
template <class Types, int kWarpM, bool kBlockScales, class Outputs, class Rows>
__global__ void __launch_bounds__((kMaxConsumers + kProducers) * 32, 1)
    skinny_gemm_tma_pipeline_kernel(const __grid_constant__ CUtensorMap w_map,
                                    const __grid_constant__ CUtensorMap a_map,
                                    const __grid_constant__ typename Outputs::Args args,
                                    SkinnyGemmConfig config) {
#if __CUDA_ARCH__ >= 900
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int helpers = blockDim.x / 32 - kProducers;
  const int consumers = Rows::kFetched ? helpers : tma_consumers(config);
  const int block_n = config.block_n;
  const int w_chunks = config.k_chunks;
  const int a_chunks = Rows::kFetched ? config.k_chunks * Types::kAVectors : 1;
  const int slices = w_chunks * kSlicesPerChunk;
  const int block_m = kWarpM * config.m_groups;
  const int first_n = blockIdx.x * (Outputs::kGates ? block_n - first_up_row(block_n) : block_n);
  const int row_chunks = static_cast<int>(args.k * Types::kWBytes / kChunkBytes);
  const int boxes = (row_chunks + w_chunks - 1) / w_chunks;

  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kMaxStages], empty_barriers[kMaxStages];
  __shared__ SharedFactors<kMaxTmaBlockN> factors;
  __shared__ typename Outputs::Shared of_outputs;
  __shared__ typename Rows::Shared of_rows;
  const uint32_t full = pinned_address(full_barriers);
  const uint32_t empty = pinned_address(empty_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & (kPatternBytes - 1);
  const uint32_t stages = pinned_address(dynamic_shared + padding);
  const int w_bytes = box_bytes(block_n, w_chunks);
  const int stage_bytes = w_bytes + (Rows::kFetched ? block_m * a_chunks * kChunkBytes : 0);
  const Pipeline pipeline{full, empty, stages, config.num_stages, stage_bytes};
  float* partial =
      reinterpret_cast<float*>(dynamic_shared + padding + config.num_stages * stage_bytes);
  const int row_stride = partial_stride(block_m);

  const Outputs outputs(args, of_outputs, dynamic_shared + padding, first_n, block_n);
  const Rows rows(args, of_rows,
                  stages + static_cast<uint32_t>(tma_shared_bytes(config, 0)) - kPatternBytes,
                  config);

  if (!Outputs::kSends) allow_next_kernel();
  if (threadIdx.x == 0) pipeline.init(consumers, Rows::kFetched ? kProducers : 1);
  __syncthreads();

  const TmaBlock<Types, kWarpM, kBlockScales, Outputs, Rows> block{
      args,     config, pipeline,   factors, outputs, partial,   rows,
      warp,     lane,   helpers,    block_n, block_m, first_n,   w_chunks,
      a_chunks, slices, row_chunks, boxes,   w_bytes, row_stride};
  if (warp >= helpers) {
    if (lane == 0) block.fetch(w_map, a_map);
    __syncwarp();
    if (warp == helpers) ask_ahead(args.ahead, lane);
  } else {
    if constexpr (!Rows::kFetched) {
      block.fetch_factors(helpers * 32);
      rows.make(factors.scale_a);
    }
    if (Rows::kFetched || warp < consumers) block.multiply();
  }
  __syncthreads();
  if constexpr (Outputs::kGates) {
    block.end_gated();
  } else {
    block.end();
  }
  outputs.send();
#endif
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
