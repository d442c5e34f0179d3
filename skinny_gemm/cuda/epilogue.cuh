// From a sum to an output element: the scales of whole rows, the bias, one rounding, the store.
// (Block scales are applied in the K loop: ScaleView::block.)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/core/fp8.h"
#include "../skinny_gemm.h"

namespace rocm_kernels {
namespace cuda {

__device__ __forceinline__ float load_float(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::kFloat8E4M3FN:
      return fp8_to_float<false>(static_cast<const uint8_t*>(data)[index]);
    case DType::kFloat8E4M3FNUZ:
      return fp8_to_float<true>(static_cast<const uint8_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

// Rounds once and stores out[m, n].
__device__ __forceinline__ void store_output(const GemmArgs& args, int64_t m, int64_t n,
                                             float value) {
  const int64_t index = m * args.out_stride + n;
  if (args.out_dtype == DType::kFloat32) {
    static_cast<float*>(args.out)[index] = value;
  } else if (args.out_dtype == DType::kFloat16) {
    static_cast<__half*>(args.out)[index] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(args.out)[index] = __float2bfloat16_rn(value);
  }
}

// The same for out[m, n] and, if `both`, out[m, n + 1] of a 16-bit type.
__device__ __forceinline__ void store_pair(const GemmArgs& args, int64_t m, int64_t n, float low,
                                           float high, bool both) {
  uint16_t* to = static_cast<uint16_t*>(args.out) + m * args.out_stride + n;
  uint32_t bits;
  if (args.out_dtype == DType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  }
  if (both && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = bits;
  } else {
    to[0] = static_cast<uint16_t>(bits);
    if (both) to[1] = static_cast<uint16_t>(bits >> 16);
  }
}

// From a finished sum to out[m, n], with the factors as they lie in memory.
__device__ __forceinline__ void finish(const GemmArgs& args, int64_t m, int64_t n, float sum) {
  float value = sum * args.scale_a.outer(m) * args.scale_w.outer(n);
  if (args.bias != nullptr) value += load_float(args.bias, args.bias_dtype, n);
  store_output(args, m, n, value);
}

// The same factors in shared memory, for kernels that fetch them while their pipeline fills.
template <int kBlockN>
struct SharedFactors {
  float scale_a[kSkinnyGemmMaxRows], scale_w[kBlockN], bias[kBlockN];

  // By `threads` threads; a barrier must follow.
  __device__ __forceinline__ void fetch(const GemmArgs& args, int first_n, int block_n,
                                        int threads) {
    for (int row = threadIdx.x; row < block_n; row += threads) {
      const int64_t n = first_n + row;
      const bool exists = n < args.n;
      scale_w[row] = exists ? args.scale_w.outer(n) : 0.0f;
      bias[row] = exists && args.bias != nullptr ? load_float(args.bias, args.bias_dtype, n) : 0.0f;
    }
    for (int m = threadIdx.x; m < args.m; m += threads) scale_a[m] = args.scale_a.outer(m);
  }
  // `row`: counted from the block's first row of w.
  __device__ __forceinline__ float apply(float sum, int m, int row) const {
    return sum * scale_a[m] * scale_w[row] + bias[row];
  }
};

}  // namespace cuda
}  // namespace rocm_kernels
