// Waits and fences between the waves of a workgroup on CDNA3 and CDNA4.
#pragma once

#include "buffer.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// All waves of the workgroup are here, and see what each other wrote to LDS and to memory. (The
// barrier of older HIP headers is a function that is not inlined: a call would spill scalar
// registers.)
ROCM_KERNELS_DEVICE void workgroup_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// A counter in LDS that one wave sets and others wait for.
class WaveCounter {
 public:
  explicit ROCM_KERNELS_DEVICE WaveCounter(uint32_t* counter) : counter_(counter) {}

  ROCM_KERNELS_DEVICE void wait_for(uint32_t count) const {
    while (static_cast<uint32_t>(__builtin_amdgcn_readfirstlane(__hip_atomic_load(
               counter_, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP))) < count) {
      __builtin_amdgcn_s_sleep(1);
    }
  }
  // After whatever all lanes of the wave read and wrote.
  ROCM_KERNELS_DEVICE void set(uint32_t count, int lane) const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    if (lane == 0) {
      __hip_atomic_store(counter_, count, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    }
  }

 private:
  uint32_t* counter_;
};

#endif

}  // namespace rocm_kernels::cdna
