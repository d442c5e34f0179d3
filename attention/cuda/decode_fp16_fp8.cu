#include "launch_decode.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_decode_fp16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                              const AttentionDevice& device, void* words, void* stream) {
  return launch_decode<__half, true>(args, config, device, words, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
