// Elements of the operands and of out, one at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../../common/core/fp8.h"
#include "../args.h"

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

// From a finished sum to out[m, n]: the scales of whole rows, the bias, one rounding, the store.
// (Block scales are applied in the K loop: ScaleView::block.)
__device__ __forceinline__ void finish_output(const GemmArgs& args, int64_t m, int64_t n,
                                              float sum) {
  float value = sum * args.scale_a.outer(m) * args.scale_w.outer(n);
  if (args.bias != nullptr) value += load_float(args.bias, args.bias_dtype, n);
  store_output(args, m, n, value);
}

}  // namespace cuda
}  // namespace rocm_kernels
