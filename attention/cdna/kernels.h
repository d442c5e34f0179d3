// Host: the launchers of attention's kernels by the types of q and of k and v, each defined in a
// file of its own.
#pragma once

#include "config.h"

namespace rocm_kernels::cdna {

Status launch_attention_bf16(const AttentionArgs& args, const AttentionConfig& config,
                             const Context& context);
Status launch_attention_bf16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                                 const Context& context);
Status launch_attention_fp16(const AttentionArgs& args, const AttentionConfig& config,
                             const Context& context);
Status launch_attention_fp16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                                 const Context& context);

}  // namespace rocm_kernels::cdna
