// What a host's compiler needs of the header of this name.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#define ROCM_KERNELS_DEVICE inline

namespace rocm_kernels {

using float16 = __half;
using bfloat16 = __nv_bfloat16;

template <typename T>
float to_float(T value) {
  return static_cast<float>(value);
}
template <typename T>
T from_float(float value) {
  return static_cast<T>(value);
}

}  // namespace rocm_kernels
