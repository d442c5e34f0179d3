// Programmatic dependent launch: NVIDIA's sm_90 and later start a kernel while its predecessor in
// the stream ends. On AMD kernels run one after the other, and nothing here does anything.
//
// A kernel launched with Launch::early (launch.h) calls wait_for_previous_kernel() in every thread
// that reads what a kernel may have written, or stores anything. Whatever the caller gives may have
// been written by the kernel before, which may be an early one itself: activations, routing, and
// weights with their scales and biases.
//
// Weights that the caller knows to be settled (GemmArgs::w_is_settled) need not wait.
//
// Another exception: a gate, a kernel of this launcher's own that waits first and allows the next
// one then, in every thread. When a later kernel runs, all that is older than the gate is complete,
// and may be read without waiting, from L2 alone: by load_older(), by TMA (tma.cuh) or
// by 16-byte copies (cp.async.cg). Nothing but the wait makes stores of other multiprocessors
// visible in L1, which may hold a line as it was before them. So a plain load comes after the wait,
// and so does a copy of 4 bytes (cp.async.ca), which passes L1. Bringing anything to L2 is always
// allowed.
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

// Loads what is older than a gate, before waiting.
template <typename T>
ROCM_KERNELS_DEVICE T load_older(const T* from) {
#if defined(__CUDA_ARCH__)
  return __ldcg(from);
#else
  return *from;
#endif
}

// Both, at the start of a kernel that has nothing to do meanwhile.
ROCM_KERNELS_DEVICE void begin_after_previous_kernel() {
  allow_next_kernel();
  wait_for_previous_kernel();
}

}  // namespace rocm_kernels
