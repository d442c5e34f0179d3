// Activations of one float32 value, each in a handful of operations: exponentials are 2^x with one
// reciprocal.
#pragma once

#include "../../../common/gpu/math.h"

namespace rocm_kernels {

namespace detail {

constexpr float kLog2E = 1.44269504f;

// The complementary error function of z >= 0 to a relative 1.2e-7: W. H. Press et al., Numerical
// Recipes, 2nd edition, section 6.2. Relative, so that the tail of GELU is as good as its middle.
ROCM_KERNELS_DEVICE float erfc_positive(float z) {
  const float t = fast_reciprocal(1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = fmaf(p, t, -0.82215223f);
  p = fmaf(p, t, 1.48851587f);
  p = fmaf(p, t, -1.13520398f);
  p = fmaf(p, t, 0.27886807f);
  p = fmaf(p, t, -0.18628806f);
  p = fmaf(p, t, 0.09678418f);
  p = fmaf(p, t, 0.37409196f);
  p = fmaf(p, t, 1.00002368f);
  p = fmaf(p, t, -1.26551223f);
  return t * fast_exp2(kLog2E * (p - z * z));
}

}  // namespace detail

// v / (1 + exp(-t)).
ROCM_KERNELS_DEVICE float times_sigmoid(float v, float t) {
  return v * fast_reciprocal(1.0f + fast_exp2(-detail::kLog2E * t));
}

ROCM_KERNELS_DEVICE float silu(float v) { return times_sigmoid(v, v); }

ROCM_KERNELS_DEVICE float gelu(float v) {
  const float half_tail = 0.5f * detail::erfc_positive(fabsf(v) * 0.70710678f);
  return v * (v < 0.0f ? half_tail : 1.0f - half_tail);
}

// (1 + tanh(u)) / 2 is the sigmoid of 2u; 2 sqrt(2 / pi) = 1.5957691.
ROCM_KERNELS_DEVICE float gelu_tanh(float v) {
  return times_sigmoid(v, 1.5957691f * fmaf(0.044715f * v * v, v, v));
}

}  // namespace rocm_kernels
