// The scale that dynamic quantisation derives from an amax.
#pragma once

#include "../../../common/core/dtype.h"
#include "../../../common/core/scale_rounding.h"

namespace rocm_kernels {
namespace cpu {

struct DynamicScale {
  float fp8_max;
  float upper_bound;  // of the amax; 0: none
  ScaleRounding rounding;

  float operator()(float amax) const {
    constexpr float kLargestFloat = 3.40282347e+38f;
    // An infinite scale would turn the row's finite numbers into zeros and infinities into NaN.
    if (amax > kLargestFloat) amax = kLargestFloat;
    if (upper_bound > 0.0f && amax > upper_bound) amax = upper_bound;
    const float scale = amax / fp8_max;
    return rounding(scale > kMinScale ? scale : kMinScale);
  }
};

}  // namespace cpu
}  // namespace rocm_kernels
