// launch_fused_moe of the ROCm backend, which has no kernel for it.
#include "../fused_moe.h"

namespace rocm_kernels {
namespace {

constexpr Status kMissing =
    "the ROCm backend has no kernel for it; the CPU backend and reference.py have";

}  // namespace

int64_t fused_moe_workspace_bytes(const FusedMoeArgs&, const Context&) { return 0; }

Status launch_fused_moe(const FusedMoeArgs&, const Context&) { return kMissing; }

Status visit_fused_moe_configs(const FusedMoeArgs&, const Context&, void (*)(const char*, void*),
                               void*) {
  return kMissing;
}

}  // namespace rocm_kernels
