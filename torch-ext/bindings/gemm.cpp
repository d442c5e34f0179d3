#include "../../gemm/gemm.h"

#include "../torch_binding.h"
#include "launch.h"
#include "product.h"

using namespace rocm_kernels;

namespace {

void check_gemm_status(Status status, const GemmArgs& args) {
  if (status == nullptr || args.config == nullptr) return check_status(status, "gemm");
  fail("gemm: ", status, "; got '", args.config, "' for M = ", args.m, ", N = ", args.n,
       ", K = ", args.k, "; gemm_configs tells what these operands take");
}

void launch(const Tensor& a, GemmArgs args) {
  if (args.m == 0 || args.n == 0) return;
  const auto launch = [&](const Context& context) {
    Workspace workspace;
    args.workspace = workspace.allocate(gemm_workspace_bytes(args, context), a);
    return launch_gemm(args, context);
  };
  check_gemm_status(with_context(a, launch), args);
}

}  // namespace

void gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
          std::optional<Tensor> scale_w, std::optional<Tensor> bias) {
  launch(a, describe_product(out, a, w, scale_a, scale_w, bias));
}

void gemm_with_config(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
                      std::optional<Tensor> scale_w, std::optional<Tensor> bias,
                      std::string config) {
  GemmArgs args = describe_product(out, a, w, scale_a, scale_w, bias);
  args.config = config.c_str();
  launch(a, args);
}

std::string gemm_configs(const Tensor& out, const Tensor& a, const Tensor& w,
                         std::optional<Tensor> scale_a, std::optional<Tensor> scale_w) {
  const GemmArgs args = describe_product(out, a, w, scale_a, scale_w, std::nullopt);
  std::string lines;
  const auto add_line = [](const char* config, void* text) {
    static_cast<std::string*>(text)->append(config).append("\n");
  };
  const auto visit = [&](const Context& context) {
    return visit_gemm_configs(args, context, add_line, &lines);
  };
  check_gemm_status(with_context(a, visit), args);
  return lines;
}

std::tuple<int64_t, int64_t> linear_limits(int64_t device, int64_t n, int64_t k, std::string scales,
                                           bool weight_only) {
  using Kind = ScaleView::Kind;
  require(scales == "tensor" || scales == "row" || scales == "block",
          "scales must be tensor, row or block, got ", scales);
  GemmArgs args;
  args.n = n;
  args.k = k;
  if (weight_only) args.a_dtype = DType::kBFloat16;
  args.scale_w.kind = scales == "tensor" ? Kind::kTensor
                      : scales == "row"  ? Kind::kRow
                                         : Kind::kBlock;
  LinearLimits limits;
  check_status(on_device(device, [&] { return choose_linear_limits(args, limits); }),
               "linear_limits");
  return {limits.skinny_gemm, limits.gemm};
}
