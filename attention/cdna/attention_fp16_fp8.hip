// Attention of float16 queries, FP8 keys and values.
#include "launch_tiles.h"

namespace rocm_kernels::cdna {

Status launch_attention_fp16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                                 const Context& context) {
  return launch_tile<float16, true>(args, config, context);
}

}  // namespace rocm_kernels::cdna
