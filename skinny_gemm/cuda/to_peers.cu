// The kernels for few rows that send their outputs to the ranks of a group: FP8 operands, 16-bit
// outputs (sends(), config.h).
#include "launch_tiles.cuh"
#include "sent_outputs.cuh"
#include "skinny_gemm.h"

namespace rocm_kernels {
namespace cuda::skinny {

Status launch_to_peers(const GemmArgs& args, const SkinnyGemmConfig& config, const Group& group,
                       void* stream) {
  using Types = MmaTypes<DType::kFloat8E4M3FN, DType::kFloat8E4M3FN>;
  const SentOutputs::Args sent = {args, group};
  const SkinnyGemmConfig by = config_to_send(config);
  return launch_types<Types>(Call<SentOutputs>{sent, by, static_cast<Stream>(stream), true});
}

}  // namespace cuda::skinny
}  // namespace rocm_kernels
