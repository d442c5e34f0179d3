// From scores to exponentials with a running maximum; part of attention_body.h, so no include
// guard.

#include "../../blocks/rows/cpu/activation.h"

static_assert(kKeyBlock % kBlock == 0, "");

// The score of a key that a row does not see, and the least that counts as a score: the exponential
// of their difference is 0, and so is that of a row that has seen nothing.
constexpr float kUnseen = -3e38f;
constexpr float kLeast = -1e38f;

// ---- Vectors -----------------------------------------------------------------------------------

// The second where either is NaN.
#if ROCM_KERNELS_CPU_AVX512
ROCM_KERNELS_VECTOR F32 larger_of(F32 a, F32 b) { return _mm512_max_ps(a, b); }
#elif ROCM_KERNELS_CPU_AVX2
ROCM_KERNELS_VECTOR F32 larger_of(F32 a, F32 b) { return _mm256_max_ps(a, b); }
#else
ROCM_KERNELS_VECTOR F32 larger_of(F32 a, F32 b) { return where_negative(b - a, a, b); }
#endif

ROCM_KERNELS_VECTOR float largest_value(const Block& a) {
  return largest(larger_of(larger_of(a.v[0], a.v[1]), larger_of(a.v[2], a.v[3])));
}

// e^v for v <= 0: 0 below -86, and NaN for NaN.
ROCM_KERNELS_VECTOR Block exp_of_negative(const Block& v) {
  const Block power = fma(v, all(0.0f), exp(v));
  return where_negative(v + all(86.0f), all(0.0f), power);
}

// As Weight, in the order of the lanes.
template <class Weight>
ROCM_KERNELS_VECTOR void store_weights(Weight* p, const Block& v) {
  for (int i = 0; i < kVectors; ++i) store(p + i * kLanes, v.v[i]);
}
#if ROCM_KERNELS_CPU_AVX512
// This instruction takes subnormal numbers for zero: exponentials are none.
ROCM_KERNELS_VECTOR void store_weights(BFloat16* p, const Block& v) {
  for (int i = 0; i < kVectors; i += 2) {
    _mm512_storeu_si512(p + i * kLanes, (__m512i)_mm512_cvtne2ps_pbh(v.v[i + 1], v.v[i]));
  }
}
#endif

// tanh to 2e-7: near 0 an odd polynomial, since 1 - 2 / (e^2x + 1) cancels. NaN for NaN.
ROCM_KERNELS_VECTOR Block tanh(const Block& x) {
  Block least = all(-10.0f);  // beyond it is 1, and infinity times 0 were NaN
  const Block negative = where_negative(x, x, -x);
  for (int i = 0; i < kVectors; ++i) least.v[i] = larger_of(least.v[i], negative.v[i]);
  const Block magnitude = -least;
  const Block square = magnitude * magnitude;
  Block p = all(0.00205446454f);
  p = fma(p, square, all(-0.00807907525f));
  p = fma(p, square, all(0.0216602553f));
  p = fma(p, square, all(-0.0539392456f));
  p = fma(p, square, all(0.133331448f));
  p = fma(p, square, all(-0.333333284f));
  const Block near = fma(p * square, magnitude, magnitude);
  const Block more = fma(magnitude, all(0.0f), exp(magnitude + magnitude));  // NaN for NaN
  const Block far = all(1.0f) - all(2.0f) / (more + all(1.0f));
  const Block result = where_negative(magnitude - all(0.65f), near, far);
  return where_negative(x, -result, result);
}

// ---- Softmax -----------------------------------------------------------------------------------

// Which keys rows see, and what becomes of a score.
struct Sight {
  int64_t group, offset;  // row i * group + g stands at key i + offset
  int64_t left, right;
  float factor, softcap;
};

// Makes exponentials of the scores of keys [first, first + count), as Weight in the same rows of
// memory, and rescales what there is.
template <class Weight>
void softmax(const Sight& sight, const AttentionTask& task, int64_t first, int64_t count,
             float* scores, AttentionState state, int64_t value_stride) {
  const Block factor = all(sight.factor);
  for (int64_t r = 0; r < task.rows; ++r, scores += kKeyBlock) {
    const int64_t position = (task.row + r) / sight.group + sight.offset - first;
    const int64_t begin = sight.left < 0 ? 0 : larger(position - sight.left, 0);
    const int64_t end = sight.right < 0 ? count : smaller(position + sight.right + 1, count);
    constexpr int kBlocks = kKeyBlock / kBlock;
    Block s[kBlocks], most = all(kUnseen);
    for (int i = 0; i < kBlocks; ++i) {
      s[i] = load_block<float>(scores + i * kBlock) * factor;
      if (sight.softcap > 0) {
        s[i] = tanh(s[i] * all(1.0f / sight.softcap)) * all(sight.softcap);
      }
    }
    if (begin > 0 || end < kKeyBlock) {
      for (int i = 0; i < kBlocks; ++i) store_block<float>(scores + i * kBlock, s[i]);
      for (int64_t j = 0; j < smaller(begin, kKeyBlock); ++j) scores[j] = kUnseen;
      for (int64_t j = larger(end, 0); j < kKeyBlock; ++j) scores[j] = kUnseen;
      for (int i = 0; i < kBlocks; ++i) s[i] = load_block<float>(scores + i * kBlock);
    }
    for (const Block& each : s) {
      for (int i = 0; i < kVectors; ++i) most.v[i] = larger_of(most.v[i], each.v[i]);
    }
    float now = largest_value(most);
    if (now < state.most[r]) now = state.most[r];
    const float base = now < kLeast ? kLeast : now;
    Block total = all(0.0f);
    for (int i = 0; i < kBlocks; ++i) {
      const Block p = exp_of_negative(s[i] - all(base));
      store_weights(reinterpret_cast<Weight*>(scores) + i * kBlock, p);
      total = total + p;
    }
    if (now != state.most[r]) {
      float by[kBlock];
      store_block<float>(by, exp_of_negative(all(state.most[r] - base)));
      state.most[r] = now;
      state.total[r] *= by[0];
      float* const values = state.values + r * value_stride;
      for (int64_t e = 0; e < value_stride; e += kLanes) {
        store(values + e, load(values + e) * set1(by[0]));
      }
    }
    state.total[r] += sum(total);
  }
}
