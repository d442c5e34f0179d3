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

// The most blocks of a cluster, each with a multiprocessor of its own, that the current device
// holds: 16 on whole H100s and H200s, fewer on parts of a device and where its multiprocessors come
// in smaller groups. sm_90 and later; `shared_bytes`: that a block of the device can ask for.
int32_t ask_most_cluster(int64_t shared_bytes);

}  // namespace cuda
}  // namespace rocm_kernels
