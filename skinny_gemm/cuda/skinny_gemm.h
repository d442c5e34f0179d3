// The CUDA launcher of the kernels for few rows.
#pragma once

#include "config.h"

namespace rocm_kernels {
namespace cuda::skinny {

// On the current device, of sm_90: GemmDevice's clusters.
Status ask_clusters(int sm_count, int (&clusters)[3]);

// The sums never leave their block: no scratch.
inline int64_t workspace_bytes(const GemmArgs&, const SkinnyGemmConfig&, const GemmDevice&) {
  return 0;
}
Status launch(const GemmArgs& args, const SkinnyGemmConfig& config, const GemmDevice& device,
              void* stream);
// As launch_gemm_to_peers() says (gemm.h), for products that sends() takes (config.h).
Status launch_to_peers(const GemmArgs& args, const SkinnyGemmConfig& config, const Group& group,
                       void* stream);
// As launch_joined_gemm() says (gemm.h), by a config of choose_joined() that has stages (choose.h).
Status launch_joined(const JoinedGemmArgs& args, const SkinnyGemmConfig& config, void* stream);

}  // namespace cuda::skinny
}  // namespace rocm_kernels
