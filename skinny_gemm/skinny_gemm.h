// Matrix product for few rows: M = 1 to 64 tokens against a weight that is read once.
//
//   out[m, n] = sum_k(a[m, k] * w[n, k] * scale_a * scale_w) + bias[n]
//
// float32 accumulation, one rounding at the end. w is row-major [N, K], as checkpoints hold it.
// Operands: FP8 x FP8 (one dialect), 16-bit x the same 16-bit type, or 16-bit a with FP8 w.
//
// Each backend defines the functions below once: cdna/skinny_gemm.hip, cuda/skinny_gemm.cu,
// cpu/skinny_gemm.cpp.
#pragma once

#include "../blocks/product/args.h"

namespace rocm_kernels {

constexpr int64_t kSkinnyGemmMaxRows = 64;

// M by classes: 1 to 16, 17 to 32, 33 to 64 rows. Choosing one config for a class makes the bits of
// a row the same for every M in it.
constexpr int64_t last_row_of_class(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : 64; }

// Bytes of scratch that launch_skinny_gemm needs for these sizes and types on the current device;
// pointers in args are not read. 0 when none is needed.
int64_t skinny_gemm_workspace_bytes(const GemmArgs& args, const Context& context);

// Caller's duty: 1 <= m <= 64, n > 0, k >= 0 and dtypes as above. Any N, K, stride and element
// alignment is served; rows of w that are 16-byte aligned are quickest.
Status launch_skinny_gemm(const GemmArgs& args, const Context& context);

// Tells visit(text, state) every config that can serve all M of args.m's class on the current
// device: first the one that launch_skinny_gemm(args) takes, then the others, each once. The CPU
// and CUDA backends have that one. Nothing that args point to is read, but the addresses' alignment
// counts.
Status visit_skinny_gemm_configs(const GemmArgs& args, const Context& context,
                                 void (*visit)(const char* config, void* state), void* state);

}  // namespace rocm_kernels
