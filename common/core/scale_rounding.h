// How computed scales are rounded: to float32, or up to a power of two, which the format UE8M0
// holds in one byte.
#pragma once

#include <cstdint>
#include <cstring>

#include "compiler.h"

namespace rocm_kernels {

struct ScaleRounding {
  uint32_t cleared;  // low bits of a float32, which are rounded up: none, or the mantissa

  static constexpr ScaleRounding of(bool ue8m0) { return {ue8m0 ? 0x7FFFFFu : 0u}; }

  // Of a positive normal number far enough below the largest float: kMinScale or more, and at most
  // FLT_MAX / 240. With none to clear its bits stay as they are.
  ROCM_KERNELS_HOST_DEVICE float operator()(float scale) const {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof(bits));
    bits = (bits + cleared) & ~cleared;
    memcpy(&scale, &bits, sizeof(scale));
    return scale;
  }
};

}  // namespace rocm_kernels
