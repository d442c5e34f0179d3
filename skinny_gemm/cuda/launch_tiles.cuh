// Starts the kernels for few rows: describes the operands to that of a config, and picks the
// instance of its tile. Included by the files that hold the instances.
//
//   warpgroup.cuh          sm_90a, FP8 x FP8, M beyond 16: shared-memory pipeline into wgmma
//   tma_pipeline.cuh       sm_90 and later: shared-memory pipeline into mma.sync
//   register_pipeline.cuh  sm_80 and later: w straight to registers
#pragma once

#include <utility>

#include "../../common/gpu/launch.h"
#include "register_pipeline.cuh"
#include "tma_pipeline.cuh"
#include "warpgroup.cuh"

namespace rocm_kernels {
namespace cuda::skinny {

// ---- The operands ------------------------------------------------------------------------------

inline MatrixOfBytes matrix_a(const GemmArgs& args) {
  const int64_t bytes = size_of(args.a_dtype);
  return {args.a, args.m, args.k * bytes, args.a_stride * bytes};
}
inline MatrixOfBytes matrix_w(const GemmArgs& args) {
  const int64_t bytes = size_of(args.w_dtype);
  return {args.w, args.n, args.k * bytes, args.w_stride * bytes};
}

constexpr int warpgroup_threads(int warpgroups) { return (warpgroups * 4 + kProducers) * 32; }

// ---- The kernels -------------------------------------------------------------------------------

inline unsigned blocks_for(int64_t rows, int64_t of_a_block) {
  return static_cast<unsigned>((rows + of_a_block - 1) / of_a_block);
}

// A product whose config is chosen, on its way to a kernel. `early`: see Launch.
template <class Outputs>
struct Call {
  const typename Outputs::Args& args;
  const SkinnyGemmConfig& config;
  Stream stream;
  bool early;

  Launch launch(dim3 grid, int block, int64_t shared_bytes = 0) const {
    return {grid, block, stream, shared_bytes, 1, early};
  }
};

template <class Types, int kBlockM, int kBlockN, bool kBlockScales>
Status launch_register_pipeline(const Call<StoredOutputs>& call) {
  constexpr int kNumStages = (kBlockM <= 16 ? 6 : 4) * kMmaN / kBlockN;
  const dim3 grid(blocks_for(call.args.n, kBlockN), blocks_for(call.args.m, kBlockM));
  return launch_kernel(
      skinny_gemm_register_pipeline_kernel<Types, kBlockM, kBlockN, kNumStages, kBlockScales>,
      call.launch(grid, kRegisterPipelineWarps * 32), call.args);
}

template <class Types, int kWarpM, bool kBlockScales, class Outputs, class Rows = FetchedRows>
Status launch_tma_pipeline(const Call<Outputs>& call) {
  const SkinnyGemmConfig& config = call.config;
  const int own = Outputs::kGates ? config.block_n - first_up_row(config.block_n) : config.block_n;
  CUtensorMap w_map, a_map = {};
  if (const Status error = make_tensor_map(w_map, matrix_w(call.args), own, config.k_chunks,
                                           BoxOrder::kRowsOfChunks)) {
    return error;
  }
  if (const Status error =
          Rows::kFetched
              ? make_tensor_map(a_map, matrix_a(call.args), config.block_m,
                                config.k_chunks * Types::kAVectors, BoxOrder::kRowsOfChunks)
              : nullptr) {
    return error;
  }
  return launch_kernel(
      skinny_gemm_tma_pipeline_kernel<Types, kWarpM, kBlockScales, Outputs, Rows>,
      call.launch(dim3(blocks_for(call.args.n / (Outputs::kGates ? 2 : 1), own)),
                  (Rows::kFetched ? tma_consumers(config) : kQuantizers) * 32 + kProducers * 32,
                  Rows::kFetched ? tma_shared_bytes(config, Types::kAVectors)
                                 : quantizing_shared_bytes(config, call.args.m, call.args.k)),
      w_map, a_map, call.args, config);
}

template <int kBlockM, int kWarpgroups, class Outputs>
Status launch_warpgroup(const Call<Outputs>& call) {
  const SkinnyGemmConfig& config = call.config;
  CUtensorMap w_map, a_map;
  if (const Status error = make_tensor_map(w_map, matrix_w(call.args), warpgroup_box_n(config),
                                           config.k_chunks, BoxOrder::kChunksOfRows)) {
    return error;
  }
  if (const Status error = make_tensor_map(a_map, matrix_a(call.args), warpgroup_box_m(call.args.m),
                                           config.k_chunks, BoxOrder::kChunksOfRows)) {
    return error;
  }
  Launch launch = call.launch(dim3(blocks_for(call.args.n, config.block_n) * config.split_k),
                              warpgroup_threads(kWarpgroups),
                              warpgroup_shared_bytes(config, call.args.m) +
                                  (Outputs::kSends ? sent_bytes(config, call.args.m) : 0));
  launch.cluster = config.split_k;
  return launch_kernel(skinny_gemm_warpgroup_kernel<kBlockM, kWarpgroups, Outputs>, launch, w_map,
                       a_map, call.args, config);
}

// ---- From a config to its kernel ---------------------------------------------------------------

template <class Types, bool kBlockScales, size_t kTile, class Outputs>
Status launch_tile(const Call<Outputs>& call) {
  constexpr SkinnyTile kIt = kSkinnyTiles[kTile];
  if constexpr (kIt.design == Design::kRegisterPipeline && !Outputs::kSends) {
    return launch_register_pipeline<Types, kIt.m, kIt.n, kBlockScales>(call);
  } else if constexpr (kIt.design == Design::kTmaPipeline && (!kBlockScales || Types::kFp8W)) {
    return launch_tma_pipeline<Types, kIt.m, kBlockScales>(call);
  } else if constexpr (kIt.design == Design::kWarpgroup && Types::kFp8A && !kBlockScales) {
    return launch_warpgroup<kIt.m, kIt.n / kWarpgroupN>(call);
  } else {
    return "no kernel of this config takes these types and scales";
  }
}

template <class Types, bool kBlockScales, class Outputs, size_t... kTile>
Status launch_typed(const Call<Outputs>& call, std::index_sequence<kTile...>) {
  Status status = "no kernel has the tile of this config";
  // The first tile that fits ends the search.
  static_cast<void>(((is_tile_of(kSkinnyTiles[kTile], call.config) &&
                      (status = launch_tile<Types, kBlockScales, kTile>(call), true)) ||
                     ...));
  return status;
}

// The tile of the config, for operands of these types.
template <class Types, class Outputs>
Status launch_types(const Call<Outputs>& call) {
  constexpr auto kTiles = std::make_index_sequence<kSkinnyTileCount>();
  return is_block_scaled(call.args) ? launch_typed<Types, true>(call, kTiles)
                                    : launch_typed<Types, false>(call, kTiles);
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
