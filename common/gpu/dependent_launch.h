// Programmatic dependent launch: NVIDIA's sm_90 and later start a kernel while its predecessor in
// the stream ends. On AMD kernels run one after the other, and nothing here does anything.
//
// A kernel launched with Launch::early (launch.h) calls wait_for_previous_kernel() in every thread
// that reads what a kernel may have written, or stores anything. One exception: where a kernel
// before it has waited first and then allowed the next (a gate), all that is older than the gate is
// complete, and may be read without waiting.
#pragma once

#include "device.h"

namespace rocm_kernels {

// Lets the next kernel start as this one's blocks leave.
ROCM_KERNELS_DEVICE void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once the previous kernel is done and its stores are visible.
ROCM_KERNELS_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Both, at the start of a kernel that has nothing to do meanwhile.
ROCM_KERNELS_DEVICE void begin_after_previous_kernel() {
  allow_next_kernel();
  wait_for_previous_kernel();
}

}  // namespace rocm_kernels
