// Compiles ROCM_KERNELS_CPU_BODY once, for AMX, in rocm_kernels::cpu::amx; see isa.h and
// each_isa.h, whose traps are its too. The body finds ROCM_KERNELS_CPU_AVX512 defined as 1, for
// what it includes. No include guard.

#ifndef ROCM_KERNELS_CPU_BODY
#error "define ROCM_KERNELS_CPU_BODY as the path of the kernel's body, seen from common/cpu/"
#endif

#include "intrinsics.h"

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl," \
                          "avx512bf16,avx512vbmi,amx-tile,amx-bf16"))),                \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,amx-tile,amx-bf16")
#endif
#define ROCM_KERNELS_CPU_AVX512 1
namespace rocm_kernels {
namespace cpu {
namespace amx {
namespace {
#include ROCM_KERNELS_CPU_BODY
}
}  // namespace amx
}  // namespace cpu
}  // namespace rocm_kernels
#undef ROCM_KERNELS_CPU_AVX512
#undef ROCM_KERNELS_CPU_VECTOR_INCLUDED
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#undef ROCM_KERNELS_CPU_BODY
