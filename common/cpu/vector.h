// The vectors that CPU kernels compute with, included by a kernel's body (see isa.h) in the
// namespace and instruction set that it is compiled for: once for each, so each_isa.h and amx_isa.h
// lift its include guard after every copy.
//
// clang-format off
//   F32                            kLanes floats; + - * / and unary - work on it
//   set1(s)                        s in every lane
//   load(p), load(p, n)            kLanes, or n < kLanes, elements at p as floats; missing lanes are 0
//   store(p, v), store(p, v, n)    v rounded to nearest even to p's type; returns what load would
//                                  give back
//   fma(a, b, c)                   a * b + c, fused where the machine can
//   round_nearest(v)               |v| < 2^22
//   clamp(v, limit)                v within +-limit; NaN gives anything
//   max_magnitude(v, largest)      max(|v|, largest); NaN in v gives `largest`
//   where_negative(v, a, b)        a where v < 0, b elsewhere
//   times_power_of_two(v, n)       v * 2^n for v in [0.5, 2) and whole n in [-129, 129]: infinite
//                                  where float32 ends, at most 2^-123 where the product is less
//   sum(v), largest(v)             over the lanes
// clang-format on
//
// Element types: float, Float16, BFloat16. block.h adds FP8.

#ifndef ROCM_KERNELS_CPU_VECTOR_INCLUDED
#define ROCM_KERNELS_CPU_VECTOR_INCLUDED

#define ROCM_KERNELS_VECTOR inline __attribute__((always_inline))

#if ROCM_KERNELS_CPU_AVX512
#include "vector_avx512.h"
#elif ROCM_KERNELS_CPU_AVX2
#include "vector_avx2.h"
#elif ROCM_KERNELS_CPU_NEON
#include "vector_neon.h"
#else
#include "vector_portable.h"
#endif

// The remainder of a row goes through a small array.
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

#endif
