// Attention on AMD GPUs: the plain kernel alone so far.
#include <cstring>

#include "../gpu/plain.h"

namespace rocm_kernels {

int64_t attention_workspace_bytes(const AttentionArgs&, const Context&) { return 0; }

Status launch_attention(const AttentionArgs& args, const Context& context) {
  if (args.config != nullptr && std::strcmp(args.config, "plain") != 0) {
    return "attention config: AMD's one design is 'plain'";
  }
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  return launch_plain_attention(args, facts.wave_size, false, context);
}

}  // namespace rocm_kernels
