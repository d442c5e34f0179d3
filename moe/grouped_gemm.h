// Products of rows sorted by expert, each with its expert's weight:
//
//   out[r, n] = sum_k(a[r, k] * w[e, n, k] * scale_a * scale_w)
//                                                        for offsets[e - 1] <= r < offsets[e]
//
// offsets[-1] is 0; the offsets are inclusive ends that lie on the device, as torch._grouped_mm has
// them. Rows beyond the last end stay as they are. float32 accumulation, one rounding at the end.
// Operands: FP8 x FP8 (one dialect), 16-bit x the same 16-bit type, 16-bit a with FP8 or MXFP4 w.
//
// Each backend defines the functions below once.
#pragma once

#include "../common/core/context.h"
#include "experts.h"

namespace rocm_kernels {

struct GroupedGemmArgs {
  int64_t rows = 0;  // R
  int64_t n = 0, k = 0;
  int32_t experts = 0;  // E, 1 to kMaxExperts

  const void* a = nullptr;  // [R, K], a_dtype
  int64_t a_stride = 0;     // elements between rows, as all strides here
  ExpertWeights w;          // [E, N, K], without a bias
  void* out = nullptr;      // [R, N], out_dtype
  int64_t out_stride = 0;
  // [E], contiguous, ascending. Ends outside of [0, R] count as the nearest of these, and an end
  // below its forerunner as that one, so that no value makes a kernel touch other memory.
  const int32_t* offsets = nullptr;

  ScaleView scale_a;

  DType a_dtype = DType::kFloat8E4M3FN;
  DType out_dtype = DType::kBFloat16;  // float32, float16 or bfloat16

  // Scratch of at least grouped_gemm_workspace_bytes(args), 256-byte aligned, contents undefined.
  void* workspace = nullptr;

  // As FusedMoeArgs::config, of visit_grouped_gemm_configs().
  const char* config = nullptr;
};

// As fused_moe_workspace_bytes; the same for any offsets.
int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs& args, const Context& context);

// Caller's duty: rows and n > 0, k >= 0 and dtypes as above; MXFP4: k is a multiple of 32. The host
// waits for nothing and reads no offsets.
Status launch_grouped_gemm(const GroupedGemmArgs& args, const Context& context);

// As visit_fused_moe_configs.
Status visit_grouped_gemm_configs(const GroupedGemmArgs& args, const Context& context,
                                  void (*visit)(const char* config, void* state), void* state);

}  // namespace rocm_kernels
