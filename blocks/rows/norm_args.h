// What a residual add, RMSNorm and FP8 quantisation of rows take; rmsnorm_fp8/rmsnorm_fp8.h has the
// maths.
#pragma once

#include "../../common/core/dtype.h"

namespace rocm_kernels {

struct RmsnormFp8Args {
  int64_t rows = 0;
  int64_t hidden = 0;

  const void* x = nullptr;   // [rows, hidden], x_dtype
  int64_t x_stride = 0;      // elements between rows, as all strides here
  void* residual = nullptr;  // [rows, hidden], x_dtype, updated in place; nullptr: no residual
  int64_t residual_stride = 0;
  const void* addend = nullptr;  // [rows, hidden], x_dtype: h is x + addend, and residual is only
                                 // written; nullptr: residual itself
  int64_t addend_stride = 0;
  const void* weight = nullptr;  // [hidden], weight_dtype, contiguous
  // No kernel that may still run writes weight: it may be read before the previous one is done.
  bool weight_is_settled = false;
  void* out = nullptr;  // [rows, hidden], out_dtype
  int64_t out_stride = 0;

  const float* static_scale = nullptr;  // [1], read by kStatic
  float* scales = nullptr;              // [rows] or [rows, ceil(hidden / group_size)], written by
                                        // kPerToken and kPerGroup, contiguous

  float eps = 1e-6f;
  float weight_offset = 0.0f;  // added to the weight in float32: 1 in Gemma's norms
  float scale_ub = 0.0f;       // upper bound of the amax that dynamic scales use; 0: none
  int32_t group_size = 0;      // columns a group, kPerGroup only
  bool ue8m0 = false;          // computed scales are powers of two, rounded up

  DType x_dtype = DType::kBFloat16;       // float32, float16 or bfloat16
  DType weight_dtype = DType::kBFloat16;  // x_dtype or float32
  DType out_dtype = DType::kBFloat16;     // x_dtype for kNone, an FP8 type otherwise
  Scaling scaling = Scaling::kNone;
};

}  // namespace rocm_kernels
