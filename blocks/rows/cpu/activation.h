// The activations of common/core/dtype.h, a block of four vectors at a time; included by a kernel's
// body, and block.h with it.

#include "block.h"

// e^v for v in [-86, 89] to 1.6e-7, infinity above, at most e^-86 below; NaN gives anything, since
// every formula here multiplies by v as well. With v = n * ln(2) + r it is 2^n times a polynomial
// of r. ln(2) comes in two parts, of which the first has so few bits that n times it is exact.
ROCM_KERNELS_VECTOR Block exp(Block v) {
  v = clamp(v, 89.0f);
  const Block n = round_nearest(v * all(1.44269504f));
  Block r = fma(n, all(-0x1.62e4p-1f), v);
  r = fma(n, all(-1.42860677e-6f), r);
  Block p = all(0x1.0fa7f6p-7f);
  p = fma(p, r, all(0x1.573acep-5f));
  p = fma(p, r, all(0x1.555a6cp-3f));
  p = fma(p, r, all(0x1.fffdc4p-2f));
  p = fma(p, r, all(0x1.fffff6p-1f));
  p = fma(p, r, all(1.0f));
  return times_power_of_two(p, n);
}

template <Activation kActivation>
ROCM_KERNELS_VECTOR Block activation(Block v) {
  if constexpr (kActivation == Activation::kSilu) {
    return v / (all(1.0f) + exp(-v));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // v / 2 * (1 + tanh(u)) = v / (1 + e^(-2 u)), which does not cancel for negative v.
    const Block minus_two_u =
        v * fma(v * v, all(-2.0f * 0.797884561f * 0.044715f), all(-2.0f * 0.797884561f));
    return v / (all(1.0f) + exp(minus_two_u));
  } else if constexpr (kActivation == Activation::kGelu) {
    // 1 + erf(z) = erfc(-z), and erfc(|z|) = e^(-z^2) * P(t) with t = 1 / (1 + 0.3 |z|): P's
    // relative error is 2e-8 up to |z| = 9.5, where erfc is below the smallest normal number.
    const Block z = max_magnitude(v, all(0.0f)) * all(0.707106781f);
    const Block t = all(1.0f) / fma(z, all(0.3f), all(1.0f));
    Block p = all(-0.129434079f);
    p = fma(p, t, all(0.485096455f));
    p = fma(p, t, all(-0.511226416f));
    p = fma(p, t, all(0.546394944f));
    p = fma(p, t, all(-0.0936311558f));
    p = fma(p, t, all(0.214436233f));
    p = fma(p, t, all(0.148482442f));
    p = fma(p, t, all(0.170691937f));
    p = fma(p, t, all(0.169189617f)) * t;
    // z^2 = v / 2 * v to twice float32's digits: e^ makes relative errors of absolute ones.
    const Block half = v * all(0.5f);
    const Block square = half * v;
    const Block rest = fma(half, v, -square);
    const Block power = exp(-square);
    Block tail = p * fma(power, -rest, power);
    tail = where_negative(all(86.0f) - square, all(0.0f), tail);
    return half * where_negative(v, tail, all(2.0f) - tail);
  } else {
    return v;
  }
}
