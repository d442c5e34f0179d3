// The barrier of a block's threads (a workgroup's work items).
#pragma once

#include "device.h"

namespace rocm_kernels {

// All threads of the block are here and see what each other wrote to LDS. Nothing is said of other
// memory: on AMD global loads stay in flight, where __syncthreads() may wait for them.
ROCM_KERNELS_DEVICE void lds_barrier() {
#if defined(__CUDACC__)
  __syncthreads();
#else
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#endif
}

}  // namespace rocm_kernels
