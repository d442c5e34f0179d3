#include "../../swiglu_fp8/swiglu_fp8.h"

#include "../torch_binding.h"
#include "activation.h"
#include "checks.h"
#include "launch.h"
#include "quantization.h"

using namespace rocm_kernels;

void swiglu_fp8(Tensor& out, std::optional<Tensor> scales, const Tensor& gate,
                std::optional<Tensor> up, std::optional<Tensor> scale, std::string activation,
                int64_t group_size, double scale_ub, bool ue8m0) {
  SwigluFp8Args args;
  const char* const gate_name = up ? "gate" : "x";  // quantize_fp8 has an x
  require_matrix(gate, gate_name);
  args.rows = gate.size(0);
  args.columns = gate.size(1);
  args.in_dtype = require_float(gate, gate_name);
  args.out_dtype = require_float_or_fp8(out, "out");
  args.activation = parse_activation(activation);
  require_device(out, "out", gate, "gate");
  require_shape(out, "out", args.rows, args.columns);
  require_writable(out, "out");
  require_no_overlap(out, "out", gate, "gate");
  if (up) {
    require(up->scalar_type() == gate.scalar_type(), "up must have the dtype of gate, got ",
            name_of(up->scalar_type()), " and ", name_of(gate.scalar_type()));
    require_device(*up, "up", gate, "gate");
    require_shape(*up, "up", args.rows, args.columns);
    require_no_overlap(out, "out", *up, "up");
    args.up = up->data_ptr();
    args.up_stride = row_stride(*up);
  }
  const Quantization quantization = check_quantization(
      out, args.out_dtype, args.in_dtype, scale, scales, group_size, scale_ub, ue8m0, gate, "gate");
  if (scales && up) require_no_overlap(*scales, "scales", *up, "up");
  if (args.columns == 0 && scales) torch::stable::fill_(*scales, kMinScale);
  if (args.rows == 0 || args.columns == 0) return;

  args.gate = gate.data_ptr();
  args.gate_stride = row_stride(gate);
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  args.scaling = quantization.scaling;
  args.static_scale = quantization.static_scale;
  args.scales = quantization.scales;
  args.scale_ub = static_cast<float>(scale_ub);
  args.group_size = static_cast<int32_t>(group_size);
  args.ue8m0 = ue8m0;
  run_or_record(gate, [args](const Context& context) {
    check_status(launch_swiglu_fp8(args, context), "swiglu_fp8");
  });
}
