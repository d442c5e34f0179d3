// The end of a tile of the kernels for few rows: scales and bias from shared memory, outputs stored
// in pairs; or elsewhere, as the class says that a kernel is compiled for (StoredOutputs).
#pragma once

#include "../../blocks/product/cuda/output.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "../../gemm/gemm.h"

namespace rocm_kernels {
namespace cuda::skinny {

// Rounds two outputs once, to a 16-bit type.
__device__ __forceinline__ uint32_t round_pair(DType dtype, float low, float high) {
  if (dtype == DType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Rounds once and stores out[m, n] and, if `both`, out[m, n + 1] of a 16-bit type.
__device__ __forceinline__ void store_pair(const GemmArgs& args, int64_t m, int64_t n, float low,
                                           float high, bool both) {
  uint16_t* to = static_cast<uint16_t*>(args.out) + m * args.out_stride + n;
  const uint32_t bits = round_pair(args.out_dtype, low, high);
  if (both && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = bits;
  } else {
    to[0] = static_cast<uint16_t>(bits);
    if (both) to[1] = static_cast<uint16_t>(bits >> 16);
  }
}

// The factors of outputs (finish_output) in shared memory, for kernels that fetch them while their
// pipeline fills.
template <int kBlockN>
struct SharedFactors {
  float scale_a[kSkinnyGemmMaxRows], scale_w[kBlockN], bias[kBlockN];

  // By `threads` threads, which wait for the kernel before; a barrier must follow. The block's row
  // `row` is row_of(row) of w. `with_a`: scale_a too.
  template <class RowOf>
  __device__ __forceinline__ void fetch(const GemmArgs& args, const RowOf& row_of, int block_n,
                                        int threads, bool with_a = true) {
    if (!args.factors_are_settled) wait_for_previous_kernel();
    for (int row = threadIdx.x; row < block_n; row += threads) {
      const int64_t n = row_of(row);
      const bool exists = n < args.n;
      scale_w[row] = exists ? args.scale_w.outer(n) : 0.0f;
      bias[row] = exists && args.bias != nullptr ? load_float(args.bias, args.bias_dtype, n) : 0.0f;
    }
    if (args.factors_are_settled) wait_for_previous_kernel();
    for (int m = threadIdx.x; with_a && m < args.m; m += threads) {
      scale_a[m] = args.scale_a.outer(m);
    }
  }
  // `row`: counted from the block's first row of w.
  __device__ __forceinline__ float apply(float sum, int m, int row) const {
    return sum * scale_a[m] * scale_w[row] + bias[row];
  }
};

// What becomes of a block's outputs: stored to out. sent_outputs.cuh and gated_outputs.cuh have
// other such classes.
class StoredOutputs {
 public:
  static constexpr bool kSends = false, kGates = false;
  using Args = GemmArgs;  // of a kernel
  struct Shared {};

  __device__ __forceinline__ StoredOutputs(const Args& args, Shared&, void*, int, int)
      : args_(args) {}
  __device__ __forceinline__ void begin_next() const {}
  __device__ __forceinline__ void put(int m, int64_t n, float value) const {
    store_output(args_, m, n, value);
  }
  __device__ __forceinline__ void put_pair(int m, int64_t n, float low, float high) const {
    store_pair(args_, m, n, low, high, n + 1 < args_.n);
  }
  __device__ __forceinline__ void send() const {}

 private:
  const GemmArgs& args_;
};

}  // namespace cuda::skinny
}  // namespace rocm_kernels
