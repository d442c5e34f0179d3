// Attention on the CPU.
#include "../attention.h"

namespace rocm_kernels {

int64_t attention_workspace_bytes(const AttentionArgs&, const Context&) { return 0; }

Status launch_attention(const AttentionArgs&, const Context&) {
  return "attention has no CPU kernel yet";
}

}  // namespace rocm_kernels
