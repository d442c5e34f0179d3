#include "launch_decode.cuh"

namespace rocm_kernels {
namespace cuda {

Status launch_decode_bf16(const AttentionArgs& args, const AttentionConfig& config,
                          const AttentionDevice& device, void* words, void* stream) {
  return launch_decode<__nv_bfloat16, false>(args, config, device, words, stream);
}

int32_t ask_most_cluster(int64_t shared_bytes) {
  using Shape = DecodeShape<__nv_bfloat16, false, 0, false, false>;
  return most_cluster(attention_decode<Shape>, Shape::kThreads,
                      std::min<int64_t>(shared_bytes, kHalfSharedBytes));
}

}  // namespace cuda
}  // namespace rocm_kernels
