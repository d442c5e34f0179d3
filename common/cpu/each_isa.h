// Compiles ROCM_KERNELS_CPU_BODY once for each instruction set; see isa.h. The body finds the
// set it is compiled for in one of ROCM_KERNELS_CPU_{PORTABLE,NEON,AVX2,AVX512}, defined as 1.
// No include guard: included once by each kernel's source. The copies have internal linkage, so
// that kernels may use one name for different things.

#ifndef ROCM_KERNELS_CPU_BODY
#error "define ROCM_KERNELS_CPU_BODY as the path of the kernel's body, seen from common/cpu/"
#endif

#include "intrinsics.h"

#define ROCM_KERNELS_CPU_PORTABLE 1
namespace rocm_kernels {
namespace cpu {
namespace portable {
namespace {
#include ROCM_KERNELS_CPU_BODY
}
}  // namespace portable
}  // namespace cpu
}  // namespace rocm_kernels
#undef ROCM_KERNELS_CPU_PORTABLE
#undef ROCM_KERNELS_CPU_VECTOR_INCLUDED

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#define ROCM_KERNELS_CPU_AVX2 1
namespace rocm_kernels {
namespace cpu {
namespace avx2 {
namespace {
#include ROCM_KERNELS_CPU_BODY
}
}  // namespace avx2
}  // namespace cpu
}  // namespace rocm_kernels
#undef ROCM_KERNELS_CPU_AVX2
#undef ROCM_KERNELS_CPU_VECTOR_INCLUDED
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl," \
                          "avx512bf16,avx512vbmi"))),                                  \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#endif
#define ROCM_KERNELS_CPU_AVX512 1
namespace rocm_kernels {
namespace cpu {
namespace avx512 {
namespace {
#include ROCM_KERNELS_CPU_BODY
}
}  // namespace avx512
}  // namespace cpu
}  // namespace rocm_kernels
#undef ROCM_KERNELS_CPU_AVX512
#undef ROCM_KERNELS_CPU_VECTOR_INCLUDED
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#elif defined(__aarch64__) && defined(__ARM_NEON)

#define ROCM_KERNELS_CPU_NEON 1
namespace rocm_kernels {
namespace cpu {
namespace neon {
namespace {
#include ROCM_KERNELS_CPU_BODY
}
}  // namespace neon
}  // namespace cpu
}  // namespace rocm_kernels
#undef ROCM_KERNELS_CPU_NEON
#undef ROCM_KERNELS_CPU_VECTOR_INCLUDED

#endif

#undef ROCM_KERNELS_CPU_BODY
