// block.h in AVX-512.

// Whether the even columns of 32 lie in one vector and the odd ones in the next.
template <class Order>
constexpr bool kSplit = false;
template <>
constexpr bool kSplit<BFloat16> = true;

template <class Order>
ROCM_KERNELS_VECTOR Block load_block(const float* p) {
  Block block;
  for (int i = 0; i < kVectors; ++i) block.v[i] = load(p + i * kLanes);
  if (!kSplit<Order>) return block;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  Block split;
  for (int i = 0; i < kVectors; i += 2) {
    split.v[i] = _mm512_permutex2var_ps(block.v[i], even, block.v[i + 1]);
    split.v[i + 1] = _mm512_permutex2var_ps(block.v[i], odd, block.v[i + 1]);
  }
  return split;
}

template <class Order>
ROCM_KERNELS_VECTOR Block load_block(const Float16* p) {
  Block block;
  for (int i = 0; i < kVectors; ++i) block.v[i] = load(p + i * kLanes);
  return block;
}

template <class Order>
ROCM_KERNELS_VECTOR Block load_block(const BFloat16* p) {
  Block block;
  for (int i = 0; i < kVectors; i += 2) {
    const __m512i halves = _mm512_loadu_si512(p + i * kLanes);
    block.v[i] = _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
    block.v[i + 1] = keep_high_halves(halves);
  }
  return block;
}

template <class Order, class T>
ROCM_KERNELS_VECTOR Block store_block(T* p, const Block& block) {
  Block stored;
  for (int i = 0; i < kVectors; ++i) stored.v[i] = store(p + i * kLanes, block.v[i]);
  return stored;
}

template <class Order>
ROCM_KERNELS_VECTOR Block store_block(BFloat16* p, const Block& block) {
  static_assert(kSplit<Order>, "bfloat16 is stored from blocks in its own order");
  Block stored;
  for (int i = 0; i < kVectors; i += 2) {
    const __m512i even = bfloat16_bits(block.v[i]);
    const __m512i odd = bfloat16_bits(block.v[i + 1]);
    constexpr __mmask32 kOddColumns = 0xAAAAAAAA;
    _mm512_storeu_si512(p + i * kLanes,
                        _mm512_mask_blend_epi16(kOddColumns, _mm512_srli_epi32(even, 16), odd));
    stored.v[i] = keep_high_halves(even);
    stored.v[i + 1] = keep_high_halves(odd);
  }
  return stored;
}

// Which byte of a pair of vectors each of their 32 columns takes: the lowest of its lane.
template <bool kSplitColumns>
struct LowBytes {
  alignas(64) uint8_t index[64];
  constexpr LowBytes() : index() {
    for (int i = 0; i < 64; ++i) {
      const int column = i % 32;
      const int vector = kSplitColumns ? column % 2 : column / 16;
      const int lane = kSplitColumns ? column / 2 : column % 16;
      index[i] = static_cast<uint8_t>(64 * vector + 4 * lane);
    }
  }
};
template <bool kSplitColumns>
constexpr LowBytes<kSplitColumns> kLowBytes;

// Addends of the 15 exponents that FP8 has, each at the low 4 bits of its biased exponent.
template <bool kFnuz>
struct Fp8Addends {
  alignas(64) uint32_t bits[16];
  constexpr Fp8Addends() : bits() {
    for (uint32_t i = 0; i < 15; ++i) {
      const uint32_t exponent = Fp8Rounding<kFnuz>::kSmallestExponent + i;
      bits[exponent % 16] = Fp8Rounding<kFnuz>::addend(exponent << 23);
    }
  }
};
template <bool kFnuz>
constexpr Fp8Addends<kFnuz> kFp8Addends;

ROCM_KERNELS_VECTOR __m512i gather_bytes(const __m512i v[kVectors], __m512i index) {
  const __m512i first = _mm512_permutex2var_epi8(v[0], index, v[1]);
  const __m512i second = _mm512_permutex2var_epi8(v[2], index, v[3]);
  return _mm512_inserti64x4(first, _mm512_castsi512_si256(second), 1);
}

template <class Order, bool kFnuz>
ROCM_KERNELS_VECTOR void store_block(Float8E4M3<kFnuz>* p, const Block& block) {
  using Rounding = Fp8Rounding<kFnuz>;
  const __m512 addends = _mm512_load_ps(kFp8Addends<kFnuz>.bits);
  __m512i bits[kVectors], codes[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    constexpr int kSmallerMagnitude = 0b1010;
    const F32 largest = _mm512_castsi512_ps(_mm512_set1_epi32(Rounding::kLargest));
    const F32 magnitude = _mm512_range_ps(block.v[i], largest, kSmallerMagnitude);
    const __m512i exponent =
        _mm512_srli_epi32(_mm512_max_epi32(_mm512_castps_si512(magnitude),
                                           _mm512_set1_epi32(Rounding::kSmallestNormal)),
                          23);
    const F32 addend = _mm512_permutexvar_ps(exponent, addends);
    codes[i] = _mm512_castps_si512(_mm512_add_ps(magnitude, addend));
    bits[i] = _mm512_castps_si512(block.v[i]);
  }
  const __mmask16 nan = _mm512_cmp_ps_mask(block.v[0], block.v[1], _CMP_UNORD_Q) |
                        _mm512_cmp_ps_mask(block.v[2], block.v[3], _CMP_UNORD_Q);
  if (__builtin_expect(nan != 0, 0)) {
    for (int i = 0; i < kVectors; ++i) {
      codes[i] =
          _mm512_mask_mov_epi32(codes[i], _mm512_cmp_ps_mask(block.v[i], block.v[i], _CMP_UNORD_Q),
                                _mm512_set1_epi32(Rounding::kNan));
    }
  }
  const __m512i low_bytes = _mm512_load_si512(kLowBytes<kSplit<Order>>.index);
  const __m512i high_bytes = _mm512_or_si512(low_bytes, _mm512_set1_epi8(3));
  const __m512i code = gather_bytes(codes, low_bytes);
  const __m512i signs = gather_bytes(bits, high_bytes);
  // FNUZ has no -0: its bits mean NaN.
  const __m512i sign_bit = kFnuz ? _mm512_maskz_set1_epi8(_mm512_test_epi8_mask(code, code), -128)
                                 : _mm512_set1_epi8(-128);
  constexpr int kAOrBAndC = 0xF8;  // a | (b & c) of the operands a, b, c
  _mm512_storeu_si512(p, _mm512_ternarylogic_epi64(code, signs, sign_bit, kAOrBAndC));
}
