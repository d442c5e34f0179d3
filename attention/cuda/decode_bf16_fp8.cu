#include "launch_decode.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_decode_bf16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                              const AttentionDevice& device, float* partial, void* stream) {
  return launch_decode<__nv_bfloat16, true>(args, config, device, partial, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
