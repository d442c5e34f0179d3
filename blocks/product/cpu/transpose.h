// Transposition of as many vectors as a vector has lanes of 32 bits. Part of the bodies of the CPU
// products (see common/cpu/isa.h): no include guard.

// The lanes of a and b in turn: a0 b0 a1 b1 ..., whose first half goes to `low`.
#if ROCM_KERNELS_CPU_AVX512
ROCM_KERNELS_VECTOR void interleave(__m512i a, __m512i b, __m512i& low, __m512i& high) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  low = _mm512_permutex2var_epi32(a, first, b);
  high = _mm512_permutex2var_epi32(a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b);
}
ROCM_KERNELS_VECTOR void interleave(F32 a, F32 b, F32& low, F32& high) {
  __m512i l, h;
  interleave(_mm512_castps_si512(a), _mm512_castps_si512(b), l, h);
  low = _mm512_castsi512_ps(l);
  high = _mm512_castsi512_ps(h);
}
#elif ROCM_KERNELS_CPU_AVX2
ROCM_KERNELS_VECTOR void interleave(F32 a, F32 b, F32& low, F32& high) {
  const F32 evens = _mm256_unpacklo_ps(a, b), odds = _mm256_unpackhi_ps(a, b);
  low = _mm256_permute2f128_ps(evens, odds, 0x20);
  high = _mm256_permute2f128_ps(evens, odds, 0x31);
}
#elif ROCM_KERNELS_CPU_NEON
ROCM_KERNELS_VECTOR void interleave(F32 a, F32 b, F32& low, F32& high) {
  low = vzip1q_f32(a, b);
  high = vzip2q_f32(a, b);
}
#else
ROCM_KERNELS_VECTOR void interleave(F32Sums::Sum a, F32Sums::Sum b, F32Sums::Sum& low,
                                    F32Sums::Sum& high) {
  low = F32Sums::Sum{a[0], b[0], a[1], b[1]};
  high = F32Sums::Sum{a[2], b[2], a[3], b[3]};
}
#endif

// Lane j of row i becomes lane i of row j. Seen as one number, row and lane, an element's place
// turns by one bit a round: the rows' upper half meets the lower.
template <int kRows, class Vector>
ROCM_KERNELS_VECTOR void transpose(Vector (&rows)[kRows]) {
  ROCM_KERNELS_UNROLL
  for (int round = 1; round < kRows; round *= 2) {
    Vector turned[kRows];
    ROCM_KERNELS_UNROLL
    for (int i = 0; i < kRows / 2; ++i) {
      interleave(rows[i], rows[i + kRows / 2], turned[2 * i], turned[2 * i + 1]);
    }
    ROCM_KERNELS_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i] = turned[i];
  }
}
