// Gated activation + FP8 quantisation in one pass; without a gate, plain quantisation.
//
//   y[r, c]   = act(gate[r, c]) * up[r, c]        in float32; act is SiLU, GELU (erf or tanh form)
//             = act(gate[r, c])                   when up is nullptr (kIdentity: quantise gate)
//   out[r, c] = y                                 Scaling::kNone: rounded once to gate's type
//             = fp8(y / scale)                    otherwise; scale as `Scaling` says
//
//   silu(v) = v / (1 + exp(-v));  gelu(v) = v / 2 * (1 + erf(v / sqrt(2)))
//   gelu_tanh(v) = v / 2 * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 v^3)))
//
// Each backend defines launch_swiglu_fp8 once: swiglu_fp8.hip, swiglu_fp8.cu, swiglu_fp8_cpu.cpp.
#pragma once

#include "../common/core/context.h"
#include "../common/core/dtype.h"

namespace rocm_kernels {

struct SwigluFp8Args {
  int64_t rows = 0;
  int64_t columns = 0;  // of the output: gate and up have as many each

  const void* gate = nullptr;  // [rows, columns], in_dtype
  int64_t gate_stride = 0;     // elements between rows, as all strides here
  const void* up = nullptr;    // [rows, columns], in_dtype; gate + columns when both share one row
  int64_t up_stride = 0;
  void* out = nullptr;  // [rows, columns], out_dtype
  int64_t out_stride = 0;

  const float* static_scale = nullptr;  // [1], read by kStatic
  float* scales = nullptr;              // [rows] or [rows, ceil(columns / group_size)], written by
                                        // kPerToken and kPerGroup, contiguous

  float scale_ub = 0.0f;   // upper bound of the amax that dynamic scales use; 0: none
  int32_t group_size = 0;  // columns a group, kPerGroup only
  bool ue8m0 = false;      // computed scales are powers of two, rounded up

  DType in_dtype = DType::kBFloat16;   // float32, float16 or bfloat16
  DType out_dtype = DType::kBFloat16;  // in_dtype for kNone, an FP8 type otherwise
  Scaling scaling = Scaling::kNone;
  Activation activation = Activation::kSilu;
};

// Caller's duty: rows > 0, columns > 0, dtypes and scaling consistent as above, rows do not
// overlap. Any column count, stride and element alignment is served; 16-byte aligned rows are
// quickest.
Status launch_swiglu_fp8(const SwigluFp8Args& args, const Context& context);

}  // namespace rocm_kernels
