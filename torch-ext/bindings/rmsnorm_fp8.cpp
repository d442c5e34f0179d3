#include "../../rmsnorm_fp8/rmsnorm_fp8.h"

#include "../torch_binding.h"
#include "launch.h"
#include "norm.h"

using namespace rocm_kernels;

void rmsnorm_fp8(Tensor& out, std::optional<Tensor> scales, const Tensor& x,
                 std::optional<Tensor> residual, const Tensor& weight, std::optional<Tensor> scale,
                 double eps, int64_t group_size, double scale_ub, bool ue8m0, double weight_offset,
                 std::optional<Tensor> addend) {
  const RmsnormFp8Args args = describe_norm(out, scales, x, residual, weight, scale, eps,
                                            group_size, scale_ub, ue8m0, weight_offset, addend);
  if (is_empty(args, scales)) return;
  run_or_record(x, [args](const Context& context) {
    check_status(launch_rmsnorm_fp8(args, context), "rmsnorm_fp8");
  });
}
