// vector.h in AVX2, FMA and F16C.

constexpr int kLanes = 8;
using F32 = __m256;

ROCM_KERNELS_VECTOR F32 set1(float scalar) { return _mm256_set1_ps(scalar); }

ROCM_KERNELS_VECTOR F32 load(const float* p) { return _mm256_loadu_ps(p); }
ROCM_KERNELS_VECTOR F32 load(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
ROCM_KERNELS_VECTOR F32 load(const BFloat16* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// The low 16 bits of each lane, in order; they must hold the whole lane's value.
ROCM_KERNELS_VECTOR __m128i narrow_to_16(__m256i lanes) {
  return _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
}

ROCM_KERNELS_VECTOR F32 store(float* p, F32 v) {
  _mm256_storeu_ps(p, v);
  return v;
}
ROCM_KERNELS_VECTOR F32 store(Float16* p, F32 v) {
  const __m128i halves = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
  return _mm256_cvtph_ps(halves);
}
ROCM_KERNELS_VECTOR F32 store(BFloat16* p, F32 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_blendv_epi8(_mm256_add_epi32(bits, half), quiet, nan), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_to_16(rounded));
  return _mm256_castsi256_ps(_mm256_slli_epi32(rounded, 16));
}

ROCM_KERNELS_VECTOR F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
ROCM_KERNELS_VECTOR F32 round_nearest(F32 v) {
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ROCM_KERNELS_VECTOR F32 clamp(F32 v, float limit) {
  return _mm256_max_ps(_mm256_min_ps(v, set1(limit)), set1(-limit));
}
// VMAXPS returns its second operand when either is NaN.
ROCM_KERNELS_VECTOR F32 max_magnitude(F32 v, F32 largest) {
  return _mm256_max_ps(_mm256_andnot_ps(set1(-0.0f), v), largest);
}
ROCM_KERNELS_VECTOR F32 where_negative(F32 v, F32 a, F32 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_LT_OQ));
}

ROCM_KERNELS_VECTOR F32 times_power_of_two(F32 v, F32 n) {
  // n may be 128, which no float exponent holds: the last factor of two comes apart.
  const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(n, set1(-124.0f)) - set1(1.0f));
  const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(exponent, 23));
  return _mm256_castsi256_ps(bits) * set1(2.0f);
}

ROCM_KERNELS_VECTOR float sum(F32 v) {
  __m128 lanes = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  lanes = _mm_add_ps(lanes, _mm_movehl_ps(lanes, lanes));
  return _mm_cvtss_f32(_mm_add_ss(lanes, _mm_shuffle_ps(lanes, lanes, 1)));
}
ROCM_KERNELS_VECTOR float largest(F32 v) {
  __m128 lanes = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  lanes = _mm_max_ps(lanes, _mm_movehl_ps(lanes, lanes));
  return _mm_cvtss_f32(_mm_max_ss(lanes, _mm_shuffle_ps(lanes, lanes, 1)));
}
