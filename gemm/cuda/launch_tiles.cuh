// Starts an instance of the warpgroup kernel. Included by the files that hold the instances.
#pragma once

#include "../../blocks/product/cuda/launch_warpgroup.cuh"
#include "instances.h"

namespace rocm_kernels {
namespace cuda {

template <class Tile>
Status launch_tile(const GemmArgs& args, const GemmConfig& config, WarpgroupProblem problem,
                   void* stream) {
  const int64_t bytes_a = size_of(args.a_dtype), bytes_w = size_of(args.w_dtype);
  CUtensorMap a_map, w_map;
  if (const Status error =
          make_box_map(a_map, {args.a, args.m, args.k * bytes_a, args.a_stride * bytes_a},
                       Tile::kSwapAb ? problem.columns_box : problem.rows_box)) {
    return error;
  }
  if (const Status error =
          make_box_map(w_map, {args.w, args.n, args.k * bytes_w, args.w_stride * bytes_w},
                       Tile::kSwapAb ? problem.rows_box : problem.columns_box, Tile::kWRowBytes)) {
    return error;
  }
  if (!Tile::kSwapAb && problem.wide_stores) {
    const MatrixOfBytes out = {args.out, args.m, args.n * 2, args.out_stride * 2};
    if (const Status error =
            make_box_map(problem.out_map, out, kStagedRows, staged_columns(Tile::kColumns) * 2,
                         problem.adds ? args.out_dtype : DType::kFloat8E4M3FN)) {
      return error;
    }
  }
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(problem.schedule.workers * problem.cluster));
  launch.block = Tile::kThreads;
  launch.stream = static_cast<Stream>(stream);
  launch.shared_bytes =
      warpgroup_shared_bytes(args, config) + problem.narrow_stages * Tile::kNarrowBytes;
  launch.cluster = problem.cluster;
  launch.early = true;
  return launch_kernel(gemm_warpgroup_kernel<Tile, DenseTiles<Tile>>, launch,
                       Tile::kSwapAb ? w_map : a_map, Tile::kSwapAb ? a_map : w_map, problem);
}

// The instance of the config's tile: tile `kIndex` of the kind's table or one behind it. Each type
// is compiled in a file of its own, which calls this.
template <DType kType, TileKind kKind, DType kOut, size_t kIndex = 0>
Status launch_tiles(const GemmArgs& args, const GemmConfig& config, const WarpgroupProblem& problem,
                    void* stream) {
  constexpr GemmTiles kAll = tiles_of(kKind);
  if constexpr (kIndex == kAll.count) {
    return kNoTile;
  } else {
    constexpr GemmTile kIs = kAll.tiles[kIndex];
    if constexpr (is_compiled(kKind, kOut, kIs)) {
      if (config.block_m == kIs.block_m && config.block_n == kIs.block_n &&
          config.swap_ab == kIs.swap_ab) {
        constexpr bool kWidened = kKind == TileKind::kWidened || kKind == TileKind::kWidenedBlock;
        constexpr bool kBlocks = kKind == TileKind::kFp8Block || kKind == TileKind::kWidenedBlock;
        // Products of 32 bytes of K that add up in the tensor core; 0: all. float16 shows what the
        // sums of 128 FP8 products lack; of 64 it does not.
        constexpr int kChain = is_fp8(kType) ? (kOut == DType::kFloat16 ? 2 : 4)
                               : kWidened    ? (kBlocks ? 4 : 0)
                                             : (kOut == DType::kFloat32 ? 4 : 0);
        return launch_tile<
            WarpgroupTile<kType, kIs.swap_ab, kIs.rows() / 128, kIs.columns(), kBlocks, kChain,
                          false, kWidened ? DType::kFloat8E4M3FN : kType>>(args, config, problem,
                                                                           stream);
      }
    }
    return launch_tiles<kType, kKind, kOut, kIndex + 1>(args, config, problem, stream);
  }
}

// `kSeldom`: the output that has fewer tiles, and instances of its own.
template <DType kType, TileKind kKind, DType kSeldom>
Status launch_tiles_to(const GemmArgs& args, const GemmConfig& config,
                       const WarpgroupProblem& problem, void* stream) {
  return args.out_dtype == kSeldom
             ? launch_tiles<kType, kKind, kSeldom>(args, config, problem, stream)
             : launch_tiles<kType, kKind, DType::kBFloat16>(args, config, problem, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
