// skinny_gemm for sm_90a and M from 17 to 64: FP8 x FP8 on the warpgroup's matrix instructions.
//
// clang-format off
//   w [N, K]          a cluster of C = split_k blocks, block_n = N / clusters
//   +------------+    +---------- block 0: K / C -----------+
//   | cluster 0  |    | producer -> stages -> warpgroups:   |    sums of all that share K -> shared
//   +------------+ -> | of w        of both   64 rows of w  | -> memory of the block that adds them
//   | cluster 1  |    | producer -> operands  each, or a    |    in order -> out
//   |  ...       |    | of a                  share of K    |
//   +------------+    +---------- block 1: K / C -----------+ ...
//
// Timeline of a block. Barriers: full and empty of each stage.
//
//   who                waits for            does                                  then tells
//   fetch: a lane      the kernel before    (the first boxes of w go to L2 before that)
//   for w, one for a   empty[stage]         orders a box                          full[stage]: its bytes
//   multiply:          the kernel before    fetches the factors of the end
//   warpgroups         full[stage]          multiplies, adds up in float32        empty[stage]
//   end: the same      those of its K,      adds up in order, stores outputs; or
//                      or the cluster       sends sums to whose share they are
//   end_share: all     the cluster          adds up its share in order, stores outputs
// clang-format on
//
// Why so. Both operands go to the tensor cores as they lie in shared memory: w is the 64-row
// operand, a the columns, and nothing is widened or passes through registers. Each block reads all
// rows of a, for its K, beside its rows of w; where these are few (2304 x 16384: 18 an SM, beside
// 64 of a) the bytes of a are the bound, so that a cluster splits K and has C times the rows of w.
// Sums are added in a fixed order: no workspace, no atomics, the same bits every run.
//
// The FP8 tensor core adds in about 14 bits. So no instruction adds to a long sum: two give the sum
// of 64 products, and float32 does the rest. Next to one rounding to 16 bits that is not seen; an
// output in float32 goes to the TMA pipeline (docs/kernels/skinny_gemm.md has the errors).
#pragma once

#include "../../common/cuda/wgmma.cuh"
#include "../../common/gpu/cluster.h"
#include "epilogue.cuh"
#include "tma_producer.cuh"

namespace rocm_kernels {
namespace cuda::skinny {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
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

// The roles of a block's warps, and what they share.
template <int kBlockM, int kWarpgroups, class Outputs>
struct SkinnyWarpgroupBlock {
  static_assert(kBlockM == 32 || kBlockM == 48 || kBlockM == 64,
                "wgmma() is written for 32, 48 and 64 columns");
  static constexpr int kTileM = 8;  // columns of which a lane holds two
  static constexpr int kMTiles = kBlockM / kTileM;
  static constexpr int kConsumers = kWarpgroups * 4;
  static constexpr int kSteps = kChunkBytes / kWgmmaKBytes;
  static constexpr int kChain = 2;  // instructions that add up in the tensor core
  // Results on their way at once: as many as the registers hold.
  static constexpr int kParts = kBlockM > 32 && kWarpgroups == 4 ? 1 : 2;

  using Sums = float[kMTiles][4];

  const GemmArgs& args;
  const SkinnyGemmConfig& config;
  const Pipeline& pipeline;
  SharedFactors<kMaxWarpgroupBlockN>& factors;
  const Outputs& outputs;
  int warp, lane, rank;
  int block_n, first_n, split_k, chunks;
  int k_groups;          // warpgroups that share the block's K
  int box_step;          // from a warpgroup's box to its next
  int first_box, boxes;  // of the block's K
  int box_n, box_m, a_bytes;
  int n_tiles, m_tiles;  // of 16 rows of w, of 8 rows of a
  int share;             // n_tiles that a block of the cluster finishes
  uint32_t received;     // their sums, from all of the cluster

  // ---- Who fetches an operand: a lane for w, a lane for a ---------------------------------------

  __device__ __forceinline__ void fetch(const CUtensorMap& w_map, const CUtensorMap& a_map) const {
    const bool is_w = warp == kConsumers;
    const CUtensorMap& map = is_w ? w_map : a_map;
    using Operand = Boxes<BoxOrder::kChunksOfRows>;
    prefetch_tensor_map(map);
    if (!is_w || !args.w_is_settled) {
      Operand{first_n, first_box * chunks, chunks, boxes}.prefetch(w_map, is_w, config.prefetch);
      wait_for_previous_kernel();
    }
    Operand{is_w ? first_n : 0, first_box * chunks, chunks, boxes}.produce(
        map, pipeline, is_w ? a_bytes : 0, is_w ? box_n * chunks * kChunkBytes : a_bytes,
        policy_of(is_w));
    if (!is_w) outputs.begin_next();
  }

  // ---- Who multiplies: warpgroups, each 64 rows of w, or a share of K of them -------------------

  __device__ __forceinline__ void multiply(Sums& sums) const {
    const int n_group = warp / 4 % config.n_groups;
    const int k_group = warp / 4 / config.n_groups;
    // What the end needs from memory is fetched while the pipeline fills.
    factors.fetch(args, [this](int row) { return first_n + row; }, block_n, kConsumers * 32);

    float parts[kParts][kMTiles][4] = {};
    const auto add = [&](const float (&part)[kMTiles][4]) {
#pragma unroll
      for (int tile = 0; tile < kMTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[tile][j] += part[tile][j];
      }
    };
    // A stage is always this warpgroup's or never: num_stages is a multiple of box_step.
    PipelineState state{k_group / chunks % box_step, 0};
    for (int i = state.stage; i < boxes; i += box_step) {
      const uint32_t data = pipeline.data_of(state.stage);
      mbarrier_wait(pipeline.full_of(state.stage), state.parity);
      for (int chunk = k_group % chunks; chunk < chunks; chunk += k_groups) {
        const uint64_t a = wgmma_operand(data + chunk * box_m * kChunkBytes);
        const uint64_t w =
            wgmma_operand(data + a_bytes + (chunk * box_n + n_group * kWarpgroupN) * kChunkBytes);
#pragma unroll
        for (int group = 0; group < kSteps / kChain; ++group) {
          if (group >= kParts) wgmma_wait<0>(parts[0]), add(parts[0]);
          float (&part)[kMTiles][4] = parts[group % kParts];
          const uint64_t offset = wgmma_offset(group * kChain * kWgmmaKBytes);
          wgmma_fence();
          wgmma<DType::kFloat8E4M3FN>(part, w + offset, a + offset, 0);
          wgmma<DType::kFloat8E4M3FN>(part, w + offset + wgmma_offset(kWgmmaKBytes),
                                      a + offset + wgmma_offset(kWgmmaKBytes), 1);
          wgmma_commit();
        }
        if constexpr (kParts == 2) wgmma_wait<1>(parts[0]), add(parts[0]);
        wgmma_wait<0>(parts[kParts - 1]), add(parts[kParts - 1]);
      }
      if (lane == 0) mbarrier_arrive(pipeline.empty_of(state.stage));
      state.stage += box_step;
      if (state.stage >= config.num_stages) state.stage -= config.num_stages, state.parity ^= 1;
    }
  }

  // ---- Who ends the sums: the same, and where K is shared in the cluster all warps --------------

  // Sums to outputs; to the block of the cluster that has the share where K is split.
  __device__ __forceinline__ void end(const Sums& sums) const {
    const int n_group = warp / 4 % config.n_groups;
    const int k_group = warp / 4 / config.n_groups;
    const auto consumers_barrier = [] { named_barrier<1, kConsumers * 32>(); };
    const int n_tile = n_group * 4 + warp % 4;
    const auto for_each_tile = [&](auto body) {
#pragma unroll
      for (int tile = 0; tile < kMTiles; ++tile) {
        if (n_tile < n_tiles && tile < m_tiles) {
          body(tile, float4{sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]});
        }
      }
    };
    if (split_k > 1) {
      // [rank][k_group][n_tile of the share][m_tile][lane] of the block whose share it is.
      // Every block of the cluster has begun, and so owns its shared memory, once the wait is over.
      cluster_wait<Warp::kApart>();
      const int to = n_tile / share;
      const int from = rank * k_groups + k_group;
      const int place = (from * share + n_tile - to * share) * m_tiles;
      for_each_tile([&](int tile, float4 sum) {
        store_vector_in_cluster(received + ((place + tile) * 32 + lane) * 16, to, sum);
      });
    } else if (k_groups > 1) {
      // [k_group][n_tile][m_tile][lane], where the stages were.
      consumers_barrier();
      for_each_tile([&](int tile, float4 sum) {
        const int place = (k_group * n_tiles + n_tile) * m_tiles + tile;
        store_shared(pipeline.stages + (place * 32 + lane) * 16, sum);
      });
      consumers_barrier();
      for (int i = warp; i < n_tiles * m_tiles; i += kConsumers) {
        finish_tile(
            sum_shared(pipeline.stages + (i * 32 + lane) * 16, k_groups, n_tiles * m_tiles * 512),
            i / m_tiles, i % m_tiles);
      }
    } else {
      consumers_barrier();  // the scales are in place
      for_each_tile([&](int tile, float4 sum) { finish_tile(sum, n_tile, tile); });
    }
  }

  // The sums of the block's share, from all blocks of the cluster, to outputs.
  __device__ __forceinline__ void end_share() const {
    const int own = min(share, n_tiles - rank * share);
    for (int i = warp; i < own * m_tiles; i += kConsumers + kProducers) {
      finish_tile(
          sum_shared(received + (i * 32 + lane) * 16, split_k * k_groups, share * m_tiles * 512),
          rank * share + i / m_tiles, i % m_tiles);
    }
  }

  // Rounds and stores the sums of 16 rows of w and 8 rows of a. A lane holds one row of w (and that
  // 8 further) for two rows of a; lanes four apart trade for two rows of w and one of a.
  __device__ __forceinline__ void finish_tile(float4 sum, int n_tile, int m_tile) const {
    const bool odd = lane / 4 % 2;
    const int m = m_tile * kTileM + lane % 4 * 2 + odd;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float even_m = half == 0 ? sum.x : sum.z, odd_m = half == 0 ? sum.y : sum.w;
      const float mine = odd ? odd_m : even_m;
      const float other = __shfl_xor_sync(~0u, odd ? even_m : odd_m, 4);
      const int row = n_tile * kWarpRows + half * 8 + lane / 8 * 2;
      const int64_t n = first_n + row;
      if (m < args.m && row < block_n && n < args.n) {
        const float low = odd ? other : mine, high = odd ? mine : other;
        outputs.put_pair(m, n, factors.apply(low, m, row), factors.apply(high, m, row + 1));
      }
    }
  }
};
#endif

// Grid: ceil(N / block_n) clusters of split_k blocks of kWarpgroups warpgroups and the producers.
// w_map: boxes of [k_chunks, box_n, 128 B]; a_map: boxes of [k_chunks, box_m, 128 B].
template <int kBlockM, int kWarpgroups, class Outputs>
__global__ void __launch_bounds__((kWarpgroups * 4 + kProducers) * 32, 1)
    skinny_gemm_warpgroup_kernel(const __grid_constant__ CUtensorMap w_map,
                                 const __grid_constant__ CUtensorMap a_map,
                                 const __grid_constant__ typename Outputs::Args args,
                                 SkinnyGemmConfig config) {
#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "skinny_gemm: build for compute capability 9.0a; plain 9.0 has no warpgroup instructions"
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Block = SkinnyWarpgroupBlock<kBlockM, kWarpgroups, Outputs>;
  constexpr int kConsumers = Block::kConsumers;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int block_n = config.block_n;
  const int chunks = config.k_chunks;
  const int split_k = config.split_k;
  const int k_groups = kWarpgroups / config.n_groups;  // warpgroups that share the block's K
  const int box_step = k_groups > chunks ? k_groups / chunks : 1;  // from one's box to its next
  const int box_m = warpgroup_box_m(args.m);
  const int m_tiles = box_m / Block::kTileM;
  const int rank = cluster_rank();
  const int first_n = static_cast<int>(blockIdx.x) / split_k * block_n;
  const int row_chunks = static_cast<int>(args.k / kChunkBytes);
  const int all_boxes = (row_chunks + chunks - 1) / chunks;
  const int first_box = all_boxes * rank / split_k;
  const int boxes = all_boxes * (rank + 1) / split_k - first_box;

  extern __shared__ uint8_t dynamic_shared[];
  __shared__ uint64_t full_barriers[kMaxStages], empty_barriers[kMaxStages];
  __shared__ SharedFactors<kMaxWarpgroupBlockN> factors;
  __shared__ typename Outputs::Shared of_outputs;
  const uint32_t full = pinned_address(full_barriers);
  const uint32_t empty = pinned_address(empty_barriers);
  const uint32_t padding = -shared_address(dynamic_shared) & (kPatternBytes - 1);
  const uint32_t stages = pinned_address(dynamic_shared + padding);
  const int box_n = warpgroup_box_n(config);
  const int a_bytes = box_m * chunks * kChunkBytes;
  const int stage_bytes = a_bytes + box_bytes(box_n, chunks);
  const Pipeline pipeline{full, empty, stages, config.num_stages, stage_bytes};

  const int n_tiles = (block_n + kWarpRows - 1) / kWarpRows;
  const int share = warpgroup_share(config);  // n_tiles that a block of the cluster finishes
  const uint32_t received = stages + warpgroup_stage_bytes(config, args.m);  // their sums

  const int finished = rank * share * kWarpRows;  // rows of w before those that it finishes
  const Outputs outputs(args, of_outputs,
                        dynamic_shared + padding + warpgroup_stage_bytes(config, args.m) +
                            warpgroup_exchange_bytes(config, args.m),
                        first_n + finished, min(share * kWarpRows, block_n - finished));

  if (!Outputs::kSends) allow_next_kernel();
  if (split_k > 1) cluster_arrive<Warp::kApart>();
  if (threadIdx.x == 0) pipeline.init(kConsumers / box_step);
  __syncthreads();

  const Block block{args,    config,  pipeline, factors, outputs,  warp,     lane,      rank,
                    block_n, first_n, split_k,  chunks,  k_groups, box_step, first_box, boxes,
                    box_n,   box_m,   a_bytes,  n_tiles, m_tiles,  share,    received};
  if (warp >= kConsumers) {
    if (lane == 0) block.fetch(w_map, a_map);
    __syncwarp();
    if (warp == kConsumers) ask_ahead(args.ahead, lane);
    if (split_k > 1) cluster_wait<Warp::kApart>();
  } else {
    typename Block::Sums sums = {};
    block.multiply(sums);
    block.end(sums);
  }
  if (split_k == 1) return outputs.send();
  cluster_arrive<Warp::kApart>();
  cluster_wait<Warp::kApart>();
  block.end_share();
  outputs.send();
#endif
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
