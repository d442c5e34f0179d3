// Attention on AMD GPUs: the device, the config, and the launch.
#include "../../blocks/product/cdna/target.h"
#include "../attention.h"
#include "../gpu/plain.h"
#include "choose.h"
#include "kernels.h"

namespace rocm_kernels {
namespace cdna {
namespace {

Status config_of(const AttentionArgs& args, Target& target, AttentionConfig& config) {
  if (!current_target(target)) return kNoDevice;
  if (args.config == nullptr) {
    config = cached_choice(args, target);
    return nullptr;
  }
  if (const Status error = read_config(args.config, config)) return error;
  return check_config(args, config, target);
}

}  // namespace
}  // namespace cdna

int64_t attention_workspace_bytes(const AttentionArgs& args, const Context&) {
  cdna::Target target;
  cdna::AttentionConfig config;
  if (cdna::config_of(args, target, config) != nullptr) return 0;
  return cdna::decode_workspace_bytes(args, config);
}

bool rotates_new_tokens(const AttentionArgs&, const Context&) { return false; }

Status visit_attention_configs(const AttentionArgs& args, const Context&,
                               void (*visit)(const char* config, void* state), void* state) {
  cdna::Target target;
  cdna::AttentionConfig first;
  if (const Status error = cdna::config_of(args, target, first)) return error;
  visit_texts(
      first, [&](const auto& tell) { cdna::for_each_config(args, target, tell); }, visit, state);
  return nullptr;
}

Status launch_attention(const AttentionArgs& args, const Context& context) {
  cdna::Target target;
  cdna::AttentionConfig config;
  if (const Status error = cdna::config_of(args, target, config)) return error;
  if (config.design == cdna::AttentionConfig::Design::kPlain) {
    return launch_plain_attention(args, target.wave_size, false, context);
  }
  const bool bf16 = args.q_dtype == DType::kBFloat16;
  const auto launch =
      is_fp8(args.kv_dtype)
          ? (bf16 ? cdna::launch_attention_bf16_fp8 : cdna::launch_attention_fp16_fp8)
          : (bf16 ? cdna::launch_attention_bf16 : cdna::launch_attention_fp16);
  return launch(args, config, context);
}

}  // namespace rocm_kernels
