// Grouped products for AMD GPUs: the kernels, the choice of a config, the launches.
#include "../gpu/grouped_gemm.h"
#include "../gpu/plain.h"
#include "../gpu/route_kernels.h"

namespace rocm_kernels {

Status choose_config(const MoeShape&, MoeConfig& config) {
  config = {};
  return nullptr;
}

Status check_config(const MoeShape&, const MoeConfig& config) {
  if (!(config == MoeConfig{})) return "moe config: only the plain design";
  return nullptr;
}

Status visit_configs(const MoeShape&, void (*visit)(const MoeConfig& config, void* state),
                     void* state) {
  visit(MoeConfig{}, state);
  return nullptr;
}

Status launch_product(GroupedEnd end, const GroupedProblem& p, const MoeConfig&, int64_t most_tiles,
                      const DeviceFacts& facts, Stream stream) {
  return launch_plain_grouped(end, p, most_tiles, facts, stream);
}

Status launch_routing(const RoutingProblem& p, const DeviceFacts& facts, Stream stream) {
  return launch_routing_kernels(p, facts, stream);
}

int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs& args, const Context&) {
  return grouped_gemm_bytes_on_gpu(args);
}

Status launch_grouped_gemm(const GroupedGemmArgs& args, const Context& context) {
  return launch_grouped_gemm_on_gpu(args, context);
}

Status visit_grouped_gemm_configs(const GroupedGemmArgs& args, const Context&,
                                  void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = check_sizes(args)) return error;
  return tell_configs(args.config, shape_of(args), visit, state);
}

}  // namespace rocm_kernels
