#include "../../skinny_gemm/skinny_gemm.h"

#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"
#include "product.h"

namespace rocm_kernels {
namespace {

GemmArgs describe_skinny_product(const Tensor& out, const Tensor& a, const Tensor& w,
                                 const std::optional<Tensor>& scale_a,
                                 const std::optional<Tensor>& scale_w,
                                 const std::optional<Tensor>& bias) {
  const GemmArgs args = describe_product(out, a, w, scale_a, scale_w, bias);
  require(args.m <= kSkinnyGemmMaxRows, "skinny_gemm takes at most ", kSkinnyGemmMaxRows,
          " rows, got ", args.m, "; fp8_linear takes any number");
  return args;
}

TuningKey tuning_key(int64_t device, const GemmArgs& args) {
  return product_tuning_key("skinny_gemm", device, last_row_of_class(args.m), args);
}

void check_config_status(Status status, const GemmArgs& args) {
  if (status == nullptr || args.config == nullptr) return check_status(status, "skinny_gemm");
  fail("skinny_gemm: ", status, "; got '", args.config, "' for M = ", args.m, ", N = ", args.n,
       ", K = ", args.k, "; tuning.candidates tells what these operands take");
}

void launch(const Tensor& a, GemmArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  const auto launch = [&](const Context& context) {
    Workspace workspace;
    args.workspace = workspace.allocate(skinny_gemm_workspace_bytes(args, context), a);
    return launch_skinny_gemm(args, context);
  };
  check_config_status(with_context(a, launch), args);
}

}  // namespace
}  // namespace rocm_kernels

using namespace rocm_kernels;

void skinny_gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
                 std::optional<Tensor> scale_w, std::optional<Tensor> bias, std::string config) {
  GemmArgs args = describe_skinny_product(out, a, w, scale_a, scale_w, bias);
  const TunedConfig tuned(tuning_key(a.get_device_index(), args));
  args.config = config.empty() ? tuned.text() : config.c_str();
  launch(a, args);
}

std::string skinny_gemm_configs(const Tensor& out, const Tensor& a, const Tensor& w,
                                std::optional<Tensor> scale_a, std::optional<Tensor> scale_w,
                                bool tuned) {
  GemmArgs args = describe_skinny_product(out, a, w, scale_a, scale_w, std::nullopt);
  const TunedConfig in_force(tuning_key(a.get_device_index(), args));
  if (tuned) args.config = in_force.text();
  std::string lines;
  const auto add_line = [](const char* config, void* text) {
    static_cast<std::string*>(text)->append(config).append("\n");
  };
  const auto visit = [&](const Context& context) {
    return visit_skinny_gemm_configs(args, context, add_line, &lines);
  };
  check_config_status(with_context(a, visit), args);
  return lines;
}

void tune_skinny_gemm(int64_t device, int64_t rows, int64_t n, int64_t k, std::string a_dtype,
                      std::string w_dtype, bool block_scales, std::string config) {
  require(1 <= rows && rows <= kSkinnyGemmMaxRows, "rows must be 1 to ", kSkinnyGemmMaxRows,
          ", got ", rows);
  GemmArgs args = describe_tuned_product(rows, n, k, a_dtype, w_dtype, block_scales);
  if (!config.empty()) {
    args.config = config.c_str();
    const auto ignore = [](const char*, void*) {};
    const auto check = [&] { return visit_skinny_gemm_configs(args, Context{}, ignore, nullptr); };
    check_config_status(on_device(device, check), args);
  }
  set_tuned_config(tuning_key(device, args), config);
}
