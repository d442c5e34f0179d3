// The kernels for few rows that store their outputs, for all operands.
#include "launch_tiles.cuh"
#include "skinny_gemm.h"

namespace rocm_kernels {
namespace cuda::skinny {
namespace {

Status launch_config(const Call<StoredOutputs>& call) {
  const auto with = [&](auto types) { return launch_types<decltype(types)>(call); };
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
  const auto kernel = skinny_gemm_warpgroup_kernel<64, kWarpgroups, StoredOutputs>;
  clusters[0] = sm_count;
  cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
  for (int i = 1; i < 3 && error == cudaSuccess; ++i) {
    Launch launch{dim3(1 << i), warpgroup_threads(kWarpgroups), nullptr,
                  kSharedBytes - kStaticBytes};
    launch.cluster = 1 << i;
    const LaunchConfig asked(launch);
    if (cudaOccupancyMaxActiveClusters(&clusters[i], kernel, &asked.config) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // a part of a device may hold none of that size
      clusters[i] = 0;
    }
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
