// Starts the kernels for few rows: describes the operands to that of a config.
//
//   warpgroup.cuh          sm_90a, FP8 x FP8, M beyond 16: shared-memory pipeline into wgmma
//   tma_pipeline.cuh       sm_90 and later: shared-memory pipeline into mma.sync
//   register_pipeline.cuh  sm_80 and later: w straight to registers
#include "../../common/gpu/launch.h"
#include "register_pipeline.cuh"
#include "skinny_gemm.h"
#include "tma_pipeline.cuh"
#include "warpgroup.cuh"

namespace rocm_kernels {
namespace cuda::skinny {
namespace {

// ---- The operands ------------------------------------------------------------------------------

MatrixOfBytes matrix_a(const GemmArgs& args) {
  const int64_t bytes = size_of(args.a_dtype);
  return {args.a, args.m, args.k * bytes, args.a_stride * bytes};
}
MatrixOfBytes matrix_w(const GemmArgs& args) {
  const int64_t bytes = size_of(args.w_dtype);
  return {args.w, args.n, args.k * bytes, args.w_stride * bytes};
}

constexpr int warpgroup_threads(int warpgroups) { return (warpgroups * 4 + kProducers) * 32; }

// ---- The kernels -------------------------------------------------------------------------------

unsigned blocks_for(int64_t rows, int64_t of_a_block) {
  return static_cast<unsigned>((rows + of_a_block - 1) / of_a_block);
}

// A product whose config is chosen, on its way to a kernel. `early`: see Launch.
struct Call {
  const GemmArgs& args;
  const SkinnyGemmConfig& config;
  Stream stream;
  bool early;

  Launch launch(dim3 grid, int block, int64_t shared_bytes = 0) const {
    return {grid, block, stream, shared_bytes, 1, early};
  }
};

template <class Types, int kBlockM, int kBlockN, bool kBlockScales>
Status launch_register_pipeline(const Call& call) {
  constexpr int kNumStages = (kBlockM <= 16 ? 6 : 4) * kMmaN / kBlockN;
  const dim3 grid(blocks_for(call.args.n, kBlockN), blocks_for(call.args.m, kBlockM));
  return launch_kernel(
      skinny_gemm_register_pipeline_kernel<Types, kBlockM, kBlockN, kNumStages, kBlockScales>,
      call.launch(grid, kRegisterPipelineWarps * 32), call.args);
}

template <class Types, int kWarpM, bool kBlockScales>
Status launch_tma_pipeline(const Call& call) {
  const SkinnyGemmConfig& config = call.config;
  CUtensorMap w_map, a_map;
  if (const Status error = make_tensor_map(w_map, matrix_w(call.args), config.block_n,
                                           config.k_chunks, BoxOrder::kRowsOfChunks)) {
    return error;
  }
  if (const Status error =
          make_tensor_map(a_map, matrix_a(call.args), config.block_m,
                          config.k_chunks * Types::kAVectors, BoxOrder::kRowsOfChunks)) {
    return error;
  }
  return launch_kernel(skinny_gemm_tma_pipeline_kernel<Types, kWarpM, kBlockScales>,
                       call.launch(dim3(blocks_for(call.args.n, config.block_n)),
                                   (tma_consumers(config) + kProducers) * 32,
                                   tma_shared_bytes(config, Types::kAVectors)),
                       w_map, a_map, call.args, config);
}

template <int kBlockM, int kWarpgroups>
Status launch_warpgroup(const Call& call) {
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
  Launch launch =
      call.launch(dim3(blocks_for(call.args.n, config.block_n) * config.split_k),
                  warpgroup_threads(kWarpgroups), warpgroup_shared_bytes(config, call.args.m));
  launch.cluster = config.split_k;
  return launch_kernel(skinny_gemm_warpgroup_kernel<kBlockM, kWarpgroups>, launch, w_map, a_map,
                       call.args, config);
}

// ---- From a config to its kernel ---------------------------------------------------------------

template <class Types, bool kBlockScales, size_t kTile>
Status launch_tile(const Call& call) {
  constexpr SkinnyTile kIt = kSkinnyTiles[kTile];
  if constexpr (kIt.design == Design::kRegisterPipeline) {
    return launch_register_pipeline<Types, kIt.m, kIt.n, kBlockScales>(call);
  } else if constexpr (kIt.design == Design::kTmaPipeline && (!kBlockScales || Types::kFp8W)) {
    return launch_tma_pipeline<Types, kIt.m, kBlockScales>(call);
  } else if constexpr (kIt.design == Design::kWarpgroup && Types::kFp8A && !kBlockScales) {
    return launch_warpgroup<kIt.m, kIt.n / kWarpgroupN>(call);
  } else {
    return "no kernel of this config takes these types and scales";
  }
}

template <class Types, bool kBlockScales, size_t... kTile>
Status launch_typed(const Call& call, std::index_sequence<kTile...>) {
  Status status = "no kernel has the tile of this config";
  // The first tile that fits ends the search.
  static_cast<void>(((is_tile_of(kSkinnyTiles[kTile], call.config) &&
                      (status = launch_tile<Types, kBlockScales, kTile>(call), true)) ||
                     ...));
  return status;
}

Status launch_config(const Call& call) {
  const auto with = [&](auto types) {
    using Types = decltype(types);
    constexpr auto kTiles = std::make_index_sequence<kSkinnyTileCount>();
    return is_block_scaled(call.args) ? launch_typed<Types, true>(call, kTiles)
                                      : launch_typed<Types, false>(call, kTiles);
  };
  constexpr DType kFp8 = DType::kFloat8E4M3FN, kHalf = DType::kFloat16, kBrain = DType::kBFloat16;
  const bool fp8_w = is_fp8(call.args.w_dtype);
  if (call.args.a_dtype == kFp8) return with(MmaTypes<kFp8, kFp8>());
  if (call.args.a_dtype == kHalf) {
    return fp8_w ? with(MmaTypes<kHalf, kFp8>()) : with(MmaTypes<kHalf, kHalf>());
  }
  return fp8_w ? with(MmaTypes<kBrain, kFp8>()) : with(MmaTypes<kBrain, kBrain>());
}

}  // namespace

Status ask_clusters(int sm_count, int (&clusters)[3]) {
  // Larger clusters do not fill the device: its SMs come in groups of 16 and 18.
  constexpr int kWarpgroups = 2;
  const auto kernel = skinny_gemm_warpgroup_kernel<64, kWarpgroups>;
  clusters[0] = sm_count;
  cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
  for (int i = 1; i < 3 && error == cudaSuccess; ++i) {
    Launch launch{dim3(1 << i), warpgroup_threads(kWarpgroups), nullptr,
                  kSharedBytes - kStaticBytes};
    launch.cluster = 1 << i;
    const LaunchConfig asked(launch);
    error = cudaOccupancyMaxActiveClusters(&clusters[i], kernel, &asked.config);
  }
  return status_of(error);
}

Status launch(const GemmArgs& args, const SkinnyGemmConfig& config, const GemmDevice& device,
              void* stream) {
  return launch_config(
      {args, config, static_cast<Stream>(stream), device.compute_capability >= 90});
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
