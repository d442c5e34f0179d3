#include "../../moe/fused_moe.h"

#include <string>
#include <utility>

#include "../torch_binding.h"
#include "experts.h"
#include "launch.h"
#include "settled.h"

namespace rocm_kernels {
namespace {

GatedActivation parse_gated_activation(const std::string& name) {
  if (name == "silu") return GatedActivation::kSilu;
  if (name == "gelu") return GatedActivation::kGelu;
  if (name == "gelu_tanh") return GatedActivation::kGeluTanh;
  if (name == "swigluoai") return GatedActivation::kSwigluOai;
  fail("activation must be silu, gelu, gelu_tanh or swigluoai, got ", name);
}

FusedMoeArgs describe_fused_moe(const Tensor& out, const Tensor& x, const Tensor& w_gate_up,
                                const Tensor& w_down, const Tensor& topk_weights,
                                const Tensor& topk_ids, const std::optional<Tensor>& scale_gate_up,
                                const std::optional<Tensor>& scale_down,
                                const std::optional<Tensor>& bias_gate_up,
                                const std::optional<Tensor>& bias_down,
                                const std::string& activation, double limit, bool interleaved,
                                bool quantize_input, bool ue8m0) {
  FusedMoeArgs args;
  require_matrix(x, "x");
  require_matrix(topk_ids, "topk_ids");
  args.tokens = x.size(0);
  args.hidden = x.size(1);
  args.experts = require_experts(w_gate_up, "w_gate_up");
  require(w_gate_up.size(1) % 2 == 0,
          "w_gate_up must hold gate and up, an even number of rows, got ", shape_of(w_gate_up));
  args.intermediate = w_gate_up.size(1) / 2;
  args.x_dtype = require_float(x, "x");
  args.out_dtype = require_float(out, "out");
  require(args.x_dtype != DType::kFloat32, "x must be float16 or bfloat16, got float32");
  require(args.out_dtype == args.x_dtype || args.out_dtype == DType::kFloat32,
          "out must be float32 or have the dtype of x, got ", name_of(out.scalar_type()), " and ",
          name_of(x.scalar_type()));
  require_device(out, "out", x, "x");
  require_shape(out, "out", args.tokens, args.hidden);
  require_writable(out, "out");
  require_no_overlap(out, "out", x, "x");

  const int64_t k = topk_ids.size(1);
  require(1 <= k && k <= kMaxTopk, "topk_ids must have 1 to ", kMaxTopk, " slots a token, got ",
          shape_of(topk_ids));
  require_shape(topk_ids, "topk_ids", args.tokens, k);
  require_shape(topk_weights, "topk_weights", args.tokens, k);
  require(topk_ids.scalar_type() == ScalarType::Int && topk_ids.is_contiguous(),
          "topk_ids must be int32 and contiguous, got ", name_of(topk_ids.scalar_type()));
  require(topk_weights.scalar_type() == ScalarType::Float && topk_weights.is_contiguous(),
          "topk_weights must be float32 and contiguous, got ", name_of(topk_weights.scalar_type()));
  require_device(topk_ids, "topk_ids", x, "x");
  require_device(topk_weights, "topk_weights", x, "x");
  require_spans_apart(out, topk_ids, "topk_ids");
  require_spans_apart(out, topk_weights, "topk_weights");
  args.k = static_cast<int32_t>(k);

  args.gate_up = describe_experts(w_gate_up, scale_gate_up, bias_gate_up,
                                  {"w_gate_up", "scale_gate_up", "bias_gate_up"}, args.experts,
                                  2 * args.intermediate, args.hidden, out, x, "x");
  args.down = describe_experts(w_down, scale_down, bias_down, {"w_down", "scale_down", "bias_down"},
                               args.experts, args.hidden, args.intermediate, out, x, "x");
  require(args.down.dtype == args.gate_up.dtype, "w_down must have the dtype of w_gate_up, got ",
          name_of(w_down.scalar_type()), " and ", name_of(w_gate_up.scalar_type()));
  const bool narrow = is_fp8(args.gate_up.dtype) || args.gate_up.dtype == DType::kFloat4E2M1x2;
  require(narrow || args.gate_up.dtype == args.x_dtype,
          "16-bit weights must have the dtype of x, got ", name_of(w_gate_up.scalar_type()),
          " and ", name_of(x.scalar_type()));
  args.activation = parse_gated_activation(activation);
  require(limit > 0.0, "limit must be positive, got ", limit);
  args.limit = static_cast<float>(limit);
  args.interleaved = interleaved;
  args.quantize_input = quantize_input && is_fp8(args.gate_up.dtype);
  require(!ue8m0 || args.quantize_input,
          "ue8m0 is for inputs that are quantised: FP8 weights with quantize_input, got ",
          name_of(w_gate_up.scalar_type()), quantize_input ? " with" : " without", " it");
  args.ue8m0 = ue8m0;
  args.x = x.data_ptr();
  args.x_stride = row_stride(x);
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  args.topk_weights = static_cast<const float*>(topk_weights.data_ptr());
  args.topk_ids = static_cast<const int32_t*>(topk_ids.data_ptr());
  return args;
}

void check_fused_moe_status(Status status, const FusedMoeArgs& args) {
  if (status == nullptr || args.config == nullptr) return check_status(status, "fused_moe");
  fail("fused_moe: ", status, "; got '", args.config, "' for T = ", args.tokens,
       ", H = ", args.hidden, ", I = ", args.intermediate, ", E = ", args.experts, ", k = ", args.k,
       "; fused_moe_configs tells what these operands take");
}

void launch(const Tensor& x, FusedMoeArgs args, std::string config) {
  if (args.tokens == 0 || args.hidden == 0) return;
  run_or_record(x, [args, x, config](const Context& context) mutable {
    Workspace workspace;
    args.config = config.empty() ? nullptr : config.c_str();
    args.workspace = workspace.allocate(fused_moe_workspace_bytes(args, context), x);
    check_fused_moe_status(launch_fused_moe(args, context), args);
  });
}

}  // namespace
}  // namespace rocm_kernels

using namespace rocm_kernels;

void fused_moe(Tensor& out, const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down,
               const Tensor& topk_weights, const Tensor& topk_ids,
               std::optional<Tensor> scale_gate_up, std::optional<Tensor> scale_down,
               std::optional<Tensor> bias_gate_up, std::optional<Tensor> bias_down,
               std::string activation, double limit, bool interleaved, bool quantize_input,
               bool ue8m0, std::string config) {
  const FusedMoeArgs args = describe_fused_moe(
      out, x, w_gate_up, w_down, topk_weights, topk_ids, scale_gate_up, scale_down, bias_gate_up,
      bias_down, activation, limit, interleaved, quantize_input, ue8m0);
  Order::of_thread().pass(w_gate_up.numel() + w_down.numel());
  launch(x, args, std::move(config));
}

std::string fused_moe_configs(const Tensor& out, const Tensor& x, const Tensor& w_gate_up,
                              const Tensor& w_down, const Tensor& topk_weights,
                              const Tensor& topk_ids, std::optional<Tensor> scale_gate_up,
                              std::optional<Tensor> scale_down, std::optional<Tensor> bias_gate_up,
                              std::optional<Tensor> bias_down, std::string activation, double limit,
                              bool interleaved, bool quantize_input, bool ue8m0) {
  const FusedMoeArgs args = describe_fused_moe(
      out, x, w_gate_up, w_down, topk_weights, topk_ids, scale_gate_up, scale_down, bias_gate_up,
      bias_down, activation, limit, interleaved, quantize_input, ue8m0);
  std::string lines;
  const auto add_line = [](const char* config, void* text) {
    static_cast<std::string*>(text)->append(config).append("\n");
  };
  const auto visit = [&](const Context& context) {
    return visit_fused_moe_configs(args, context, add_line, &lines);
  };
  check_fused_moe_status(with_context(x, visit), args);
  return lines;
}
