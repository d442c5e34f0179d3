// Loads and stores of single elements, whose type is known at run time alone: for kernels that any
// type may meet, not for fast ones.
#pragma once

#include "../core/dtype.h"
#include "device.h"

namespace rocm_kernels {

// Element `index` of data as float32; exact. FP4 counts its values, two to a byte, the even one in
// the low half.
ROCM_KERNELS_DEVICE float load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat16:
      return to_float(static_cast<const float16*>(data)[index]);
    case DType::kBFloat16:
      return to_float(static_cast<const bfloat16*>(data)[index]);
    case DType::kFloat8E4M3FN:
      return fp8_to_float<false>(static_cast<const uint8_t*>(data)[index]);
    case DType::kFloat8E4M3FNUZ:
      return fp8_to_float<true>(static_cast<const uint8_t*>(data)[index]);
    case DType::kFloat4E2M1x2: {
      // Sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
      const int code = static_cast<const uint8_t*>(data)[index / 2] >> (index % 2 * 4) & 0xF;
      const int exponent = code >> 1 & 3, mantissa = code & 1;
      const float value =
          exponent == 0 ? 0.5f * mantissa : (1.0f + 0.5f * mantissa) * (1 << exponent) * 0.5f;
      return code & 8 ? -value : value;
    }
  }
  return 0.0f;
}

// A scale of 8 exponent bits (E8M0): 2^(code - 127), NaN for 255.
ROCM_KERNELS_DEVICE float load_exponent(const uint8_t* code) {
  const uint32_t bits = *code == 255 ? 0x7FC00000u : *code == 0 ? 0x00400000u : *code << 23;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds once; float32, float16 or bfloat16.
ROCM_KERNELS_DEVICE void store_element(void* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DType::kFloat16) {
    static_cast<float16*>(data)[index] = from_float<float16>(value);
  } else {
    static_cast<bfloat16*>(data)[index] = from_float<bfloat16>(value);
  }
}

}  // namespace rocm_kernels
