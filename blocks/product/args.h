// The arguments that every product of the package takes:
//
//   out[m, n] = sum_k(a[m, k] * w[n, k] * scale_a * scale_w) + bias[n]
//
// float32 accumulation, one rounding at the end. w is row-major [N, K], as checkpoints hold it.
// Operands: FP8 x FP8 (one dialect), 16-bit x the same 16-bit type, or 16-bit a with FP8 w.
#pragma once

#include "../../common/core/context.h"
#include "../../common/core/dtype.h"
#include "../../common/core/scale_view.h"
#include "ahead.h"

namespace rocm_kernels {

struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;

  const void* a = nullptr;  // [M, K], a_dtype
  int64_t a_stride = 0;     // elements between rows, as all strides here
  const void* w = nullptr;  // [N, K], w_dtype
  int64_t w_stride = 0;
  // No kernel that may still run writes w, or the scales of w and the bias: they may be read before
  // the previous one is done.
  bool w_is_settled = false, factors_are_settled = false;
  const WeightAhead* ahead = nullptr;  // what to ask for next; nullptr: nothing
  void* out = nullptr;                 // [M, N], out_dtype; need not be zeroed
  int64_t out_stride = 0;
  const void* bias = nullptr;  // [N], bias_dtype, contiguous; nullptr: none

  ScaleView scale_a;
  ScaleView scale_w;

  DType a_dtype = DType::kFloat8E4M3FN;
  DType w_dtype = DType::kFloat8E4M3FN;
  DType out_dtype = DType::kBFloat16;   // float32, float16 or bfloat16
  DType bias_dtype = DType::kBFloat16;  // out_dtype or float32

  // Scratch of at least <op>_workspace_bytes(args), 256-byte aligned, contents undefined.
  void* workspace = nullptr;

  // Which kernel, and how the work is cut: a text that visit_<op>_configs() gives. nullptr: the
  // backend chooses.
  const char* config = nullptr;
};

inline bool is_block_scaled(const GemmArgs& args) {
  return args.scale_a.is_blocked() || args.scale_w.is_blocked();
}

// The product of rows [begin, end) of a.
inline GemmArgs rows_of(GemmArgs args, int64_t begin, int64_t end) {
  args.m = end - begin;
  args.a = static_cast<const char*>(args.a) + begin * args.a_stride * size_of(args.a_dtype);
  args.out = static_cast<char*>(args.out) + begin * args.out_stride * size_of(args.out_dtype);
  args.scale_a.data += begin * args.scale_a.row_stride;  // 0 where there is one scale, or none
  return args;
}

}  // namespace rocm_kernels
