// Thread block clusters of NVIDIA's sm_90 and later: blocks that run at the same time and reach
// each other's shared memory. Elsewhere a block is alone, and nothing here does anything.
//
// A block may write to another's shared memory only once that one runs: the first cluster_wait()
// tells. It must not leave while others may still write to its own: the last one tells.
#pragma once

#include "device.h"

namespace rocm_kernels {

// This block's number in its cluster.
ROCM_KERNELS_DEVICE int cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// How the threads of a warp reach a barrier.
enum class Warp { kTogether, kApart };

// The barrier of all threads of the cluster, in two halves: what was written before arriving is
// seen after waiting.
template <Warp kWarp = Warp::kTogether>
ROCM_KERNELS_DEVICE void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kWarp == Warp::kTogether) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  }
#endif
}
template <Warp kWarp = Warp::kTogether>
ROCM_KERNELS_DEVICE void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kWarp == Warp::kTogether) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }
#endif
}

// Writes to the same place of another block's shared memory.
ROCM_KERNELS_DEVICE void store_in_cluster(float& place, float value, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(&place))),
      "r"(rank), "f"(value)
      : "memory");
#else
  (void)place, (void)value, (void)rank;
#endif
}

}  // namespace rocm_kernels
