// Starts the kernel that needs no Hopper: mma.sync, for any tensor core.
#include "../../common/gpu/launch.h"
#include "instances.h"
#include "mma.cuh"

namespace rocm_kernels {
namespace cuda {
namespace {

template <DType kA, DType kW>
Status launch_types(const GemmArgs& args, const Launch& launch, bool aligned) {
  using Types = MmaTypes<kA, kW>;
  return aligned ? launch_kernel(gemm_mma_kernel<Types, true>, launch, args)
                 : launch_kernel(gemm_mma_kernel<Types, false>, launch, args);
}

}  // namespace

Status launch_mma(const GemmArgs& args, const GemmDevice& device, void* stream) {
  const int64_t blocks = ceil_div(args.m, kMmaBlockM) * ceil_div(args.n, kMmaBlockN);
  if (blocks > INT32_MAX) return "gemm: more than 2^31 tiles of 128 x 128";
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(blocks));
  launch.block = kMmaThreads;
  launch.stream = static_cast<Stream>(stream);
  launch.shared_bytes = mma_shared_bytes(args);
  launch.early = device.compute_capability >= 90;
  const bool aligned = has_aligned_rows(args);
  constexpr DType kFp8 = DType::kFloat8E4M3FN;
  if (args.a_dtype == kFp8) return launch_types<kFp8, kFp8>(args, launch, aligned);
  if (args.a_dtype == DType::kFloat16) {
    return is_fp8(args.w_dtype)
               ? launch_types<DType::kFloat16, kFp8>(args, launch, aligned)
               : launch_types<DType::kFloat16, DType::kFloat16>(args, launch, aligned);
  }
  return is_fp8(args.w_dtype)
             ? launch_types<DType::kBFloat16, kFp8>(args, launch, aligned)
             : launch_types<DType::kBFloat16, DType::kBFloat16>(args, launch, aligned);
}

}  // namespace cuda
}  // namespace rocm_kernels
