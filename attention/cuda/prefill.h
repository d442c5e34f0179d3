// Launches of the prefill kernel, a source for each pair of types.
#pragma once

#include "../attention.h"
#include "config.h"

namespace rocm_kernels {
namespace cuda {

// `workspace`: partial_bytes() of room.
Status launch_prefill_fp16(const AttentionArgs& args, const AttentionConfig& config,
                           const AttentionDevice& device, void* workspace, void* stream);
Status launch_prefill_fp16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                               const AttentionDevice& device, void* workspace, void* stream);
Status launch_prefill_bf16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                               const AttentionDevice& device, void* workspace, void* stream);
Status launch_prefill_bf16(const AttentionArgs& args, const AttentionConfig& config,
                           const AttentionDevice& device, void* workspace, void* stream);

}  // namespace cuda
}  // namespace rocm_kernels
