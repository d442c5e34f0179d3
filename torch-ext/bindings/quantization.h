// The quantisation arguments that rmsnorm_fp8 and swiglu_fp8 have in common.
#pragma once

#include "../../common/core/dtype.h"
#include "checks.h"

namespace rocm_kernels {

constexpr int64_t kGroupSize = 128;

struct Quantization {
  Scaling scaling = Scaling::kNone;
  const float* static_scale = nullptr;
  float* scales = nullptr;
};

inline Quantization check_quantization(const Tensor& out, DType out_dtype, DType in_dtype,
                                       const std::optional<Tensor>& scale,
                                       const std::optional<Tensor>& scales, int64_t group_size,
                                       double scale_ub, bool ue8m0, const Tensor& first,
                                       const char* first_name) {
  const int64_t rows = out.size(0), columns = out.size(1);
  Quantization result;
  require(scale_ub >= 0.0, "scale_ub must not be negative, got ", scale_ub);
  require(!ue8m0 || scales, "ue8m0 is for computed scales, got none to write");
  if (!is_fp8(out_dtype)) {
    require(out_dtype == in_dtype, "out must be FP8 or have the dtype of ", first_name, ", got ",
            name_of(out.scalar_type()), " and ", name_of(first.scalar_type()));
    require(!scale && !scales, "scales are for FP8 outputs, but out is ",
            name_of(out.scalar_type()));
    return result;
  }
  require(scale.has_value() != scales.has_value(),
          "an FP8 output takes either scale (given) or scales (computed), got ",
          scale ? "both" : "neither");
  require(group_size == 0 || group_size == kGroupSize, "group_size must be 0 or ", kGroupSize,
          ", got ", group_size);
  if (scale) {
    require(group_size == 0, "scale is one value for the tensor; group_size must be 0, got ",
            group_size);
    require_device(*scale, "scale", first, first_name);
    require_no_overlap(out, "out", *scale, "scale");
    result.static_scale = require_static_scale(*scale);
    result.scaling = Scaling::kStatic;
    return result;
  }
  require_device(*scales, "scales", first, first_name);
  require(scales->scalar_type() == ScalarType::Float, "scales must be float32, got ",
          name_of(scales->scalar_type()));
  require_shape(*scales, "scales", rows, group_size ? ceil_div(columns, group_size) : 1);
  require(scales->is_contiguous(), "scales must be contiguous");
  require_no_overlap(*scales, "scales", out, "out");
  require_no_overlap(*scales, "scales", first, first_name);
  result.scales = static_cast<float*>(scales->data_ptr());
  result.scaling = group_size ? Scaling::kPerGroup : Scaling::kPerToken;
  return result;
}

}  // namespace rocm_kernels
