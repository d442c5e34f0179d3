// Launches of the decode kernel, a source for each pair of types.
#pragma once

#include "../attention.h"
#include "config.h"

namespace rocm_kernels {
namespace cuda {

// `words`: room for what the outer parts leave, where there are several.
Status launch_decode_fp16(const AttentionArgs& args, const AttentionConfig& config,
                          const AttentionDevice& device, void* words, void* stream);
Status launch_decode_bf16(const AttentionArgs& args, const AttentionConfig& config,
                          const AttentionDevice& device, void* words, void* stream);
Status launch_decode_fp16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                              const AttentionDevice& device, void* words, void* stream);
Status launch_decode_bf16_fp8(const AttentionArgs& args, const AttentionConfig& config,
                              const AttentionDevice& device, void* words, void* stream);

}  // namespace cuda
}  // namespace rocm_kernels
