// Residual add + RMSNorm + FP8 quantisation in one pass over memory.
//
//   h[r, c]   = x[r, c] + residual[r, c]          rounded to x's type, written back to residual
//   y[r, c]   = h[r, c] * rsqrt(mean_c(h[r, c]^2) + eps) * (weight[c] + weight_offset)   in float32
//   out[r, c] = y                                 Scaling::kNone: rounded once to x's type
//             = fp8(y / scale)                    otherwise; scale as `Scaling` says
//
// Each backend defines launch_rmsnorm_fp8 once: rmsnorm_fp8.hip, rmsnorm_fp8.cu,
// rmsnorm_fp8_cpu.cpp.
#pragma once

#include "../blocks/rows/norm_args.h"
#include "../common/core/context.h"

namespace rocm_kernels {

// Caller's duty: rows > 0, hidden > 0, dtypes and scaling consistent as above, rows do not overlap.
// Any hidden size, stride and element alignment is served; 16-byte aligned rows are quickest.
Status launch_rmsnorm_fp8(const RmsnormFp8Args& args, const Context& context);

}  // namespace rocm_kernels
