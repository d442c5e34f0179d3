#include "launch_prefill.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_prefill_bf16(const AttentionArgs& args, const AttentionConfig& config,
                           const AttentionDevice& device, void* workspace, void* stream) {
  return launch_prefill<__nv_bfloat16, false>(args, config, device, workspace, stream);
}

}  // namespace cuda
}  // namespace rocm_kernels
