// Matrix product: out[m, n] = sum_k(a[m, k] * w[n, k] * scale_a * scale_w) + bias[n], and the
// arguments that every product of the package takes.
//
// float32 accumulation, one rounding at the end. w is row-major [N, K], as checkpoints hold it.
// Operands: FP8 x FP8 (one dialect), 16-bit x the same 16-bit type, or 16-bit a with FP8 w.
#pragma once

#include "../common/core/context.h"
#include "../common/core/dtype.h"
#include "../common/core/scale_view.h"

namespace rocm_kernels {

struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;

  const void* a = nullptr;  // [M, K], a_dtype
  int64_t a_stride = 0;     // elements between rows, as all strides here
  const void* w = nullptr;  // [N, K], w_dtype
  int64_t w_stride = 0;
  void* out = nullptr;  // [M, N], out_dtype; need not be zeroed
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

// Tuned configs of gemm are for classes of M, each named by its last row: a power of two, beyond
// which, up to twice, a product has a similar number of tiles. The last class has no end.
constexpr int64_t kLastGemmClass = 16384;
constexpr int64_t last_row_of_gemm_class(int64_t m) {
  int64_t last = 1;
  while (last < m && last < kLastGemmClass) last *= 2;
  return last;
}

// The product of rows [begin, end) of a.
inline GemmArgs rows_of(GemmArgs args, int64_t begin, int64_t end) {
  args.m = end - begin;
  args.a = static_cast<const char*>(args.a) + begin * args.a_stride * size_of(args.a_dtype);
  args.out = static_cast<char*>(args.out) + begin * args.out_stride * size_of(args.out_dtype);
  args.scale_a.data += begin * args.scale_a.row_stride;  // 0 where there is one scale, or none
  return args;
}

// Bytes of scratch that launch_gemm needs for these sizes; pointers in args are not read.
int64_t gemm_workspace_bytes(const GemmArgs& args, const Context& context);

// Caller's duty: m, n, k >= 0 and dtypes as above. Any M, N, K, stride and element alignment is
// served; rows that are 16-byte aligned are quickest.
Status launch_gemm(const GemmArgs& args, const Context& context);

// nullptr where args.config can serve args on the current device, else why it cannot.
Status check_gemm_config(const GemmArgs& args, const Context& context);

// Tells visit(text, state) every config that can serve args on the current device: first the one
// that launch_gemm(args) takes, then the others that are worth timing, each once. Nothing that args
// point to is read, but the addresses' alignment counts.
Status visit_gemm_configs(const GemmArgs& args, const Context& context,
                          void (*visit)(const char* config, void* state), void* state);

// The quickest way through a linear layer by its number of rows: skinny_gemm up to `skinny_gemm`
// rows, gemm up to `gemm`, then the product of torch's own library.
constexpr int64_t kAnyRows = INT64_MAX;
struct LinearLimits {
  int64_t skinny_gemm = 0;
  int64_t gemm = kAnyRows;
};

// The limits on the current device for args.n, args.k, the operands' types (of a 16-bit a the
// library takes w unpacked) and the kinds of scales; nothing else of args is read. Each backend
// defines it once.
Status choose_linear_limits(const GemmArgs& args, LinearLimits& limits);

// Whether torch._scaled_mm takes such a product.
inline bool fits_scaled_mm(const GemmArgs& args) {
  return !is_block_scaled(args) && args.n % 16 == 0 && args.k % 16 == 0;
}

}  // namespace rocm_kernels
