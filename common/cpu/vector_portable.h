// vector.h in plain C++: one lane.

constexpr int kLanes = 1;
using F32 = float;

ROCM_KERNELS_VECTOR F32 set1(float scalar) { return scalar; }
ROCM_KERNELS_VECTOR F32 load(const float* p) { return *p; }
ROCM_KERNELS_VECTOR F32 load(const Float16* p) { return to_float(*p); }
ROCM_KERNELS_VECTOR F32 load(const BFloat16* p) { return to_float(*p); }

ROCM_KERNELS_VECTOR F32 store(float* p, F32 v) { return *p = v; }

ROCM_KERNELS_VECTOR F32 store(Float16* p, F32 v) {
  *p = to_float16(v);
  return to_float(*p);
}

ROCM_KERNELS_VECTOR F32 store(BFloat16* p, F32 v) {
  *p = to_bfloat16(v);
  return to_float(*p);
}

ROCM_KERNELS_VECTOR F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
ROCM_KERNELS_VECTOR F32 clamp(F32 v, float limit) {
  const F32 below = v < limit ? v : limit;
  return below > -limit ? below : -limit;
}
ROCM_KERNELS_VECTOR F32 max_magnitude(F32 v, F32 largest) {
  const F32 magnitude = __builtin_fabsf(v);
  return magnitude > largest ? magnitude : largest;
}
ROCM_KERNELS_VECTOR F32 where_negative(F32 v, F32 a, F32 b) { return v < 0.0f ? a : b; }

// 1.5 * 2^23: its ulp is 1, so the adder rounds.
ROCM_KERNELS_VECTOR F32 round_nearest(F32 v) { return (v + 0x1.8p23f) - 0x1.8p23f; }

ROCM_KERNELS_VECTOR F32 times_power_of_two(F32 v, F32 n) {
  // n may be 128, which no float exponent holds: the last factor of two comes apart.
  const int32_t exponent = static_cast<int32_t>(n > -124.0f ? n : -124.0f) - 1;
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return v * power * 2.0f;
}

ROCM_KERNELS_VECTOR float sum(F32 v) { return v; }
ROCM_KERNELS_VECTOR float largest(F32 v) { return v; }
