// Matrix product of any number of rows. ../blocks/product/args.h has the maths and the arguments.
#pragma once

#include "../blocks/product/args.h"

namespace rocm_kernels {

// Tuned configs of gemm are for classes of M, each named by its last row: a power of two, beyond
// which, up to twice, a product has a similar number of tiles. The last class has no end.
constexpr int64_t kLastGemmClass = 16384;
constexpr int64_t last_row_of_gemm_class(int64_t m) {
  int64_t last = 1;
  while (last < m && last < kLastGemmClass) last *= 2;
  return last;
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
