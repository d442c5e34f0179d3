// float16 and bfloat16: storage types, and conversions in plain arithmetic for hosts without an
// instruction for them. Rounds to nearest even; NaN stays NaN, quiet.
#pragma once

#include <cstdint>
#include <cstring>

namespace rocm_kernels {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

inline BFloat16 to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

inline float to_float(Float16 value) {
  // The fields of a float16 placed in a float leave the exponent 112 too small; the product
  // restores it and turns subnormals into normal floats.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  uint32_t bits = static_cast<uint32_t>(value.bits & 0x7FFFu) << 13;
  float magnitude;
  memcpy(&magnitude, &bits, sizeof(magnitude));
  magnitude *= 0x1p112f;
  memcpy(&bits, &magnitude, sizeof(bits));
  if ((value.bits & 0x7C00u) == 0x7C00u) bits |= 0x7F800000u;  // infinity, NaN
  if (bits > 0x7F800000u) bits |= 0x00400000u;
  bits |= sign;
  memcpy(&magnitude, &bits, sizeof(magnitude));
  return magnitude;
}

inline Float16 to_float16(float value) {
  constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
  constexpr uint32_t kOverflow = 0x477FF000u;                  // 65520 rounds to infinity
  constexpr uint32_t kSubnormalAlign = (127 + 23 - 24) << 23;  // its ulp is 2^-24
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t code;
  if (magnitude > 0x7F800000u) {
    code = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  } else if (magnitude >= kOverflow) {
    code = 0x7C00u;
  } else if (magnitude < kSmallestNormal) {
    float aligned, align;
    memcpy(&aligned, &magnitude, sizeof(aligned));
    memcpy(&align, &kSubnormalAlign, sizeof(align));
    aligned += align;
    memcpy(&code, &aligned, sizeof(code));
    code -= kSubnormalAlign;
  } else {
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    code = (rounded >> 13) - (112u << 10);
  }
  return {static_cast<uint16_t>(sign | code)};
}

}  // namespace rocm_kernels
