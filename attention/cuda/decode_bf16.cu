#include "launch_decode.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_decode_bf16(const AttentionArgs& args, const AttentionConfig& config,
                          const AttentionDevice& device, void* words, void* stream) {
  return launch_decode<__nv_bfloat16, false>(args, config, device, words, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
