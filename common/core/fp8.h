// FP8 e4m3 conversions in plain arithmetic, for hosts and targets without an instruction for them.
//
//   dialect  bias  largest  NaN         zero
//   E4M3FN   7     448      0x7F, 0xFF  +0 and -0
//   E4M3FNUZ 8     240      0x80        one
#pragma once

#include <cstdint>
#include <cstring>

#include "compiler.h"

namespace rocm_kernels {

template <bool kFnuz>
struct Float8E4M3 {
  uint8_t bits;
};

// Rounds to nearest even; saturates at the largest finite value (infinities too); NaN stays NaN.
template <bool kFnuz>
ROCM_KERNELS_HOST_DEVICE inline uint8_t fp8_from_float(float value) {
  constexpr uint32_t kBias = kFnuz ? 8 : 7;
  constexpr uint32_t kLargest = kFnuz ? 0x43700000u : 0x43E00000u;    // 240, 448
  constexpr uint32_t kSmallestNormal = (127 + 1 - kBias) << 23;       // 2^(1 - bias)
  constexpr uint32_t kSubnormalAlign = (127 + 23 - 2 - kBias) << 23;  // its ulp is FP8's smallest

  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7FFFFFFFu;

  if (magnitude > 0x7F800000u) return kFnuz ? 0x80u : static_cast<uint8_t>(sign | 0x7Fu);
  if (magnitude > kLargest) magnitude = kLargest;

  uint32_t code;
  if (magnitude < kSmallestNormal) {
    // Adding a number whose ulp equals the smallest FP8 step lets the float adder round.
    float aligned, align;
    memcpy(&aligned, &magnitude, sizeof(aligned));
    memcpy(&align, &kSubnormalAlign, sizeof(align));
    aligned += align;
    memcpy(&code, &aligned, sizeof(code));
    code -= kSubnormalAlign;
  } else {
    const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
    code = (rounded >> 20) - ((127 - kBias) << 3);
  }
  if (kFnuz && code == 0) return 0;
  return static_cast<uint8_t>(sign | code);
}

template <bool kFnuz>
ROCM_KERNELS_HOST_DEVICE inline float fp8_to_float(uint8_t code) {
  constexpr uint32_t kQuietNan = 0x7FC00000u;
  // Placing the code's fields in a float leaves the exponent too small by the difference of biases;
  // the product restores it and turns FP8 subnormals into normal floats.
  const uint32_t sign = (code & 0x80u) << 24;
  const bool is_nan = kFnuz ? code == 0x80u : (code & 0x7Fu) == 0x7Fu;
  const uint32_t bits = is_nan ? kQuietNan : sign | ((code & 0x7Fu) << 20);
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value * (kFnuz ? 0x1p119f : 0x1p120f);
}

}  // namespace rocm_kernels
