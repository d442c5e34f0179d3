// vector.h in AArch64 Advanced SIMD.

constexpr int kLanes = 4;
using F32 = float32x4_t;

ROCM_KERNELS_VECTOR F32 set1(float scalar) { return vdupq_n_f32(scalar); }

ROCM_KERNELS_VECTOR F32 load(const float* p) { return vld1q_f32(p); }
ROCM_KERNELS_VECTOR F32 load(const Float16* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
ROCM_KERNELS_VECTOR F32 load(const BFloat16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
}

ROCM_KERNELS_VECTOR F32 store(float* p, F32 v) {
  vst1q_f32(p, v);
  return v;
}
ROCM_KERNELS_VECTOR F32 store(Float16* p, F32 v) {
  const float16x4_t halves = vcvt_f16_f32(v);
  vst1_u16(&p->bits, vreinterpret_u16_f16(halves));
  return vcvt_f32_f16(halves);
}
ROCM_KERNELS_VECTOR F32 store(BFloat16* p, F32 v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t half = vaddq_u32(odd, vdupq_n_u32(0x7FFF));
  const uint32x4_t number = vceqq_f32(v, v);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  const uint16x4_t halves = vshrn_n_u32(vbslq_u32(number, vaddq_u32(bits, half), quiet), 16);
  vst1_u16(&p->bits, halves);
  return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
}

ROCM_KERNELS_VECTOR F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
ROCM_KERNELS_VECTOR F32 round_nearest(F32 v) { return vrndnq_f32(v); }
ROCM_KERNELS_VECTOR F32 clamp(F32 v, float limit) {
  return vmaxq_f32(vminq_f32(v, set1(limit)), set1(-limit));
}
ROCM_KERNELS_VECTOR F32 max_magnitude(F32 v, F32 largest) {
  const F32 magnitude = vabsq_f32(v);
  return vbslq_f32(vcgtq_f32(magnitude, largest), magnitude, largest);
}
ROCM_KERNELS_VECTOR F32 where_negative(F32 v, F32 a, F32 b) {
  return vbslq_f32(vcltzq_f32(v), a, b);
}

ROCM_KERNELS_VECTOR F32 times_power_of_two(F32 v, F32 n) {
  // n may be 128, which no float exponent holds: the last factor of two comes apart.
  const int32x4_t exponent = vcvtq_s32_f32(vmaxq_f32(n, set1(-124.0f)) - set1(1.0f));
  const int32x4_t bits = vaddq_s32(vreinterpretq_s32_f32(v), vshlq_n_s32(exponent, 23));
  return vreinterpretq_f32_s32(bits) * set1(2.0f);
}

ROCM_KERNELS_VECTOR float sum(F32 v) { return vaddvq_f32(v); }
ROCM_KERNELS_VECTOR float largest(F32 v) { return vmaxvq_f32(v); }
