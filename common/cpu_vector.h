// The vectors that CPU kernels compute with, included by a kernel's body (see cpu_isa.h) in the
// namespace and instruction set that it is compiled for. No include guard, for that reason.
//
//   F32                          kLanes floats; + - * / and unary - work on it
//   set1(s)                      s in every lane
//   load(p), load(p, n)          kLanes, or n < kLanes, elements at p as floats; missing lanes are
//   0 store(p, v), store(p, v, n)  v rounded to nearest even to p's type; returns what load would
//                                give back. To FP8: saturates, keeps NaN, returns nothing
//   fma(a, b, c)                 a * b + c, fused where the machine can
//   abs(v), round_nearest(v)     |v| < 2^22 for the latter
//   min_keep_nan(v, limit), max_keep_nan(v, limit)  NaN in v stays
//   max_ignore_nan(v, largest)                      NaN in v gives `largest`
//   where_negative(v, a, b)      a where v < 0, b elsewhere
//   times_power_of_two(v, n)     v * 2^n for v in [0.5, 2), whole n in [-124, 128]; may be infinite
//   sum(v), largest(v)           over the lanes
//
// Element types: float, Float16, BFloat16 and, to store only, Float8E4M3<kFnuz>.
//
// FP8 is rounded by the float adder: adding 2^(e + 20) to a magnitude of exponent e leaves an ulp
// of 2^(e - 3), FP8's step there; below the smallest normal FP8 number e stays, and so does the
// step. The mantissa of the sum then counts steps, and e counts 8 steps more for each power of two.

#define ROCM_KERNELS_VECTOR inline __attribute__((always_inline))

template <bool kFnuz>
struct Fp8Fields {
  static constexpr int kLargest = kFnuz ? 0x43700000 : 0x43E00000;  // 240, 448
  static constexpr int kSmallestNormal = (127 + 1 - (kFnuz ? 8 : 7)) << 23;
  static constexpr int kExponentMask = 0x7F800000;
  static constexpr int kAlign = 20 << 23;
  static constexpr int kCodeBias = (kSmallestNormal + kAlign) >> 20;
  static constexpr int kNan = kFnuz ? 0x80 : 0x7F;
};

#if ROCM_KERNELS_CPU_AVX512
#include "cpu_vector_avx512.h"
#elif ROCM_KERNELS_CPU_AVX2
#include "cpu_vector_avx2.h"
#elif ROCM_KERNELS_CPU_NEON
#include "cpu_vector_neon.h"
#else
#include "cpu_vector_portable.h"
#endif

#if !ROCM_KERNELS_CPU_AVX512
// Without masks, the remainder of a row goes through a small array.
template <class T>
ROCM_KERNELS_VECTOR F32 load(const T* p, int n) {
  T lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

template <class T>
ROCM_KERNELS_VECTOR F32 store(T* p, F32 v, int n) {
  T lanes[kLanes];
  const F32 stored = store(lanes, v);
  __builtin_memcpy(p, lanes, n * sizeof(T));
  return stored;
}

template <bool kFnuz>
ROCM_KERNELS_VECTOR void store(Float8E4M3<kFnuz>* p, F32 v, int n) {
  Float8E4M3<kFnuz> lanes[kLanes];
  store(lanes, v);
  __builtin_memcpy(p, lanes, n);
}
#endif

// load and store of a whole vector, or of the n elements that are left.
template <bool kWhole, class T>
ROCM_KERNELS_VECTOR F32 load_lanes(const T* p, int n) {
  if constexpr (kWhole) return load(p);
  return load(p, n);
}

template <bool kWhole, class T>
ROCM_KERNELS_VECTOR void store_lanes(T* p, F32 v, int n) {
  if constexpr (kWhole) {
    store(p, v);
  } else {
    store(p, v, n);
  }
}
