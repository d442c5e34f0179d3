// Matrix product for few rows: M = 1 to 64 tokens against a weight that is read once.
//
//   out[m, n] = sum_k(a[m, k] * w[n, k] * scale_a * scale_w) + bias[n]
//
// float32 accumulation, one rounding at the end. w is row-major [N, K], as checkpoints hold it.
// Operands: FP8 x FP8 (one dialect), 16-bit x the same 16-bit type, or 16-bit a with FP8 w.
//
// Each backend defines the functions below once: skinny_gemm.hip, skinny_gemm.cu,
// skinny_gemm_cpu.cpp.
#pragma once

#include "../common/context.h"
#include "../common/dtype.h"

namespace rocm_kernels {

constexpr int64_t kSkinnyGemmMaxRows = 64;
constexpr int64_t kScaleBlock = 128;  // edge of a scale block along K, and along N for w

// A scale operand, told apart by its granularity.
struct GemmScale {
  enum class Kind : int32_t {
    kNone,    // 1
    kTensor,  // data[0]
    kRow,     // data[row * row_stride]: a row of a, or an output channel of w
    kBlock,   // a: data[m * row_stride + (k / 128) * block_stride]
              // w: data[(n / 128) * row_stride + (k / 128) * block_stride]
  };
  const float* data = nullptr;
  int64_t row_stride = 0;
  int64_t block_stride = 0;
  Kind kind = Kind::kNone;
};

struct SkinnyGemmArgs {
  int64_t m = 0, n = 0, k = 0;

  const void* a = nullptr;  // [M, K], a_dtype
  int64_t a_stride = 0;     // elements between rows, as all strides here
  const void* w = nullptr;  // [N, K], w_dtype
  int64_t w_stride = 0;
  void* out = nullptr;  // [M, N], out_dtype; need not be zeroed
  int64_t out_stride = 0;
  const void* bias = nullptr;  // [N], bias_dtype, contiguous; nullptr: none

  GemmScale scale_a;
  GemmScale scale_w;

  DType a_dtype = DType::kFloat8E4M3FN;
  DType w_dtype = DType::kFloat8E4M3FN;
  DType out_dtype = DType::kBFloat16;   // float32, float16 or bfloat16
  DType bias_dtype = DType::kBFloat16;  // out_dtype or float32

  // Scratch of at least skinny_gemm_workspace_bytes(args), 256-byte aligned, contents undefined.
  void* workspace = nullptr;

  // Which kernel, and how the work is cut: a text that visit_skinny_gemm_configs() gives. nullptr:
  // the backend chooses.
  const char* config = nullptr;
};

// M by classes: 1 to 16, 17 to 32, 33 to 64 rows. Choosing one config for a class makes the bits of
// a row the same for every M in it.
constexpr int64_t last_row_of_class(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : 64; }

// Bytes of scratch that launch_skinny_gemm needs for these sizes and types on the current device;
// pointers in args are not read. 0 when none is needed.
int64_t skinny_gemm_workspace_bytes(const SkinnyGemmArgs& args, const Context& context);

// Caller's duty: 1 <= m <= 64, n > 0, k >= 0 and dtypes as above. Any N, K, stride and element
// alignment is served; rows of w that are 16-byte aligned are quickest.
Status launch_skinny_gemm(const SkinnyGemmArgs& args, const Context& context);

// Tells visit(text, state) every config that can serve all M of args.m's class on the current
// device: first the one that launch_skinny_gemm(args) takes, then the others, each once. The CPU
// and CUDA backends have that one. Nothing that args point to is read, but the addresses' alignment
// counts.
Status visit_skinny_gemm_configs(const SkinnyGemmArgs& args, const Context& context,
                                 void (*visit)(const char* config, void* state), void* state);

}  // namespace rocm_kernels
