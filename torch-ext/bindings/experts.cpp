#include "experts.h"

namespace rocm_kernels {
namespace {

DType require_weight(const Tensor& w, const char* name) {
  if (w.scalar_type() == ScalarType::Byte) return DType::kFloat4E2M1x2;
  const auto dtype = dtype_of(w);
  require(dtype && *dtype != DType::kFloat32, name,
          " must be float16, bfloat16, float8_e4m3fn, float8_e4m3fnuz or uint8 (MXFP4), got ",
          name_of(w.scalar_type()));
  return *dtype;
}

void parse_fp8_scale(const Tensor& scale, const char* name, int64_t experts, int64_t n, int64_t k,
                     ExpertWeights& result) {
  using Kind = ScaleView::Kind;
  require(scale.scalar_type() == ScalarType::Float, name, " must be float32, got ",
          name_of(scale.scalar_type()));
  const int64_t n_blocks = ceil_div(n, kScaleBlock), k_blocks = ceil_div(k, kScaleBlock);
  const auto is_shape = [&](int64_t rows, int64_t columns) {
    return scale.dim() == 3 && scale.size(0) == experts && scale.size(1) == rows &&
           scale.size(2) == columns;
  };
  result.scale.data = static_cast<const float*>(scale.data_ptr());
  if (scale.dim() == 1 && scale.size(0) == experts) {
    result.scale.kind = Kind::kTensor;
  } else if (is_shape(n, 1)) {
    result.scale.kind = Kind::kRow;
    result.scale.row_stride = scale.stride(1);
  } else if (is_shape(n_blocks, k_blocks)) {
    result.scale.kind = Kind::kBlock;
    result.scale.row_stride = scale.stride(1);
    result.scale.block_stride = scale.stride(2);
  } else {
    fail(name, " must have shape [", experts, "], [", experts, ", ", n, ", 1] or [", experts, ", ",
         n_blocks, ", ", k_blocks, "], got ", shape_of(scale));
  }
  result.scale_expert_stride = scale.stride(0);
}

void parse_mx_scale(const Tensor& scale, const char* name, int64_t experts, int64_t n, int64_t k,
                    ExpertWeights& result) {
  require(scale.scalar_type() == ScalarType::Byte, name,
          " of MXFP4 weights must be uint8 (E8M0), got ", name_of(scale.scalar_type()));
  const int64_t blocks = k / kMxScaleBlock;
  require(
      scale.dim() == 3 && scale.size(0) == experts && scale.size(1) == n && scale.size(2) == blocks,
      name, " must have shape [", experts, ", ", n, ", ", blocks, "], got ", shape_of(scale));
  require(blocks <= 1 || scale.stride(2) == 1, name, " must be contiguous in its last dimension");
  result.mx_scales = static_cast<const uint8_t*>(scale.data_ptr());
  result.mx_expert_stride = scale.stride(0);
  result.mx_row_stride = scale.stride(1);
}

}  // namespace

ExpertWeights describe_experts(const Tensor& w, const std::optional<Tensor>& scale,
                               const std::optional<Tensor>& bias, const ExpertNames& names,
                               int64_t experts, int64_t n, int64_t k, const Tensor& out,
                               const Tensor& first, const char* first_name) {
  ExpertWeights result;
  result.dtype = require_weight(w, names.w);
  const bool mx = result.dtype == DType::kFloat4E2M1x2;
  require(!mx || k % kMxScaleBlock == 0, names.w, " in MXFP4 needs a K that is a multiple of ",
          kMxScaleBlock, ", got ", k);
  const int64_t columns = mx ? k / 2 : k;
  require(w.dim() == 3 && w.size(0) == experts && w.size(1) == n && w.size(2) == columns, names.w,
          " must have shape [", experts, ", ", n, ", ", columns, "], got ", shape_of(w));
  require(columns <= 1 || w.stride(2) == 1, names.w,
          " must be contiguous in its last dimension, got a stride of ", w.stride(2),
          "; call .contiguous() first");
  require_device(w, names.w, first, first_name);
  require_spans_apart(out, w, names.w);
  result.data = w.data_ptr();
  result.expert_stride = w.stride(0);
  result.row_stride = w.stride(1);
  require(scale || !mx, names.scale, " is missing: MXFP4 weights have one");
  if (scale) {
    require(mx || is_fp8(result.dtype), names.scale, " is for FP8 and MXFP4 weights, but ", names.w,
            " is ", name_of(w.scalar_type()));
    require_device(*scale, names.scale, first, first_name);
    require_spans_apart(out, *scale, names.scale);
    (mx ? parse_mx_scale : parse_fp8_scale)(*scale, names.scale, experts, n, k, result);
  }
  if (bias) {
    result.bias_dtype = require_float(*bias, names.bias);
    require(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == n, names.bias,
            " must have shape [", experts, ", ", n, "], got ", shape_of(*bias));
    require(n <= 1 || bias->stride(1) == 1, names.bias,
            " must be contiguous in its last dimension, got a stride of ", bias->stride(1));
    require_device(*bias, names.bias, first, first_name);
    require_spans_apart(out, *bias, names.bias);
    result.bias = bias->data_ptr();
    result.bias_expert_stride = bias->stride(0);
  }
  return result;
}

}  // namespace rocm_kernels
