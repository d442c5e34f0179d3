// Arithmetic of whole numbers.
#pragma once

#include <cstdint>

#include "compiler.h"

namespace rocm_kernels {

// a / b rounded up, for a >= 0 and b > 0.
ROCM_KERNELS_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace rocm_kernels
