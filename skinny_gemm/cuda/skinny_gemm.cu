// CUDA launcher of skinny_gemm: asks for a config, describes the operands to its kernel, launches
// it.
//
//   warpgroup.cuh          sm_90a, FP8 x FP8, M beyond 16: shared-memory pipeline into wgmma
//   tma_pipeline.cuh       sm_90 and later: shared-memory pipeline into mma.sync
//   register_pipeline.cuh  sm_80 and later: w straight to registers
//   gemm/cuda/plain.cu     any alignment and dialect
#include "../../common/gpu/launch.h"
#include "../../gemm/cuda/plain.h"
#include "choose_config.h"
#include "register_pipeline.cuh"
#include "tma_pipeline.cuh"
#include "warpgroup.cuh"

namespace rocm_kernels {
namespace cuda {
namespace {

// ---- The device and the operands ---------------------------------------------------------------

GemmAlignment alignment_of(const GemmArgs& args) {
  const auto aligned = [&](const void* data, int64_t stride, int64_t rows, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
           (rows == 1 || stride * size_of(dtype) % 16 == 0);
  };
  const int64_t a_bytes = args.k * size_of(args.a_dtype);
  const int64_t w_bytes = args.k * size_of(args.w_dtype);
  GemmAlignment alignment;
  alignment.vectors = aligned(args.a, args.a_stride, args.m, args.a_dtype) &&
                      aligned(args.w, args.w_stride, args.n, args.w_dtype) && a_bytes % 16 == 0 &&
                      w_bytes % 16 == 0;
  // The copy engine counts 128-byte chunks and takes no rows that overlap.
  alignment.chunks = w_bytes % kChunkBytes == 0 && (args.m == 1 || args.a_stride >= args.k) &&
                     (args.n == 1 || args.w_stride >= args.k);
  return alignment;
}

MatrixOfBytes matrix_a(const GemmArgs& args) {
  const int64_t bytes = size_of(args.a_dtype);
  return {args.a, args.m, args.k * bytes, args.a_stride * bytes};
}
MatrixOfBytes matrix_w(const GemmArgs& args) {
  const int64_t bytes = size_of(args.w_dtype);
  return {args.w, args.n, args.k * bytes, args.w_stride * bytes};
}

constexpr int warpgroup_threads(int warpgroups) { return (warpgroups * 4 + kProducers) * 32; }

Status ask_skinny_gemm_device(int id, SkinnyGemmDevice& device) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  device.sm_count = facts.compute_units;
  device.compute_capability = facts.compute_capability;
  int bytes = 0;
  if (const Status error =
          status_of(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id))) {
    return error;
  }
  device.shared_bytes_per_block = bytes;
  if (device.compute_capability != 90) return nullptr;
  // Larger clusters do not fill the device: its SMs come in groups of 16 and 18.
  constexpr int kWarpgroups = 2;
  const auto kernel = skinny_gemm_warpgroup_kernel<64, kWarpgroups>;
  bytes -= kStaticBytes;
  cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
  device.clusters[0] = device.sm_count;
  for (int i = 1; i < 3 && error == cudaSuccess; ++i) {
    Launch launch{dim3(1 << i), warpgroup_threads(kWarpgroups), nullptr, bytes};
    launch.cluster = 1 << i;
    const LaunchConfig asked(launch);
    error = cudaOccupancyMaxActiveClusters(&device.clusters[i], kernel, &asked.config);
  }
  return status_of(error);
}

Status current_skinny_gemm_device(SkinnyGemmDevice& device) {
  return ask_once<ask_skinny_gemm_device>(device);
}

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
    return "skinny_gemm: no kernel of this config takes these types and scales";
  }
}

template <class Types, bool kBlockScales, size_t... kTile>
Status launch_typed(const Call& call, std::index_sequence<kTile...>) {
  Status status = "skinny_gemm: no kernel has the tile of this config";
  // The first tile that fits ends the search.
  static_cast<void>(((is_tile_of(kSkinnyTiles[kTile], call.config) &&
                      (status = launch_tile<Types, kBlockScales, kTile>(call), true)) ||
                     ...));
  return status;
}

Status launch_config(const Call& call) {
  if (call.config.design == Design::kPlain) {
    return launch_plain(call.args, call.early, call.stream);
  }
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

// The config of a call: CUDA has one for given sizes and addresses, and args may name no other.
Status config_of(const GemmArgs& args, const SkinnyGemmDevice& device, SkinnyGemmConfig& config) {
  config = choose_config(args, alignment_of(args), device);
  if (args.config == nullptr) return nullptr;
  SkinnyGemmConfig named;
  if (const Status error = read_config(args.config, named)) return error;
  if (equal_configs(named, config)) return nullptr;
  return "skinny_gemm config: CUDA has one for these sizes and addresses; skinny_gemm_config tells "
         "it";
}

}  // namespace
}  // namespace cuda

// The sums never leave their block: no scratch.
int64_t skinny_gemm_workspace_bytes(const GemmArgs&, const Context&) { return 0; }

Status visit_skinny_gemm_configs(const GemmArgs& args, const Context&,
                                 void (*visit)(const char* config, void* state), void* state) {
  cuda::SkinnyGemmDevice device;
  cuda::SkinnyGemmConfig config;
  if (const Status error = cuda::current_skinny_gemm_device(device)) return error;
  if (const Status error = cuda::config_of(args, device, config)) return error;
  char text[kConfigTextBytes];
  write_config(config, text);
  visit(text, state);
  return nullptr;
}

Status launch_skinny_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  cuda::SkinnyGemmDevice device;
  cuda::SkinnyGemmConfig config;
  if (const Status error = cuda::current_skinny_gemm_device(device)) return error;
  if (const Status error = cuda::config_of(args, device, config)) return error;
  return cuda::launch_config({args, config, stream_of(context), device.compute_capability >= 90});
}

}  // namespace rocm_kernels
