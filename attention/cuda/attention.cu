// Attention on NVIDIA GPUs: the device, the config, and the launch.
#include "../../blocks/heads/gpu/heads.h"
#include "../attention.h"
#include "../gpu/plain.h"
#include "choose.h"
#include "decode.h"
#include "gather_keys.cuh"
#include "prefill.h"

namespace rocm_kernels {
namespace cuda {
namespace {

Status ask_attention_device(int id, AttentionDevice& device) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  int bytes = 0;
  if (const Status error =
          status_of(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id))) {
    return error;
  }
  device.id = id;
  device.sm_count = facts.compute_units;
  device.compute_capability = facts.compute_capability;
  device.shared_bytes_per_block = bytes;
  if (facts.is_hopper_or_later()) device.most_cluster = ask_most_cluster(bytes);
  device.memory = memory_rates(facts);
  return nullptr;
}

Status config_of(const AttentionArgs& args, AttentionDevice& device, AttentionConfig& config) {
  if (const Status error = ask_once<ask_attention_device>(device)) return error;
  if (args.config == nullptr) {
    config = cached_choice(args, device);
    return nullptr;
  }
  if (const Status error = read_config(args.config, config)) return error;
  if (const Status error = check_config(args, config, device)) return error;
  config = within_most_gathered(args, config);
  return nullptr;
}

}  // namespace
}  // namespace cuda

int64_t attention_workspace_bytes(const AttentionArgs& args, const Context&) {
  cuda::AttentionDevice device;
  cuda::AttentionConfig config;
  return cuda::config_of(args, device, config) != nullptr ? 0 : cuda::partial_bytes(args, config);
}

bool rotates_new_tokens(const AttentionArgs& args, const Context&) {
  cuda::AttentionDevice device;
  cuda::AttentionConfig config;
  const RopeAndCacheArgs& fresh = *args.fresh;
  if (cuda::config_of(args, device, config) != nullptr ||
      config.design != cuda::AttentionConfig::Design::kDecode) {
    return false;
  }
  // The few blocks of clusters lose by it: settled keys gain more (decode_journal.md).
  return config.cluster == 1 &&
         cuda::rotates_tokens(cuda::kDecodeTiles[cuda::find_decode_tile(args, config.rows)]) &&
         fresh.rows == 1 && args.cu_seqlens_q == nullptr && args.cu_seqlens_k == nullptr &&
         !fresh.is_slot && fresh.k_out.data == nullptr && is_whole_pieces(fresh);
}

Status visit_attention_configs(const AttentionArgs& args, const Context&,
                               void (*visit)(const char* config, void* state), void* state) {
  cuda::AttentionDevice device;
  cuda::AttentionConfig first;
  if (const Status error = cuda::config_of(args, device, first)) return error;
  visit_texts(
      first, [&](const auto& tell) { cuda::for_each_config(args, device, tell); }, visit, state);
  return nullptr;
}

Status launch_attention(const AttentionArgs& args, const Context& context) {
  cuda::AttentionDevice device;
  cuda::AttentionConfig config;
  if (const Status error = cuda::config_of(args, device, config)) return error;
  if (config.design == cuda::AttentionConfig::Design::kPlain) {
    return launch_plain_attention(args, 32, device.compute_capability >= 90, context);
  }
  const bool bf16 = args.q_dtype == DType::kBFloat16;
  if (config.design == cuda::AttentionConfig::Design::kGathered) {
    const AttentionArgs gathered = cuda::gathered_args(args, args.workspace);
    const auto gather = !is_fp8(args.kv_dtype) ? cuda::launch_gather_keys<__half, false>
                        : bf16                 ? cuda::launch_gather_keys<__nv_bfloat16, true>
                                               : cuda::launch_gather_keys<__half, true>;
    if (const Status error = gather(args, gathered, context.stream)) return error;
    char* const workspace = static_cast<char*>(args.workspace) + cuda::gathered_room(args);
    const auto launch = bf16 ? cuda::launch_prefill_bf16 : cuda::launch_prefill_fp16;
    return launch(gathered, cuda::behind_gathering(config), device, workspace, context.stream);
  }
  if (config.design == cuda::AttentionConfig::Design::kPrefill) {
    const auto launch = is_fp8(args.kv_dtype)
                            ? (bf16 ? cuda::launch_prefill_bf16_fp8 : cuda::launch_prefill_fp16_fp8)
                            : (bf16 ? cuda::launch_prefill_bf16 : cuda::launch_prefill_fp16);
    return launch(args, config, device, args.workspace, context.stream);
  }
  const auto launch = is_fp8(args.kv_dtype)
                          ? (bf16 ? cuda::launch_decode_bf16_fp8 : cuda::launch_decode_fp16_fp8)
                          : (bf16 ? cuda::launch_decode_bf16 : cuda::launch_decode_fp16);
  return launch(args, config, device, args.workspace, context.stream);
}

}  // namespace rocm_kernels
