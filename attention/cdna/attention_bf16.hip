// Attention of bfloat16 queries, keys and values of the same.
#include "launch_tiles.h"

namespace rocm_kernels::cdna {

Status launch_attention_bf16(const AttentionArgs& args, const AttentionConfig& config,
                             const Context& context) {
  return launch_tile<bfloat16, false>(args, config, context);
}

}  // namespace rocm_kernels::cdna
