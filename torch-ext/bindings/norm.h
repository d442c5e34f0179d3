// The arguments that rmsnorm_fp8 and all_reduce_rmsnorm_fp8 have in common.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../../blocks/rows/norm_args.h"
#include "checks.h"
#include "quantization.h"
#include "settled.h"

namespace rocm_kernels {

inline RmsnormFp8Args describe_norm(const Tensor& out, const std::optional<Tensor>& scales,
                                    const Tensor& x, const std::optional<Tensor>& residual,
                                    const Tensor& weight, const std::optional<Tensor>& scale,
                                    double eps, int64_t group_size, double scale_ub, bool ue8m0,
                                    double weight_offset, const std::optional<Tensor>& addend) {
  RmsnormFp8Args args;
  require_matrix(x, "x");
  args.rows = x.size(0);
  args.hidden = x.size(1);
  args.x_dtype = require_float(x, "x");
  args.out_dtype = require_float_or_fp8(out, "out");
  args.weight_dtype = require_float(weight, "weight");
  require(args.weight_dtype == args.x_dtype || args.weight_dtype == DType::kFloat32,
          "weight must be float32 or have the dtype of x, got ", name_of(weight.scalar_type()),
          " and ", name_of(x.scalar_type()));
  require_device(out, "out", x, "x");
  require_device(weight, "weight", x, "x");
  require_shape(out, "out", args.rows, args.hidden);
  require_writable(out, "out");
  require_contiguous_vector(weight, "weight", args.hidden);
  require_no_overlap(out, "out", x, "x");
  require_no_overlap(out, "out", weight, "weight");
  // With an addend, the sum goes to what Python calls residual_out, and the residual is only read.
  const char* const sum_name = addend ? "residual_out" : "residual";
  require(residual || !addend, "residual_out must come with a residual, got none");
  if (residual) {
    require(residual->scalar_type() == x.scalar_type(), sum_name, " must have the dtype of x, got ",
            name_of(residual->scalar_type()), " and ", name_of(x.scalar_type()));
    require_device(*residual, sum_name, x, "x");
    require_shape(*residual, sum_name, args.rows, args.hidden);
    require_writable(*residual, sum_name);
    require_no_overlap(*residual, sum_name, x, "x");
    require_no_overlap(*residual, sum_name, out, "out");
    require_no_overlap(*residual, sum_name, weight, "weight");
    args.residual = residual->data_ptr();
    args.residual_stride = row_stride(*residual);
  }
  if (addend) {
    require(addend->scalar_type() == x.scalar_type(), "residual must have the dtype of x, got ",
            name_of(addend->scalar_type()), " and ", name_of(x.scalar_type()));
    require_device(*addend, "residual", x, "x");
    require_shape(*addend, "residual", args.rows, args.hidden);
    require_no_overlap(*residual, sum_name, *addend, "residual");
    require_no_overlap(out, "out", *addend, "residual");
    if (scales) require_no_overlap(*scales, "scales", *addend, "residual");
    args.addend = addend->data_ptr();
    args.addend_stride = row_stride(*addend);
  }
  const Quantization quantization = check_quantization(out, args.out_dtype, args.x_dtype, scale,
                                                       scales, group_size, scale_ub, ue8m0, x, "x");
  if (scales) require_no_overlap(*scales, "scales", weight, "weight");
  if (scales && residual) require_no_overlap(*scales, "scales", *residual, sum_name);
  if (scale && residual) require_no_overlap(*residual, sum_name, *scale, "scale");
  args.x = x.data_ptr();
  args.x_stride = row_stride(x);
  args.weight = weight.data_ptr();
  args.weight_is_settled = is_settled(weight);
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  args.scaling = quantization.scaling;
  args.static_scale = quantization.static_scale;
  args.scales = quantization.scales;
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.scale_ub = static_cast<float>(scale_ub);
  args.group_size = static_cast<int32_t>(group_size);
  args.ue8m0 = ue8m0;
  return args;
}

// Whether there is nothing to launch; then the scales of rows without columns are written.
inline bool is_empty(const RmsnormFp8Args& args, std::optional<Tensor>& scales) {
  if (args.hidden == 0 && scales) torch::stable::fill_(*scales, kMinScale);
  return args.rows == 0 || args.hidden == 0;
}

}  // namespace rocm_kernels
