#include "../../moe/grouped_gemm.h"

#include <string>
#include <utility>

#include "../torch_binding.h"
#include "experts.h"
#include "launch.h"
#include "product.h"

namespace rocm_kernels {
namespace {

GroupedGemmArgs describe_grouped_gemm(const Tensor& out, const Tensor& a, const Tensor& w,
                                      const Tensor& offsets, const std::optional<Tensor>& scale_a,
                                      const std::optional<Tensor>& scale_w) {
  GroupedGemmArgs args;
  require_matrix(a, "a");
  args.rows = a.size(0);
  args.k = a.size(1);
  args.experts = require_experts(w, "w");
  args.n = w.size(1);
  args.a_dtype = require_float_or_fp8(a, "a");
  args.out_dtype = require_float(out, "out");
  require(args.a_dtype != DType::kFloat32, "a must be FP8, float16 or bfloat16, got float32");
  require_device(out, "out", a, "a");
  require_shape(out, "out", args.rows, args.n);
  require_writable(out, "out");
  require_no_overlap(out, "out", a, "a");
  require_contiguous_vector(offsets, "offsets", args.experts);
  require(offsets.scalar_type() == ScalarType::Int, "offsets must be int32, got ",
          name_of(offsets.scalar_type()));
  require_device(offsets, "offsets", a, "a");
  require_spans_apart(out, offsets, "offsets");
  args.w = describe_experts(w, scale_w, std::nullopt, {"w", "scale_w", ""}, args.experts, args.n,
                            args.k, out, a, "a");
  const bool wide_a = !is_fp8(args.a_dtype);
  const bool narrow_w = is_fp8(args.w.dtype) || args.w.dtype == DType::kFloat4E2M1x2;
  require(args.a_dtype == args.w.dtype || (wide_a && narrow_w),
          "a and w must have one dtype, or a 16 bits and w FP8 or MXFP4, got ",
          name_of(a.scalar_type()), " and ", name_of(w.scalar_type()));
  require(!wide_a || !scale_a, "scale_a is for an FP8 a, but a is ", name_of(a.scalar_type()));
  args.scale_a = parse_product_scale(scale_a, "scale_a", args.rows, 1, args.k, a);
  if (scale_a) require_spans_apart(out, *scale_a, "scale_a");
  args.a = a.data_ptr();
  args.a_stride = row_stride(a);
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  args.offsets = static_cast<const int32_t*>(offsets.data_ptr());
  return args;
}

void check_grouped_gemm_status(Status status, const GroupedGemmArgs& args) {
  if (status == nullptr || args.config == nullptr) return check_status(status, "grouped_gemm");
  fail("grouped_gemm: ", status, "; got '", args.config, "' for R = ", args.rows, ", N = ", args.n,
       ", K = ", args.k, ", E = ", args.experts,
       "; grouped_gemm_configs tells what these operands take");
}

void launch(const Tensor& a, GroupedGemmArgs args, std::string config) {
  if (args.rows == 0 || args.n == 0) return;
  run_or_record(a, [args, a, config](const Context& context) mutable {
    Workspace workspace;
    args.config = config.empty() ? nullptr : config.c_str();
    args.workspace = workspace.allocate(grouped_gemm_workspace_bytes(args, context), a);
    check_grouped_gemm_status(launch_grouped_gemm(args, context), args);
  });
}

}  // namespace
}  // namespace rocm_kernels

using namespace rocm_kernels;

void grouped_gemm(Tensor& out, const Tensor& a, const Tensor& w, const Tensor& offsets,
                  std::optional<Tensor> scale_a, std::optional<Tensor> scale_w,
                  std::string config) {
  const GroupedGemmArgs args = describe_grouped_gemm(out, a, w, offsets, scale_a, scale_w);
  Order::of_thread().pass(w.numel());
  launch(a, args, std::move(config));
}

std::string grouped_gemm_configs(const Tensor& out, const Tensor& a, const Tensor& w,
                                 const Tensor& offsets, std::optional<Tensor> scale_a,
                                 std::optional<Tensor> scale_w) {
  const GroupedGemmArgs args = describe_grouped_gemm(out, a, w, offsets, scale_a, scale_w);
  std::string lines;
  const auto add_line = [](const char* config, void* text) {
    static_cast<std::string*>(text)->append(config).append("\n");
  };
  const auto visit = [&](const Context& context) {
    return visit_grouped_gemm_configs(args, context, add_line, &lines);
  };
  check_grouped_gemm_status(with_context(a, visit), args);
  return lines;
}
