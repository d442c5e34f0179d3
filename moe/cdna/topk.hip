// launch_topk of the ROCm backend, which has no kernel for it.
#include "../topk.h"

namespace rocm_kernels {

Status launch_topk(const TopkArgs&, const Context&) {
  return "the ROCm backend has no kernel for it; the CPU backend and reference.py have";
}

}  // namespace rocm_kernels
