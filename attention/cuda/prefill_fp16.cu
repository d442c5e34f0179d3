#include "launch_prefill.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_prefill_fp16(const AttentionArgs& args, const AttentionConfig& config,
                           const AttentionDevice& device, void* workspace, void* stream) {
  return launch_prefill<__half, false>(args, config, device, workspace, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
