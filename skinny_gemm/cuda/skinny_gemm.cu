// CUDA launcher of skinny_gemm: picks a kernel, describes the operands to it, starts it.
//
//   warpgroup.cuh  sm_90a, FP8 x FP8, more than 16 tokens: the ring into wgmma
//   ring.cuh       sm_90 and later: copy engine and shared-memory ring
//   stream.cuh     sm_80 and later: weights straight to registers
//   plain.cuh      any alignment and dialect
#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "config.h"
#include "plain.cuh"
#include "ring.cuh"
#include "stream.cuh"
#include "warpgroup.cuh"

namespace rocm_kernels {
namespace cuda {
namespace {

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

// A launch that may start while its predecessor drains (see await_predecessor), in clusters.
struct Launch {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};

  Launch(dim3 grid, int threads, int64_t shared_bytes, void* stream, bool early, int cluster = 1) {
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (early) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
  }
};

Status status_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, asked for at run time so that nothing links against libcuda.
EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &result) != cudaSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(function);
}

// A matrix of bytes seen through boxes of box_rows x box_chunks * 128, which lie in shared memory
// as [rows][chunks] or as [chunks][rows]; rows and chunks outside read as zero.
enum class BoxOrder { kRowsOfChunks, kChunksOfRows };

bool describe_matrix(CUtensorMap* map, const void* data, int64_t rows, int64_t row_bytes,
                     int64_t stride_bytes, int box_rows, int box_chunks, BoxOrder order) {
  static const EncodeTiled encode = find_encoder();
  if (encode == nullptr) return false;
  cuuint64_t sizes[3] = {kChunkBytes, static_cast<cuuint64_t>(row_bytes / kChunkBytes),
                         static_cast<cuuint64_t>(rows)};
  cuuint64_t strides[2] = {kChunkBytes,
                           static_cast<cuuint64_t>(rows == 1 ? row_bytes : stride_bytes)};
  cuuint32_t box[3] = {kChunkBytes, static_cast<cuuint32_t>(box_chunks),
                       static_cast<cuuint32_t>(box_rows)};
  if (order == BoxOrder::kChunksOfRows) {
    std::swap(sizes[1], sizes[2]);
    std::swap(strides[0], strides[1]);
    std::swap(box[1], box[2]);
  }
  const cuuint32_t steps[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), sizes, strides, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

constexpr Status kNotDescribed =
    "skinny_gemm: the driver could not describe the operands to the copy engine";

template <class Types, int kTokenTiles, bool kBlockScales>
Status launch_ring(const GemmArgs& args, const RingShape& ring, bool early, void* stream) {
  const int tokens = kTokenTiles * kTileTokens * ring.token_groups;
  CUtensorMap w_map, a_map;
  if (!describe_matrix(&w_map, args.w, args.n, args.k * Types::kWBytes,
                       args.w_stride * Types::kWBytes, ring.rows, ring.chunks,
                       BoxOrder::kRowsOfChunks) ||
      !describe_matrix(&a_map, args.a, args.m, args.k * Types::kABytes,
                       args.a_stride * Types::kABytes, tokens, ring.chunks * Types::kAVectors,
                       BoxOrder::kRowsOfChunks)) {
    return kNotDescribed;
  }
  const int64_t shared_bytes = ring_shared_bytes(ring, tokens, Types::kAVectors);
  const auto kernel = skinny_gemm_ring_kernel<Types, kTokenTiles, kBlockScales>;
  if (const Status status = status_of(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)))) {
    return status;
  }
  Launch launch(dim3(static_cast<unsigned>((args.n + ring.rows - 1) / ring.rows)),
                (ring_consumers(ring) + kProducers) * 32, shared_bytes, stream, early);
  return status_of(cudaLaunchKernelEx(&launch.config, kernel, w_map, a_map, args, ring));
}

template <int kTokens, int kGroups>
Status launch_warpgroup_kernel(const GemmArgs& args, const WarpgroupShape& shape, void* stream) {
  CUtensorMap w_map, a_map;
  if (!describe_matrix(&w_map, args.w, args.n, args.k, args.w_stride, warpgroup_box_rows(shape),
                       shape.chunks, BoxOrder::kChunksOfRows) ||
      !describe_matrix(&a_map, args.a, args.m, args.k, args.a_stride, warpgroup_tokens(args.m),
                       shape.chunks, BoxOrder::kChunksOfRows)) {
    return kNotDescribed;
  }
  const int64_t shared_bytes = warpgroup_shared_bytes(shape, args.m);
  const auto kernel = skinny_gemm_warpgroup_kernel<kTokens, kGroups>;
  if (const Status status = status_of(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)))) {
    return status;
  }
  const int64_t clusters = (args.n + shape.rows - 1) / shape.rows;
  Launch launch(dim3(static_cast<unsigned>(clusters * shape.cluster)),
                (kGroups * 4 + kProducers) * 32, shared_bytes, stream, true, shape.cluster);
  return status_of(cudaLaunchKernelEx(&launch.config, kernel, w_map, a_map, args, shape));
}

template <int kGroups>
Status launch_warpgroup_tokens(const GemmArgs& args, const WarpgroupShape& shape, void* stream) {
  if (args.m <= 32) return launch_warpgroup_kernel<32, kGroups>(args, shape, stream);
  if (args.m <= 48) return launch_warpgroup_kernel<48, kGroups>(args, shape, stream);
  return launch_warpgroup_kernel<64, kGroups>(args, shape, stream);
}

Status launch_warpgroup(const GemmArgs& args, const WarpgroupShape& shape, void* stream) {
  return shape.groups == kMaxWarpgroups
             ? launch_warpgroup_tokens<kMaxWarpgroups>(args, shape, stream)
             : launch_warpgroup_tokens<2>(args, shape, stream);
}

template <class Types, int kTokenTiles, bool kBlockScales>
Status launch_stream(const GemmArgs& args, const GemmConfig& config, bool early, void* stream) {
  constexpr int kDepth = kTokenTiles <= 2 ? 6 : 4;
  constexpr int kTokens = kTokenTiles * kTileTokens;
  const int rows = config.stream_row_tiles * 16;
  const auto kernel =
      config.stream_row_tiles == 1
          ? skinny_gemm_stream_kernel<Types, kTokenTiles, 1, kDepth, kBlockScales>
          : skinny_gemm_stream_kernel<Types, kTokenTiles, 2, kDepth / 2, kBlockScales>;
  const dim3 grid(static_cast<unsigned>((args.n + rows - 1) / rows),
                  static_cast<unsigned>((args.m + kTokens - 1) / kTokens));
  Launch launch(grid, kStreamWarps * 32, 0, stream, early);
  return status_of(cudaLaunchKernelEx(&launch.config, kernel, args));
}

Status launch_plain(const GemmArgs& args, bool early, void* stream) {
  const dim3 grid(static_cast<unsigned>((args.n + kPlainWarps - 1) / kPlainWarps),
                  static_cast<unsigned>((args.m + kTileTokens - 1) / kTileTokens));
  Launch launch(grid, kPlainWarps * 32, 0, stream, early);
  return status_of(cudaLaunchKernelEx(&launch.config, skinny_gemm_plain_kernel, args));
}

template <class Types, bool kBlockScales>
Status launch_typed(const GemmArgs& args, const GemmConfig& config, bool early, void* stream) {
  if (config.kernel == GemmConfig::Kernel::kRing) {
    if constexpr (!kBlockScales || is_fp8(Types::kW)) {
      switch (config.token_tiles) {
        case 1:
          return launch_ring<Types, 1, kBlockScales>(args, config.ring, early, stream);
        case 2:
          return launch_ring<Types, 2, kBlockScales>(args, config.ring, early, stream);
        default:
          return launch_ring<Types, 4, kBlockScales>(args, config.ring, early, stream);
      }
    }
  }
  switch (config.token_tiles) {
    case 1:
      return launch_stream<Types, 1, kBlockScales>(args, config, early, stream);
    case 2:
      return launch_stream<Types, 2, kBlockScales>(args, config, early, stream);
    default:
      return launch_stream<Types, 4, kBlockScales>(args, config, early, stream);
  }
}

Status launch_config(const GemmArgs& args, const GemmConfig& config, bool early, void* stream) {
  if (config.kernel == GemmConfig::Kernel::kPlain) return launch_plain(args, early, stream);
  if (config.kernel == GemmConfig::Kernel::kWarpgroup) {
    return launch_warpgroup(args, config.warpgroup, stream);
  }
  const bool block_scales =
      args.scale_a.kind == ScaleView::Kind::kBlock || args.scale_w.kind == ScaleView::Kind::kBlock;
  const auto dispatch = [&](auto types) {
    using Types = decltype(types);
    return block_scales ? launch_typed<Types, true>(args, config, early, stream)
                        : launch_typed<Types, false>(args, config, early, stream);
  };
  if (args.a_dtype == DType::kFloat8E4M3FN) {
    return dispatch(Operands<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN>());
  }
  if (args.a_dtype == DType::kFloat16) {
    return is_fp8(args.w_dtype) ? dispatch(Operands<DType::kFloat16, DType::kFloat8E4M3FN>())
                                : dispatch(Operands<DType::kFloat16, DType::kFloat16>());
  }
  return is_fp8(args.w_dtype) ? dispatch(Operands<DType::kBFloat16, DType::kFloat8E4M3FN>())
                              : dispatch(Operands<DType::kBFloat16, DType::kBFloat16>());
}

cudaError_t ask_device_facts(int device, DeviceFacts& facts) {
  int major = 0, minor = 0, shared_bytes = 0;
  cudaError_t error = cudaSuccess;
  const auto ask = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  ask(&facts.sm_count, cudaDevAttrMultiProcessorCount);
  ask(&major, cudaDevAttrComputeCapabilityMajor);
  ask(&minor, cudaDevAttrComputeCapabilityMinor);
  ask(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts.compute_capability = major * 10 + minor;
  facts.shared_bytes_per_block = shared_bytes;
  if (error != cudaSuccess || facts.compute_capability != 90) return error;
  // Larger clusters do not fill the device: its SMs come in groups of 16 and 18.
  constexpr int kGroups = 2;
  const auto kernel = skinny_gemm_warpgroup_kernel<64, kGroups>;
  const int bytes = shared_bytes - kStaticBytes;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  facts.clusters[0] = facts.sm_count;
  for (int i = 1; i < 3 && error == cudaSuccess; ++i) {
    const Launch launch(dim3(1 << i), (kGroups * 4 + kProducers) * 32, bytes, nullptr, false,
                        1 << i);
    error = cudaOccupancyMaxActiveClusters(&facts.clusters[i], kernel, &launch.config);
  }
  return error;
}

// Facts of the current device, asked for once.
Status ask_device(DeviceFacts& facts) {
  constexpr int kDevices = 64;
  static DeviceFacts known[kDevices];
  static std::atomic<bool> asked[kDevices];
  static std::mutex asking;
  int device = 0;
  if (const Status status = status_of(cudaGetDevice(&device))) return status;
  if (device >= kDevices) return status_of(ask_device_facts(device, facts));
  if (!asked[device].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(asking);
    if (const Status status = status_of(ask_device_facts(device, known[device]))) return status;
    asked[device].store(true, std::memory_order_release);
  }
  facts = known[device];
  return nullptr;
}

}  // namespace
}  // namespace cuda

// The sums never leave their block: no scratch.
int64_t skinny_gemm_workspace_bytes(const GemmArgs&, const Context&) { return 0; }

Status visit_skinny_gemm_configs(const GemmArgs& args, const Context&,
                                 void (*visit)(const char* config, void* state), void* state) {
  cuda::DeviceFacts facts;
  if (const Status status = cuda::ask_device(facts)) return status;
  char only[96];
  cuda::describe(cuda::choose_gemm_config(args, cuda::alignment_of(args), facts), only,
                 sizeof only);
  if (args.config != nullptr && std::strcmp(args.config, only) != 0) {
    return "skinny_gemm config: CUDA has one for these sizes and addresses; skinny_gemm_config "
           "tells it";
  }
  visit(only, state);
  return nullptr;
}

Status launch_skinny_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  if (args.config != nullptr) {
    const auto ignore = [](const char*, void*) {};
    if (const Status status = visit_skinny_gemm_configs(args, context, ignore, nullptr)) {
      return status;
    }
  }
  cuda::DeviceFacts facts;
  if (const Status status = cuda::ask_device(facts)) return status;
  return cuda::launch_config(args, cuda::choose_gemm_config(args, cuda::alignment_of(args), facts),
                             facts.compute_capability >= 90, context.stream);
}

// On an H200 torch._scaled_mm is not quicker up to 64 rows, over the layers of a model
// (docs/h200.md); without sm_90's warpgroup instructions it was from 33 rows on.
Status choose_linear_limits(const GemmArgs& args, LinearLimits& limits) {
  cuda::DeviceFacts facts;
  if (const Status status = cuda::ask_device(facts)) return status;
  const bool warpgroups = facts.compute_capability / 10 == 9;
  limits.skinny_gemm = kSkinnyGemmMaxRows;
  if (fits_scaled_mm(args)) limits.skinny_gemm = limits.gemm = warpgroups ? 64 : 32;
  return nullptr;
}

}  // namespace rocm_kernels
