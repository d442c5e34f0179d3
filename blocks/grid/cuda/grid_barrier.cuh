// All blocks of a kernel meet between two of its phases.
//
//   arrive   a counter of the grid: one more is here
//   wait     until it has grown by a grid's blocks
//
// What a block's threads stored before arrive() is seen by loads from L2 (ld.global.cg) behind
// wait(). All blocks must run at once, which a cooperative launch makes sure of.
#pragma once

#include <cstdint>

#include "../../../common/cuda/shared_memory.cuh"

namespace rocm_kernels::cuda {

// Of each block's first kThreads threads, which meet at named barrier kId. `counter` is zero before
// the kernel, and its alone.
template <int kId, int kThreads>
class GridBarrier {
 public:
  __device__ __forceinline__ explicit GridBarrier(uint32_t* counter) : counter_(counter) {}

  __device__ __forceinline__ void arrive() {
    expected_ += gridDim.x;
    named_barrier<kId, kThreads>();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter_) : "memory");
    }
  }

  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) {
      uint32_t arrived;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(arrived)
                     : "l"(counter_)
                     : "memory");
      } while (arrived < expected_);
    }
    named_barrier<kId, kThreads>();
  }

 private:
  uint32_t* const counter_;
  uint32_t expected_ = 0;
};

}  // namespace rocm_kernels::cuda
