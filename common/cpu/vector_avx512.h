// vector.h in AVX-512.

constexpr int kLanes = 16;
using F32 = __m512;

ROCM_KERNELS_VECTOR F32 set1(float scalar) { return _mm512_set1_ps(scalar); }

ROCM_KERNELS_VECTOR F32 from_bfloat16(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

ROCM_KERNELS_VECTOR F32 load(const float* p) { return _mm512_loadu_ps(p); }
ROCM_KERNELS_VECTOR F32 load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
ROCM_KERNELS_VECTOR F32 load(const BFloat16* p) {
  return from_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// The bits of v rounded to bfloat16, in the high half of each lane. VCVTNEPS2BF16 would be shorter,
// but takes subnormal numbers for zero.
ROCM_KERNELS_VECTOR __m512i bfloat16_bits(F32 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(_mm512_add_epi32(bits, half), nan, quiet);
}

ROCM_KERNELS_VECTOR F32 keep_high_halves(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF0000)));
}

ROCM_KERNELS_VECTOR F32 store(float* p, F32 v) {
  _mm512_storeu_ps(p, v);
  return v;
}
ROCM_KERNELS_VECTOR F32 store(Float16* p, F32 v) {
  const __m256i halves = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
  return _mm512_cvtph_ps(halves);
}
ROCM_KERNELS_VECTOR F32 store(BFloat16* p, F32 v) {
  const __m512i bits = bfloat16_bits(v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  return keep_high_halves(bits);
}
ROCM_KERNELS_VECTOR F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
ROCM_KERNELS_VECTOR F32 round_nearest(F32 v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ROCM_KERNELS_VECTOR F32 clamp(F32 v, float limit) {
  constexpr int kSmallerMagnitudeKeepSign = 0b0010;
  return _mm512_range_ps(v, set1(limit), kSmallerMagnitudeKeepSign);
}
// VMAXPS returns its second operand when either is NaN.
ROCM_KERNELS_VECTOR F32 max_magnitude(F32 v, F32 largest) {
  return _mm512_max_ps(_mm512_abs_ps(v), largest);
}
ROCM_KERNELS_VECTOR F32 where_negative(F32 v, F32 a, F32 b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OQ), b, a);
}
ROCM_KERNELS_VECTOR F32 times_power_of_two(F32 v, F32 n) { return _mm512_scalef_ps(v, n); }

ROCM_KERNELS_VECTOR float sum(F32 v) { return _mm512_reduce_add_ps(v); }
ROCM_KERNELS_VECTOR float largest(F32 v) { return _mm512_reduce_max_ps(v); }
