// Functions that both GPU families have an instruction for.
#pragma once

#include "device.h"

namespace rocm_kernels {

// 2^value and 1 / value as the hardware has them, to about one unit in the last place.
ROCM_KERNELS_DEVICE float fast_exp2(float value) {
#if defined(__AMDGCN__)
  return __builtin_amdgcn_exp2f(value);
#elif defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#else
  return value;
#endif
}

ROCM_KERNELS_DEVICE float fast_reciprocal(float value) {
#if defined(__AMDGCN__)
  return __builtin_amdgcn_rcpf(value);
#elif defined(__CUDA_ARCH__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#else
  return value;
#endif
}

// 1 / sqrt(value) to one unit in the last place. AMD's instruction takes subnormals for zero.
ROCM_KERNELS_DEVICE float reciprocal_sqrt(float value) {
#if defined(__AMDGCN__)
  const bool tiny = value < 0x1p-100f;
  const float root = __builtin_amdgcn_rsqf(tiny ? value * 0x1p100f : value);
  return tiny ? root * 0x1p50f : root;
#elif defined(__CUDA_ARCH__)
  return rsqrtf(value);
#else
  return value;
#endif
}

}  // namespace rocm_kernels
