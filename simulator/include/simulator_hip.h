// Included first by `cdna-simulator compile`: what the HIP 5 headers of distributions expect of a
// compiler of their own age, and newer ones no longer have.
#pragma once

#if __has_include(<hip/hip_version.h>)
#include <hip/hip_version.h>
#endif

#if defined(__HIP__) && defined(HIP_VERSION_MAJOR) && HIP_VERSION_MAJOR < 6
// Device functions are read when host code is compiled, too.
typedef _Float16 simulator_half2 __attribute__((ext_vector_type(2)));
static inline __attribute__((device)) _Float16 __llvm_amdgcn_rcp_f16(_Float16 x) {
  return static_cast<_Float16>(__builtin_amdgcn_rcph(x));
}
static inline __attribute__((device)) simulator_half2 __llvm_amdgcn_rcp_2f16(simulator_half2 x) {
  return simulator_half2{__llvm_amdgcn_rcp_f16(x.x), __llvm_amdgcn_rcp_f16(x.y)};
}

// Their atomicInc and atomicDec declare an intrinsic that LLVM no longer has, and call it. The
// declaration becomes one of a function that nobody calls, and the call one of these.
static inline __attribute__((device)) unsigned simulator_inc(unsigned* p, unsigned most) {
  return __builtin_amdgcn_atomic_inc32(p, most, __ATOMIC_RELAXED, "agent");
}
static inline __attribute__((device)) unsigned simulator_dec(unsigned* p, unsigned most) {
  return __builtin_amdgcn_atomic_dec32(p, most, __ATOMIC_RELAXED, "agent");
}
#define simulator_inc_unsigned simulator_no_inc(unsigned
#define simulator_inc_address simulator_inc(address
#define simulator_dec_unsigned simulator_no_dec(unsigned
#define simulator_dec_address simulator_dec(address
#define __builtin_amdgcn_atomic_inc(first, second, ...) simulator_inc_##first, second)
#define __builtin_amdgcn_atomic_dec(first, second, ...) simulator_dec_##first, second)

#ifdef __HIP_DEVICE_COMPILE__
// Order: acquire 2, release 3, both 4, sequential 5. Scope: work-group 1, device 2, system 3.
__attribute__((device, used, weak)) void simulator_fence(unsigned, int order, int scope) __asm__(
    "__atomic_work_item_fence");
__attribute__((device, used, weak)) void simulator_fence(unsigned, int order, int scope) {
  (void)order;  // the strongest is right for all
  if (scope <= 1) {
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  } else if (scope == 2) {
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
  }
}
#endif
#endif
