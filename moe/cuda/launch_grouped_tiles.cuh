// From a grouped product to an instance of the warpgroup kernel. Included by the files that hold
// the instances.
#pragma once

#include "../../blocks/product/cuda/launch_warpgroup.cuh"
#include "grouped_tiles.cuh"
#include "launches.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda::moe {

// The map of all experts' weights: for gate_up a box has rows of gates and rows of ups.
inline Status make_experts_map(CUtensorMap& map, const ProductLaunch& call, int line_bytes) {
  const ExpertWeights& w = call.product.w;
  const int64_t bytes = size_of(w.dtype), row = w.row_stride * bytes;
  const bool gate_up = call.end == GroupedEnd::kGateUp;
  const int64_t rows = gate_up ? call.product.n / 2 : call.product.n;
  const bool beside = gate_up && call.product.interleaved;
  // The stride of a lone matrix may be anything.
  const int64_t stride = call.slots.experts == 1 ? row * call.product.n : w.expert_stride * bytes;
  const StackOfBytes stack = {w.data,
                              call.slots.experts,
                              rows,
                              w_row_bytes(w.dtype, call.product.k),
                              beside ? 2 * row : row,
                              stride};
  return gate_up ? make_runs_map(map, stack, 2, beside ? row : rows * row, 64, line_bytes)
                 : make_runs_map(map, stack, 1, rows * row, 128, line_bytes);
}

template <class Tile, bool kGateUp>
Status launch_tile(const ProductLaunch& call, Stream stream) {
  using Tiles = GroupedTiles<Tile, kGateUp>;
  const GroupedProblem& p = call.product;
  const int64_t bytes = size_of(p.a_dtype);
  const int cluster = warpgroup_cluster(call.config);
  CUtensorMap a_map, w_map;
  // The blocks of a cluster share rows of a, and fetch half of them each.
  if (const Status error =
          make_box_map(a_map, {p.a, call.slots.slots, p.k * bytes, p.a_stride * bytes},
                       Tiles::kTileM / cluster)) {
    return error;
  }
  if (const Status error = make_experts_map(w_map, call, Tile::kWRowBytes)) return error;
  GroupedTilesProblem problem;
  problem.product = p;
  problem.tiles_n = static_cast<int32_t>(ceil_div(p.n, Tiles::kTileN * cluster));
  problem.walked = call.config.walked();
  problem.chunks = static_cast<int32_t>(ceil_div(p.k * bytes, kChunkBytes));
  problem.workers = call.device.sm_count / cluster;
  problem.warp_staging =
      warp_staging_bytes(call.config, p.k * bytes, call.end == GroupedEnd::kDown && p.wide_stores);
  if constexpr (Tile::kWidened) {
    const WidenedStages stages = widened_stages(
        call.config.block_m, call.config.block_n, Tile::kWRowBytes,
        warpgroup_bytes(call.config, Tile::kWarpScaleBytes, 0, problem.warp_staging),
        call.device.shared_bytes_per_block - moe_static_bytes(call.config) + kStaticBytes);
    problem.num_stages = stages.wide;
    problem.narrow_stages = stages.narrow;
  } else {
    problem.num_stages = warpgroup_stages(call.config, Tile::kWarpScaleBytes,
                                          call.device.shared_bytes_per_block, problem.warp_staging);
  }
  problem.even_exponents = p.w.mx_row_stride % 2 == 0 && p.w.mx_expert_stride % 2 == 0 &&
                           reinterpret_cast<uintptr_t>(p.w.mx_scales) % 2 == 0;
  problem.cluster = cluster;
  problem.share_rows = !Tile::kSwapAb;
  problem.rows_box = problem.share_rows ? Tile::kRows / cluster : Tile::kRows;
  problem.columns_box = problem.share_rows ? Tile::kColumns : Tile::kColumns / cluster;
  if (reads_weights_once(call.slots.slots, call.slots.experts, call.config.block_m)) {
    problem.rows_policy = L2Policy::kEvictFirst;  // rows of w are the operand's
  }
  problem.scale_a = p.scale_a;
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(problem.workers * cluster));
  launch.block = Tile::kThreads;
  launch.stream = stream;
  launch.shared_bytes = warpgroup_bytes(call.config, Tile::kWarpScaleBytes, problem.num_stages,
                                        problem.warp_staging) +
                        problem.narrow_stages * Tile::kNarrowBytes;
  launch.cluster = cluster;
  launch.early = true;
  return launch_kernel(gemm_warpgroup_kernel<Tile, Tiles>, launch, Tile::kSwapAb ? w_map : a_map,
                       Tile::kSwapAb ? a_map : w_map, problem);
}

// The instance of the config's tile: tile `kTile` of kMoeWarpgroupTiles or one behind it. Some have
// no registers for their sums.
template <DType kType, bool kBlocks, int kChain, DType kWType = kType, size_t kTile = 0>
Status launch_tiles_of(const ProductLaunch& call, Stream stream) {
  if constexpr (kTile == kMoeWarpgroupTileCount) {
    return "no kernel was built for this config; report a defect";
  } else {
    constexpr MoeWarpgroupTile kIs = kMoeWarpgroupTiles[kTile];
    if constexpr (fits_registers(kIs, kBlocks, kType != kWType)) {
      if (call.config.block_m == kIs.block_m && call.config.block_n == kIs.block_n) {
        constexpr int kWaves = kIs.waves(), kColumns = kIs.columns();
        return call.end == GroupedEnd::kGateUp
                   ? launch_tile<WarpgroupTile<kType, kIs.swap_ab(), kWaves, kColumns, kBlocks,
                                               kChain, true, kWType>,
                                 true>(call, stream)
                   : launch_tile<WarpgroupTile<kType, kIs.swap_ab(), kWaves, kColumns, kBlocks,
                                               kChain, false, kWType>,
                                 false>(call, stream);
      }
    }
    return launch_tiles_of<kType, kBlocks, kChain, kWType, kTile + 1>(call, stream);
  }
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
