// launch_grouped_gemm of the ROCm backend, which has no kernel for it.
#include "../grouped_gemm.h"

namespace rocm_kernels {
namespace {

constexpr Status kMissing =
    "the ROCm backend has no kernel for it; the CPU backend and reference.py have";

}  // namespace

int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs&, const Context&) { return 0; }

Status launch_grouped_gemm(const GroupedGemmArgs&, const Context&) { return kMissing; }

Status visit_grouped_gemm_configs(const GroupedGemmArgs&, const Context&,
                                  void (*)(const char*, void*), void*) {
  return kMissing;
}

}  // namespace rocm_kernels
