// Checks of a matrix product's tensors.
#include "product.h"

#include <utility>

namespace rocm_kernels {
namespace {

DType parse_dtype(const std::string& name) {
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

ScaleView parse_product_scale(const std::optional<Tensor>& scale, const char* name, int64_t rows,
                              int64_t row_block, int64_t k, const Tensor& a) {
  ScaleView result;
  if (!scale) return result;
  require_device(*scale, name, a, "a");
  require(scale->scalar_type() == ScalarType::Float, name, " must be float32, got ",
          name_of(scale->scalar_type()));
  result.data = static_cast<const float*>(scale->data_ptr());
  const int64_t dim = scale->dim();
  const int64_t size0 = dim > 0 ? scale->size(0) : 1, size1 = dim > 1 ? scale->size(1) : 1;
  const int64_t blocks0 = ceil_div(rows, row_block), blocks1 = ceil_div(k, kScaleBlock);
  if (scale->numel() == 1 && dim <= 2) {
    result.kind = ScaleView::Kind::kTensor;
  } else if (dim <= 2 && size0 == rows && size1 == 1) {
    result.kind = ScaleView::Kind::kRow;
    result.row_stride = scale->stride(0);
  } else if (dim == 2 && size0 == blocks0 && size1 == blocks1) {
    result.kind = ScaleView::Kind::kBlock;
    result.row_stride = scale->stride(0);
    result.block_stride = scale->stride(1);
  } else {
    fail(name, " must have shape [1], [", rows, ", 1] or [", blocks0, ", ", blocks1, "], got ",
         shape_of(*scale));
  }
  return result;
}

namespace {

// What all products ask of their tensors. out is [M, N / parts]; its sums are rounded to `rounded`,
// or to its own type.
GemmArgs describe_operands(const Tensor& out, const Tensor& a, const Tensor& w,
                           const std::optional<Tensor>& scale_a,
                           const std::optional<Tensor>& scale_w, const std::optional<Tensor>& bias,
                           int64_t parts = 1, std::optional<DType> rounded = std::nullopt) {
  GemmArgs args;
  require_matrix(a, "a");
  require_matrix(w, "w");
  args.m = a.size(0);
  args.k = a.size(1);
  args.n = w.size(0);
  require(w.size(1) == args.k, "w must have shape [N, K] with the K of a, got ", shape_of(w),
          " for an a of ", shape_of(a));
  args.w_is_settled = is_settled(w);
  args.factors_are_settled = (!scale_w || is_settled(*scale_w)) && (!bias || is_settled(*bias));
  args.a_dtype = require_float_or_fp8(a, "a");
  args.w_dtype = require_float_or_fp8(w, "w");
  args.out_dtype = require_float(out, "out");
  if (rounded) args.out_dtype = *rounded;
  require_device(w, "w", a, "a");
  require_device(out, "out", a, "a");
  require_shape(out, "out", args.m, args.n / parts);
  require_writable(out, "out");
  require_no_overlap(out, "out", a, "a");
  require_no_overlap(out, "out", w, "w");
  if (scale_a) {
    args.scale_a = parse_product_scale(scale_a, "scale_a", args.m, 1, args.k, a);
    require_no_overlap(out, "out", *scale_a, "scale_a");
  }
  args.scale_w = parse_product_scale(scale_w, "scale_w", args.n, kScaleBlock, args.k, a);
  if (scale_w) require_no_overlap(out, "out", *scale_w, "scale_w");
  if (bias) {
    args.bias_dtype = require_float(*bias, "bias");
    require(args.bias_dtype == args.out_dtype || args.bias_dtype == DType::kFloat32,
            "bias must be float32 or have the dtype that sums are rounded to, got ",
            name_of(bias->scalar_type()));
    require_device(*bias, "bias", a, "a");
    require_contiguous_vector(*bias, "bias", args.n);
    require_no_overlap(out, "out", *bias, "bias");
    args.bias = bias->data_ptr();
  }
  args.a = a.data_ptr();
  args.a_stride = row_stride(a);
  args.w = w.data_ptr();
  args.w_stride = row_stride(w);
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  return args;
}

}  // namespace

GemmArgs describe_product(const Tensor& out, const Tensor& a, const Tensor& w,
                          const std::optional<Tensor>& scale_a,
                          const std::optional<Tensor>& scale_w, const std::optional<Tensor>& bias) {
  const GemmArgs args = describe_operands(out, a, w, scale_a, scale_w, bias);
  require(args.a_dtype != DType::kFloat32 && args.w_dtype != DType::kFloat32,
          "a and w must be FP8, float16 or bfloat16, got ", name_of(a.scalar_type()), " and ",
          name_of(w.scalar_type()));
  const bool weight_only = !is_fp8(args.a_dtype) && is_fp8(args.w_dtype);
  require(args.a_dtype == args.w_dtype || weight_only,
          "a and w must have one dtype, or a 16 bits and w FP8, got ", name_of(a.scalar_type()),
          " and ", name_of(w.scalar_type()));
  require(is_fp8(args.w_dtype) || (!scale_a && !scale_w), "scales are for FP8 operands, but w is ",
          name_of(w.scalar_type()));
  require(!weight_only || !scale_a, "scale_a is for an FP8 a, but a is ", name_of(a.scalar_type()));
  return args;
}

JoinedGemmArgs describe_quantized(const Tensor& out, const Tensor& a, const Tensor& w,
                                  const std::optional<Tensor>& scale_w,
                                  const std::optional<Tensor>& bias) {
  JoinedGemmArgs args;
  static_cast<GemmArgs&>(args) = describe_operands(out, a, w, std::nullopt, scale_w, bias);
  require(!is_fp8(args.a_dtype) && is_fp8(args.w_dtype),
          "a must be float32, float16 or bfloat16, and w FP8, got ", name_of(a.scalar_type()),
          " and ", name_of(w.scalar_type()));
  require(args.scale_w.kind != ScaleView::Kind::kBlock, "scale_w must be of rows, got blocks'");
  return args;
}

JoinedGemmArgs describe_gated(const Tensor& out, const Tensor& a, const Tensor& w,
                              const std::optional<Tensor>& scale_a,
                              const std::optional<Tensor>& scale_w,
                              const std::optional<Tensor>& bias, DType rounded) {
  JoinedGemmArgs args;
  static_cast<GemmArgs&>(args) = describe_operands(out, a, w, scale_a, scale_w, bias, 2, rounded);
  require(is_fp8(args.a_dtype) && args.a_dtype == args.w_dtype, "a and w must be FP8, got ",
          name_of(a.scalar_type()), " and ", name_of(w.scalar_type()));
  require(out.scalar_type() == ScalarType::Float, "out must be float32, got ",
          name_of(out.scalar_type()));
  require(args.n % 2 == 0, "w must have rows of gate and as many of up, got ", args.n);
  require(!is_block_scaled(args), "scales must be of rows, got blocks'");
  return args;
}

GemmArgs describe_tuned_product(int64_t rows, int64_t n, int64_t k, const std::string& a_dtype,
                                const std::string& w_dtype, bool block_scales) {
  GemmArgs args;
  args.m = rows;
  args.n = n;
  args.k = k;
  args.a_stride = args.w_stride = k;
  args.out_stride = n;
  args.a_dtype = parse_dtype(a_dtype);
  args.w_dtype = parse_dtype(w_dtype);
  if (block_scales) args.scale_w.kind = ScaleView::Kind::kBlock;
  return args;
}

}  // namespace rocm_kernels
