// For public kernels with a distribution's HIP headers and device libraries, which are older than
// the compiler: what their headers declare and the libraries lack.
#pragma once
#include <hip/hip_runtime.h>

__device__ inline void workgroup_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
#define __syncthreads workgroup_barrier
#define rsqrtf __builtin_amdgcn_rsqf

typedef _Float16 __half;
struct __hip_bfloat16 {
  unsigned short data;
};
