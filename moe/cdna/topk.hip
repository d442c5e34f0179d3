// topk for AMD GPUs.
#include "../gpu/topk.h"

namespace rocm_kernels {

Status launch_topk(const TopkArgs& args, const Context& context) {
  return launch_topk_on_gpu(args, context);
}

}  // namespace rocm_kernels
