#include "../../skinny_gemm/skinny_gemm.h"

#include <utility>

#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"
#include "product.h"
#include "tuning.h"

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

// The last row of M's class, N, K, dtypes of a and w, whether scales are of blocks.
TuningKey tuning_key(int64_t device, const GemmArgs& args) {
  return {"skinny_gemm",
          device,
          {last_row_of_class(args.m), args.n, args.k, static_cast<int64_t>(args.a_dtype),
           static_cast<int64_t>(args.w_dtype), is_block_scaled(args)}};
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

DType parse_gemm_dtype(const std::string& name) {
  constexpr std::pair<ScalarType, DType> kTypes[] = {
      {ScalarType::Half, DType::kFloat16},
      {ScalarType::BFloat16, DType::kBFloat16},
      {ScalarType::Float8_e4m3fn, DType::kFloat8E4M3FN},
      {ScalarType::Float8_e4m3fnuz, DType::kFloat8E4M3FNUZ}};
  for (const auto& [type, dtype] : kTypes) {
    if (name == name_of(type)) return dtype;
  }
  fail("a dtype must be float16, bfloat16, float8_e4m3fn or float8_e4m3fnuz, got ", name);
}

}  // namespace
}  // namespace rocm_kernels

using namespace rocm_kernels;

void skinny_gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
                 std::optional<Tensor> scale_w, std::optional<Tensor> bias) {
  GemmArgs args = describe_skinny_product(out, a, w, scale_a, scale_w, bias);
  const TunedConfig tuned(tuning_key(a.get_device_index(), args));
  args.config = tuned.text();
  launch(a, args);
}

void skinny_gemm_with_config(Tensor& out, const Tensor& a, const Tensor& w,
                             std::optional<Tensor> scale_a, std::optional<Tensor> scale_w,
                             std::optional<Tensor> bias, std::string config) {
  GemmArgs args = describe_skinny_product(out, a, w, scale_a, scale_w, bias);
  args.config = config.c_str();
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
  GemmArgs args;
  args.m = rows;
  args.n = n;
  args.k = k;
  args.a_dtype = parse_gemm_dtype(a_dtype);
  args.w_dtype = parse_gemm_dtype(w_dtype);
  if (block_scales) args.scale_w.kind = ScaleView::Kind::kBlock;
  if (!config.empty()) {
    args.config = config.c_str();
    const auto ignore = [](const char*, void*) {};
    const auto check = [&] { return visit_skinny_gemm_configs(args, Context{}, ignore, nullptr); };
    check_config_status(on_device(device, check), args);
  }
  set_tuned_config(tuning_key(device, args), config);
}
