// fused_moe for AMD GPUs. Its products: grouped_gemm.hip.
#include "../gpu/fused_moe.h"

namespace rocm_kernels {

int64_t fused_moe_workspace_bytes(const FusedMoeArgs& args, const Context&) {
  return fused_moe_bytes_on_gpu(args);
}

Status launch_fused_moe(const FusedMoeArgs& args, const Context& context) {
  return launch_fused_moe_on_gpu(args, context);
}

Status visit_fused_moe_configs(const FusedMoeArgs& args, const Context&,
                               void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = check_sizes(args)) return error;
  return tell_configs(args.config, shape_of(args), visit, state);
}

}  // namespace rocm_kernels
