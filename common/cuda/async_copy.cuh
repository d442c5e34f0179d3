// Small copies from memory to shared memory that pass no register (cp.async), sm_80 and later. The
// TMA's boxes: tma.cuh.
#pragma once

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

// The first `bytes` of 16 bytes to shared memory, and zeros behind them.
__device__ __forceinline__ void copy_vector(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Four bytes to shared memory; zero where `there` is false.
__device__ __forceinline__ void copy_word(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}

// Asks for the 128 bytes around an address to be brought to L2.
__device__ __forceinline__ void bring_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Ends a group of copies; waits until at most kPending groups are under way.
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  static_assert(kPending > 0, "no group under way is not no copy: copies_wait_all");
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all of this thread's copies, those that no group has yet too.
__device__ __forceinline__ void copies_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#if __CUDA_ARCH__ >= 900
// Arrives at an mbarrier once this thread's earlier copies have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
