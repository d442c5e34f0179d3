// topk, fused_moe and grouped_gemm for NVIDIA GPUs. Their products: products.cu.
#include "../gpu/fused_moe.h"
#include "../gpu/grouped_gemm.h"
#include "../gpu/topk.h"
#include "launches.h"

namespace rocm_kernels {

using Config = cuda::moe::MoeConfig;

int64_t fused_moe_workspace_bytes(const FusedMoeArgs& args, const Context&) {
  return fused_moe_workspace_bytes<Config>(args);
}
Status launch_fused_moe(const FusedMoeArgs& args, const Context& context) {
  return launch_fused_moe<Config>(args, context);
}
Status visit_fused_moe_configs(const FusedMoeArgs& args, const Context&,
                               void (*visit)(const char* config, void* state), void* state) {
  return visit_fused_moe_configs<Config>(args, visit, state);
}

int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs& args, const Context&) {
  return grouped_gemm_workspace_bytes<Config>(args);
}
Status launch_grouped_gemm(const GroupedGemmArgs& args, const Context& context) {
  return launch_grouped_gemm<Config>(args, context);
}
Status visit_grouped_gemm_configs(const GroupedGemmArgs& args, const Context&,
                                  void (*visit)(const char* config, void* state), void* state) {
  return visit_grouped_gemm_configs<Config>(args, visit, state);
}

}  // namespace rocm_kernels
