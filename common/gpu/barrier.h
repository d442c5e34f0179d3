// The barriers of a block's threads (a workgroup's work items) and of a wave's lanes.
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

// All lanes of the wave are here and see what each other wrote to LDS.
ROCM_KERNELS_DEVICE void wave_barrier() {
#if defined(__CUDACC__)
  __syncwarp();
#else
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
#endif
}

}  // namespace rocm_kernels
